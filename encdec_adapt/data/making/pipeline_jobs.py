"""Runs shard jobs on Apache Beam, for corpora beyond one machine.

Each pipeline element is a group of shards (`data/making/shard_jobs.py`). Its
worker reads its share of the text and writes the shards to the set's folder, a
bucket unless the pipeline runs locally. Shard entries are read from that
folder, so workers return nothing.

Running a pipeline imports Apache Beam (`pip install 'encdec_adapt[beam]'`).
"""

from collections.abc import Iterator, Sequence
from concurrent import futures
from typing import Any

from encdec_adapt.base import errors, packages
from encdec_adapt.data.making import shard_jobs
from encdec_adapt.data.records import record_writing
from encdec_adapt.files import paths


def run_jobs(
  groups: Sequence[shard_jobs.ShardGroup], options: Sequence[str]
) -> Iterator[tuple[shard_jobs.ShardGroup, list[dict[str, Any]]]]:
  """Makes the shards of all groups; yields all groups at the end.

  Args:
    groups: groups of shards.
    options: pipeline options, such as --runner=DataflowRunner.

  Yields:
    (group, manifest entries of its shards) of every group.

  Raises:
    UserError: Apache Beam is missing, or the workers' shards are not in the
      jobs' folders.
  """
  packages.require('--runner=beam', 'beam', 'apache_beam')
  import apache_beam
  from apache_beam.options import pipeline_options

  parsed = pipeline_options.PipelineOptions(list(options))
  runner = parsed.view_as(pipeline_options.StandardOptions).runner
  folders = {job.folder for group in groups for job in group.jobs}
  for folder in sorted(folders):
    if runner == 'DataflowRunner' and not paths.is_bucket(folder):
      raise errors.UserError(
        f'the workers of {runner} cannot write to {folder}; set'
        ' config.data.folder to a bucket'
      )
  if groups:
    with apache_beam.Pipeline(options=parsed) as pipeline:
      listed = pipeline | apache_beam.Create(groups, reshuffle=False)
      # Runners fuse steps: without a shuffle, the worker that lists the groups
      # would process them all.
      spread = listed | apache_beam.Reshuffle()
      _ = spread | 'WriteShards' >> apache_beam.Map(shard_jobs.write_shards)
  with futures.ThreadPoolExecutor(record_writing.THREADS) as pool:
    yield from zip(groups, pool.map(_entries, groups), strict=True)


def _entries(group: shard_jobs.ShardGroup) -> list[dict[str, Any]]:
  entries = []
  for job in group.jobs:
    entry = record_writing.finished_shard(job.folder, job.spec, job.key)
    if entry is None:
      raise errors.UserError(
        f'{job}: the pipeline has ended and the shard is not there; the'
        ' workers must reach config.data.folder, such as a bucket'
      )
    entries.append(entry)
  return entries
