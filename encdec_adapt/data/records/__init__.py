"""Record sets on disk and their rows in batches.

Specs, manifests and reader (`record_sets`), writer (`record_writing`), row
serialisation (`row_codec`), local copies of sets in buckets (`record_copy`),
order of training rows (`row_order`), mixture rates (`row_rates`), batches
(`loader`) and display as text (`row_display`).

Nothing here imports TensorFlow or SeqIO, so that training jobs need neither.
`data/making` makes records and builds on this package.
"""
