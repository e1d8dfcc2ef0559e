"""Training objectives: examples from documents, and framing of rows.

An objective is an example maker class, listed in `OBJECTIVES` of its module.
`example_maker` has the base classes, `objective_names` parses
`config.data.objective`, and `framing` makes rows from examples.

Modules here must not import TensorFlow, SeqIO or JAX.
"""
