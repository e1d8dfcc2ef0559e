"""Sources of documents: files, TFDS, templates, mixtures; contamination.

A source is a class registered under a kind (`document_source.register`). No
module here imports SeqIO; opening a source `tfds:` or `seqio:` imports
TensorFlow.
"""
