"""Text sources, and packed records made of them.

`sources` and `seqio` read documents, `making` turns them into examples, packs
these and writes shards, and `records` is what a training job reads.
`data_section` holds the keys of `config.data`.
"""
