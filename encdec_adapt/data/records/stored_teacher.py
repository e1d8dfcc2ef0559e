"""A teacher's probabilities for the targets of a record set, on disk.

A folder like that of the record set: a file for each of its shards, in which
record i belongs to row i, and a manifest, written last. A record has k token
ids for every target of the row, then k weights: little-endian uint16, or uint32
for ids of a vocabulary above 65,536; weights are numbers of draws, or the bits
of float16 probabilities (`ops/sparse_teacher.py`).

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import json
import os
import pathlib
from typing import Any

from grain import sources
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.data.records import record_copy, record_sets
from encdec_adapt.files import atomic, paths
from encdec_adapt.objectives import framing

MANIFEST = 'teacher.json'
FORMAT = 1


@dataclasses.dataclass(frozen=True)
class TeacherSpec:
  """All settings that the content of a stored teacher depends on.

  Attributes:
    records: digests of the passes of the record set.
    teacher: path of the teacher.
    fingerprint: its fingerprint (`model_on_disk.StoredModel.fingerprint`).
    form: form of the probabilities, one of `ops.sparse_teacher.FORMS`.
    tokens: token ids k of each target.
    vocab_size: tokens of the vocabulary.
    seed: seed of the draws.
    rows: rows that were computed together.
    devices: kind of the devices, and their mesh.
    dtypes: dtypes of the computation, and of the teacher's parameters.
    shards: files of a pass and part, as the record set has.
  """

  records: list[str]
  teacher: str
  fingerprint: str
  form: str
  tokens: int
  vocab_size: int
  seed: int
  rows: int
  devices: str
  dtypes: list[str]
  shards: int

  @property
  def _id_bytes(self) -> int:
    return 2 if self.vocab_size <= 1 << 16 else 4

  @property
  def token_bytes(self) -> int:
    """Bytes of a target, before compression."""
    return self.tokens * (self._id_bytes + 2)

  def shard_identity(self) -> dict[str, Any]:
    """Returns the settings that a shard depends on."""
    return {**dataclasses.asdict(self), 'format': FORMAT}

  def encode(self, ids: np.ndarray, weights: np.ndarray) -> bytes:
    """Serialises ids and weights [n, k] of a row's targets."""
    if self.form == 'counts':
      weights = weights.astype('<u2')
    else:
      weights = weights.astype('<f2')
    return ids.astype(f'<u{self._id_bytes}').tobytes() + weights.tobytes()

  def decode(self, record: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids, int32, and probabilities, float32, [n, k]."""
    count = len(record) // self.token_bytes * self.tokens
    kind = '<u2' if self.form == 'counts' else '<f2'
    ids = np.frombuffer(record, f'<u{self._id_bytes}', count)
    weights = np.frombuffer(record, kind, offset=ids.nbytes)
    weights = weights.astype(np.float32).reshape(-1, self.tokens)
    # Rounding to float16 moves the sum of probabilities.
    probabilities = weights / weights.sum(axis=1, keepdims=True)
    return ids.astype(np.int32).reshape(-1, self.tokens), probabilities


def read_manifest(folder: str | os.PathLike) -> dict[str, Any]:
  """Returns the manifest of a stored teacher.

  Raises:
    UserError: the folder has none, or of another format.
  """
  path = paths.at(folder) / MANIFEST
  if not path.exists():
    raise errors.UserError(
      f'no stored teacher in {folder} ({MANIFEST} is missing); run `python -m'
      ' encdec_adapt.materialize --teacher=MODEL` with the same config.'
    )
  manifest = json.loads(path.read_bytes())
  if manifest['format'] != FORMAT:
    raise errors.UserError(
      f'{path} has format {manifest["format"]!r}, this version reads {FORMAT};'
      ' store the teacher again.'
    )
  return manifest


def write_manifest(
  folder: pathlib.Path, spec: TeacherSpec, shards: Mapping[str, Any]
) -> None:
  """Writes the manifest of a finished stored teacher.

  Args:
    folder: its folder.
    spec: its settings.
    shards: entries of all shards by their names, in the order of their rows.
  """
  content = {
    'format': FORMAT,
    'spec': dataclasses.asdict(spec),
    'shards': dict(shards),
  }
  atomic.write_json(folder / MANIFEST, content)


def _blank(rows: int, length: int, tokens: int) -> dict[str, np.ndarray]:
  """Returns the fields of rows without targets."""
  shape = rows, length, tokens
  return {
    framing.STORED_IDS: np.zeros(shape, np.int32),
    framing.STORED_PROBABILITIES: np.zeros(shape, np.float32),
  }


def filler(folder: str | os.PathLike, length: int) -> dict[str, np.ndarray]:
  """Returns the fields of a row without targets, [1, T, k].

  Args:
    folder: folder of the stored teacher.
    length: decoder length T of the row.
  """
  return _blank(1, length, read_manifest(folder)['spec']['tokens'])


class StoredTeacher:
  """The probabilities of a finished stored teacher, read by row number.

  Attributes:
    folder: its folder.
    digest: digest of its shards.
  """

  def __init__(self, folder: str | os.PathLike, records: record_sets.RecordSet):
    """Opens it and verifies its shards, as `record_sets.RecordSet.open`.

    Raises:
      UserError: there is none, it is damaged, or it is of other records.
    """
    self.folder = paths.at(folder)
    manifest = read_manifest(folder)
    self._spec = TeacherSpec(**manifest['spec'])
    if self._spec.records != records.digests:
      raise errors.UserError(
        f'config.teacher.checkpoint: {folder} has probabilities for other'
        f' records than those in {records.folder}; store the teacher for these'
        ' (`python -m encdec_adapt.materialize --teacher=MODEL`), or name their'
        ' config.data.folder.'
      )
    shards = manifest['shards']
    local = record_copy.fetch(self.folder, shards)
    digests = ' '.join(entry['sha256'] for entry in shards.values())
    self.digest = hashlib.sha256(digests.encode()).hexdigest()
    self._source = sources.ArrayRecordDataSource(
      [str(local / name) for name in shards]
    )

  def fields(self, rows: Sequence[int], length: int) -> dict[str, np.ndarray]:
    """Reads the fields of a batch.

    Args:
      rows: row numbers; of filler, negative.
      length: decoder length T of the batch.
    """
    fields = _blank(len(rows), length, self._spec.tokens)
    slots = [slot for slot, row in enumerate(rows) if row >= 0]
    # ArrayRecord refuses to read nothing.
    records = slots and self._source.__getitems__([int(rows[i]) for i in slots])
    for slot, record in zip(slots, records, strict=True):
      # The targets of a row stand at its beginning.
      for name, values in zip(fields, self._spec.decode(record), strict=True):
        fields[name][slot, : len(values)] = values
    return fields
