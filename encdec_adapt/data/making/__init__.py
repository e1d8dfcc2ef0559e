"""Making record sets from text sources.

Which shards are missing, and the data of a job (`materialization`); the jobs
that make shards (`shard_jobs`), in this process and others (`process_pool`) or
on Apache Beam (`pipeline_jobs`); packing of examples into rows (`packing`) and
tokens shared by passes (`token_cache`).

Builds on `data/records`, `data/sources` and `objectives`; `data/records` must
not import it. TensorFlow and SeqIO are imported where a source `tfds:` or
`seqio:` is opened, Beam where a pipeline is run.
"""
