"""Estimates how many rows training records will have, before they are made."""

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

# Text of each source that is made into rows.
_MOST_BYTES = 4 * 2**20
# Into how many shards a shard that has more is divided.
_DIVISOR = 4


def estimate(data: data_section.DataConfig) -> dict[str, Any]:
  """Estimates the rows of training records from a part of their text.

  Imports TensorFlow. A vocabulary that is to be trained is trained, and
  discarded with the rows. Documents that are left out as duplicates count.

  Args:
    data: section with paths; its text exists.

  Returns:
    'parts', each with the fields of `record_sets.Part` and its totals of all
    passes, and 'passes', the number of these.

  Raises:
    UserError: the text or the vocabulary is missing, or does not suit the
      objectives.
  """
  with tempfile.TemporaryDirectory() as folder:
    if materialization.is_untrained(data):
      path = paths.join(folder, 'vocabulary.model')
      data = dataclasses.replace(data, vocabulary=path)
    # It would ask whether the path of the vocabulary is right.
    with contextlib.redirect_stdout(io.StringIO()):
      materialization.open_vocabularies(data)
    spec, parts = data.train, materialization.list_parts(data.train)
    shards = _small_shards(spec)
    jobs = [
      shard_jobs.ShardJob(
        folder,
        dataclasses.replace(spec, shards=shards[part.source]),
        data.vocabularies,
        parts,
        record_writing.ShardKey(0, number, 0),
        shard_jobs.read_examples,
      )
      for number, part in enumerate(parts)
    ]
    totals = {}
    for group in shard_jobs.group_jobs(jobs):
      entries = shard_jobs.write_shards(group)
      for job, entry in zip(group.jobs, entries, strict=True):
        times = job.spec.shards * spec.passes
        totals[job.key.part] = {
          name: times * entry[name] for name in row_rates.UNITS.values()
        }
  return {
    'parts': [
      {**dataclasses.asdict(part), **totals[number]}
      for number, part in enumerate(parts)
    ],
    'passes': spec.passes,
  }


def _small_shards(spec: record_sets.RecordSpec) -> dict[str, int]:
  """Returns into how many shards each source is divided, by its name.

  The first has about 4 MiB at most, or a single document.
  """
  shards, draw = {}, shard_jobs.make_draw(spec, 0)
  for part in materialization.all_sources(spec):
    count = 1
    while _is_large(part.documents(draw, 0, count)):
      count *= _DIVISOR
    shards[part.source.name] = count
  return shards


def _is_large(documents: Iterable[document_source.Document]) -> bool:
  """Returns whether there are documents beyond the first 4 MiB of text."""
  size = 0
  for document in documents:
    if size > _MOST_BYTES:
      return True
    size += len(document.text.encode())
  return False
