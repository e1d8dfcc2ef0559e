"""Text sources, and packed records made of them.

`sources` and `seqio` read documents, `making` turns them into packed shards of
examples, and `records` reads these for training. `data_section` holds the keys
of `config.data`.
"""
