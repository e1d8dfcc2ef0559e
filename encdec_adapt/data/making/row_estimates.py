"""Estimates the number of training rows before records are made."""

import collections
from collections.abc import Iterable
import contextlib
import dataclasses
import io
import tempfile
from typing import Any

from encdec_adapt.data import data_section
from encdec_adapt.data.making import materialization, shard_jobs
from encdec_adapt.data.records import (
  record_sets,
  record_writing,
  row_rates,
)
from encdec_adapt.data.sources import document_source
from encdec_adapt.files import paths

# Sampled text per source.
_MOST_BYTES = 4 * 2**20
# Number of shards a larger shard is split into.
_DIVISOR = 4


def estimate(data: data_section.DataConfig) -> dict[str, Any]:
  """Estimates the rows of training records from a sample of their text.

  If the vocabulary must be trained, the estimate uses a temporary vocabulary.
  Duplicate documents count.

  Args:
    data: section with paths; its text exists.

  Returns:
    'parts', each with the fields of `record_sets.Part` and totals over all
    passes, and 'passes', their number.

  Raises:
    UserError: the text or vocabulary is missing or unsuitable for the
      objectives.
  """
  with tempfile.TemporaryDirectory() as folder:
    if materialization.is_untrained(data):
      path = paths.join(folder, 'vocabulary.model')
      data = dataclasses.replace(data, vocabulary=path)
    # Hides the question whether the vocabulary's path is right.
    with contextlib.redirect_stdout(io.StringIO()):
      materialization.open_vocabularies(data)
    spec, parts = data.train, materialization.list_parts(data.train)
    shards = _small_shards(spec)
    jobs = [
      shard_jobs.ShardJob(
        folder,
        dataclasses.replace(spec, shards=shards[part.source][0]),
        data.vocabularies,
        parts,
        record_writing.ShardKey(0, number, shard),
        shard_jobs.read_examples,
      )
      for number, part in enumerate(parts)
      for shard in range(shards[part.source][1])
    ]
    totals = [collections.Counter() for _ in parts]
    for group in shard_jobs.group_jobs(jobs):
      entries = shard_jobs.write_shards(group)
      for job, entry in zip(group.jobs, entries, strict=True):
        times = spec.passes * job.spec.shards // shards[job.part.source][1]
        totals[job.key.part].update(
          {name: times * entry[name] for name in row_rates.UNITS.values()}
        )
  return {
    'parts': [
      {**dataclasses.asdict(part), **totals[number]}
      for number, part in enumerate(parts)
    ],
    'passes': spec.passes,
  }


def _small_shards(spec: record_sets.RecordSpec) -> dict[str, tuple[int, int]]:
  """Returns the number of shards per source, and how many to make.

  All shards of the real set, unless the source has more than 4 MiB; then only
  the first of smaller shards, with at most 4 MiB or one document.
  """
  shards, draw = {}, shard_jobs.make_draw(spec, 0)
  for part in materialization.all_sources(spec):
    count = made = spec.shards
    if _is_large(part.documents(draw)):
      made = 1
      while _is_large(part.documents(draw, 0, count)):
        count *= _DIVISOR
    shards[part.source.name] = count, made
  return shards


def _is_large(documents: Iterable[document_source.Document]) -> bool:
  size = 0
  for document in documents:
    if size > _MOST_BYTES:
      return True
    size += len(document.text.encode())
  return False
