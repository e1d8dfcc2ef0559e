"""Making record sets from text sources.

Missing shards and the data of a job (`materialization`); jobs that make shards
(`shard_jobs`), in local processes (`process_pool`) or on Apache Beam
(`pipeline_jobs`); packing of examples into rows (`packing`) and tokens cached
between passes (`token_cache`).

Builds on `data/records`, `data/sources` and `objectives`; `data/records` must
not import it. Opening a source `tfds:` or `seqio:` imports TensorFlow and
SeqIO; running a pipeline imports Beam.
"""
