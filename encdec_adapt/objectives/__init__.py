"""Objectives: what a model learns from a document, and how a row is framed.

An objective is a class of example makers in a module of its own, listed in the
module's `OBJECTIVES` (`example_maker` has the base classes, `objective_names`
reads `config.data.objective`). `framing` puts examples into rows.

No module here imports TensorFlow, SeqIO or jax.
"""
