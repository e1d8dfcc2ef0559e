"""Writes a record set (`record_sets`): its shards, then its manifest.

A shard is written under a temporary name, synced and renamed; its .json file,
written next, marks it as finished. Making a set again leaves finished shards as
they are.

This module imports neither TensorFlow nor SeqIO.
"""

import collections
from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import itertools
import json
import os
import platform
from typing import Any, NamedTuple

from array_record.python import array_record_module

from encdec_adapt.base import errors
from encdec_adapt.data.records import (
  record_copy,
  record_sets,
  row_codec,
  stored_teacher,
)
from encdec_adapt.files import atomic, paths
from encdec_adapt.objectives import framing

# Shard entries read concurrently: each takes a round trip to a bucket.
THREADS = 16
# One row per chunk: training reads rows in random order, and each read
# decompresses a whole chunk. Level 1 reads fastest.
_WRITER_OPTIONS = 'group_size:1,zstd:1'

Spec = record_sets.RecordSpec | stored_teacher.TeacherSpec


class ShardKey(NamedTuple):
  """Position of a shard in its record set.

  Attributes:
    pass_index: 0 to spec.passes - 1.
    part: 0-based number of the part.
    shard: 0 to spec.shards - 1.
  """

  pass_index: int
  part: int
  shard: int


def shard_keys(
  spec: record_sets.RecordSpec, parts: Sequence[record_sets.Part]
) -> list[ShardKey]:
  """Returns the keys of all shards of a set, in row order."""
  sizes = spec.passes, len(parts), spec.shards
  return [ShardKey(*key) for key in itertools.product(*map(range, sizes))]


def shard_path(
  folder: str | os.PathLike, spec: Spec, key: ShardKey
) -> paths.Path:
  """Returns the path of a shard.

  Args:
    folder: folder of the record set.
    spec: spec of the record set.
    key: position of the shard in the set.
  """
  parent = paths.at(folder) / f'pass-{key[0]:05d}' / f'part-{key[1]:03d}'
  return parent / f'shard-{key[2]:05d}-of-{spec.shards:05d}.array_record'


class ShardWriter(contextlib.AbstractContextManager):
  """Writes a shard: `write` each row, then `finish`.

  A context manager. An unfinished shard leaves no file behind.
  """

  def __init__(self, folder: str | os.PathLike, spec: Spec, key: ShardKey):
    """Opens a temporary file next to the shard's path.

    Args:
      folder: folder of the record set; created if missing.
      spec: spec of the record set, with its fingerprints.
      key: position of the shard in the set.
    """
    self._spec = spec
    self._path = shard_path(folder, spec, key)
    self._path.parent.mkdir(parents=True, exist_ok=True)
    self._temporary = self._path.with_suffix(f'.{os.getpid()}.tmp')
    self._writer = array_record_module.ArrayRecordWriter(
      str(self._temporary), _WRITER_OPTIONS
    )
    self._counts = collections.Counter(
      rows=0, pairs=0, encoder_positions=0, target_tokens=0
    )

  def write(self, pairs: Sequence[framing.Pair]) -> None:
    """Appends a row.

    Raises:
      UserError: the disk is full or fails.
    """
    layout = self._spec.objectives[0].rows
    self.write_bytes(row_codec.encode_row(pairs, layout))
    self._counts.update(pairs=len(pairs))
    for pair in pairs:
      encoder, _ = pair.positions(self._spec.lengths)
      self._counts.update(
        encoder_positions=encoder, target_tokens=pair.target_tokens
      )

  def write_bytes(self, record: bytes) -> None:
    """Appends a serialised row.

    Raises:
      UserError: the disk is full or fails.
    """
    with self._disk_errors():
      self._writer.write(record)
    self._counts.update(rows=1)

  def finish(self, **counts: Any) -> dict[str, Any]:
    """Renames the shard to its path and marks it as finished.

    Args:
      **counts: further counts for the manifest, such as documents=17, and
        `first_losses` (`example_maker.ExampleMaker`).

    Returns:
      The shard's entry in the manifest.

    Raises:
      UserError: the disk is full or fails.
    """
    with self._disk_errors():
      self._writer.close()
      # Synced before the rename: otherwise a machine crash could leave an empty
      # file under the final name.
      paths.sync(self._temporary)
      entry = {
        **self._counts,
        **counts,
        'bytes': self._temporary.stat().st_size,
        'sha256': record_copy.file_hash(self._temporary),
      }
      os.replace(self._temporary, self._path)
      # Written last: marks the shard as complete.
      atomic.write_json(
        self._path.with_suffix('.json'),
        {'identity': self._spec.shard_identity(), **entry},
      )
    return entry

  def __exit__(self, *unused):
    with contextlib.suppress(RuntimeError):  # Closed, or the disk is full.
      self._writer.close()
    self._temporary.unlink(missing_ok=True)

  @contextlib.contextmanager
  def _disk_errors(self):
    # ArrayRecord reports a full disk late, as a RuntimeError.
    try:
      yield
    except (OSError, RuntimeError) as error:
      raise errors.UserError(
        f'record shard {self._path} cannot be written ({error}); free some'
        ' space or name another data folder. Finished shards are kept'
      ) from error


def finished_shard(
  folder: str | os.PathLike, spec: Spec, key: ShardKey
) -> dict[str, Any] | None:
  """Returns the manifest entry of a finished, undamaged shard of this spec.

  Returns:
    None if the shard must be made.
  """
  path = shard_path(folder, spec, key)
  try:
    entry = json.loads(path.with_suffix('.json').read_text())
  except (FileNotFoundError, ValueError):  # Damaged: not UTF-8, or no JSON.
    return None
  if entry.pop('identity', None) != spec.shard_identity():
    return None
  return None if record_copy.damage(path, entry) else entry


def write_manifest(
  folder: str | os.PathLike,
  spec: record_sets.RecordSpec,
  parts: Sequence[record_sets.Part],
  entries: Mapping[ShardKey, Mapping[str, Any]],
  vocabularies: Mapping[str, Any],
) -> dict[str, Any]:
  """Writes the manifest of a finished record set.

  Args:
    folder: folder of the record set.
    spec: spec of the set.
    parts: parts of the set, in order.
    entries: result of `ShardWriter.finish` by key.
    vocabularies: result of `vocabulary_pair.Opened.describe`, with the special
      ids for framing.

  Returns:
    The manifest: format, Python version (which determines the source `python`),
    spec, revisions, vocabularies (fingerprints and special tokens), totals of
    the shards' counts, fill of both sides (0 to 1), parts with their totals,
    the first document of some losses, and, per pass, the rows of each part and
    the shards' entries.
  """
  parts_totals = [collections.Counter[str]() for _ in parts]
  passes: list[dict[str, Any]] = [
    {'rows': [0] * len(parts), 'shards': []} for _ in range(spec.passes)
  ]
  first_losses: dict[str, str] = {}
  for key in shard_keys(spec, parts):
    entry = entries[key]
    # Older shards have none.
    first_losses = entry.get('first_losses', {}) | first_losses
    name = shard_path(folder, spec, key).relative_to(folder).as_posix()
    passes[key.pass_index]['shards'].append({'file': name, **entry})
    passes[key.pass_index]['rows'][key.part] += entry['rows']
    counts = {name: n for name, n in entry.items() if isinstance(n, int)}
    parts_totals[key.part].update(counts)
  totals = collections.Counter[str]()
  for counts in parts_totals:
    # Unlike `+`, `update` keeps zero counts, which readers look up.
    totals.update(counts)
  rows, answers = max(totals['rows'], 1), spec.objectives[0].rows.answers
  manifest = {
    'format': record_sets.FORMAT,
    'python': platform.python_version(),
    'spec': dataclasses.asdict(spec),
    'revisions': spec.revisions,
    'vocabularies': dict(vocabularies),
    'totals': dict(totals),
    'fill': {
      side: totals[count] / (rows * length) if length else 0.0
      for side, count, length in (
        ('encoder', 'encoder_positions', spec.encoder_length),
        ('decoder', 'target_tokens', answers * spec.decoder_length),
      )
    },
    'parts': [
      {**dataclasses.asdict(part), **counts}
      for part, counts in zip(parts, parts_totals, strict=True)
    ],
    'first_losses': first_losses,
    'passes': passes,
  }
  atomic.write_json(paths.at(folder) / record_sets.MANIFEST, manifest)
  return manifest
