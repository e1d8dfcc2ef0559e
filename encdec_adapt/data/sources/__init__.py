"""Sources of documents: files, TFDS, templates, mixtures; contamination.

A source is a class that is registered under a kind
(`document_source.register`). No module here imports SeqIO; TensorFlow is
imported when a source `tfds:` or `seqio:` is opened.
"""
