"""Estimates how many rows training records will have, before they are made."""

from collections.abc import Iterable
import dataclasses
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


def estimate(data: data_section.DataConfig) -> dict[str, Any] | None:
  """Estimates the rows of training records from the beginning of their text.

  Imports TensorFlow. A vocabulary that is to be trained is trained, and
  discarded with the rows.

  Args:
    data: section with paths; its text exists.

  Returns:
    'parts', each with the fields of `record_sets.Part` and its totals of all
    passes, and 'passes', the number of these; None if the beginning has no rows
    of a part.

  Raises:
    UserError: the text or the vocabulary is missing, or does not suit the
      objectives.
  """
  with tempfile.TemporaryDirectory() as folder:
    if materialization.is_untrained(data):
      path = paths.join(folder, 'vocabulary.model')
      data = dataclasses.replace(data, vocabulary=path)
    materialization.open_vocabularies(data)
    spec = _with_small_shards(data.train)
    parts = materialization.list_parts(spec)
    groups = shard_jobs.group_jobs(
      shard_jobs.ShardJob(
        folder,
        spec,
        data.vocabularies,
        parts,
        record_writing.ShardKey(0, number, 0),
        shard_jobs.read_examples,
      )
      for number in range(len(parts))
    )
    shards = {
      job.key.part: entry
      for group in groups
      for job, entry in zip(
        group.jobs, shard_jobs.write_shards(group), strict=True
      )
    }
  if not all(shard['rows'] for shard in shards.values()):
    return None
  times = spec.shards * spec.passes
  totals = [
    {name: times * shards[number][name] for name in row_rates.UNITS.values()}
    for number in range(len(parts))
  ]
  return {
    'parts': [
      {**dataclasses.asdict(part), **counts}
      for part, counts in zip(parts, totals, strict=True)
    ],
    'passes': spec.passes,
  }


def _with_small_shards(spec: record_sets.RecordSpec) -> record_sets.RecordSpec:
  """Returns the spec with shards that have about 4 MiB of a source at most."""
  shards, draw = 1, shard_jobs.make_draw(spec, 0)
  for part in materialization.all_sources(spec):
    while _is_large(part.documents(draw, 0, shards)):
      shards *= _DIVISOR
  return dataclasses.replace(spec, shards=shards)


def _is_large(documents: Iterable[document_source.Document]) -> bool:
  """Returns whether documents can be divided and have more text than 4 MiB."""
  size = 0
  for document in documents:
    if size > _MOST_BYTES:
      return True
    size += len(document.text.encode())
  return False
