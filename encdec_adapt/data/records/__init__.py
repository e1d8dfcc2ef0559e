"""Record sets on disk and their rows in batches.

Specs, manifests and the reader (`record_sets`), the writer (`record_writing`),
the bytes of a row (`row_codec`), local copies of sets in buckets
(`record_copy`), the order of training rows (`row_order`) at the rates of a
mixture (`row_rates`), batches (`loader`), and rows as text (`row_display`).

Nothing here imports TensorFlow or SeqIO, so that a trainer, which reads records
only, need not have them. Records are made in `data/making`, which builds on
this package.
"""
