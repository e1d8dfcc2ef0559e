"""Stored teacher probabilities for the targets of a record set.

The folder mirrors the record set: one file per shard, with record i for row i,
and a manifest, written last. A record has k token ids for every target of the
row, then k weights, as little-endian uint16 (uint32 for ids of vocabularies
above 65,536). Weights are counts of draws or the bits of float16 probabilities
(`ops/sparse_teacher.py`).

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Sequence
import dataclasses
import hashlib
import json
import os
from typing import Any

from grain import sources
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.data.records import record_copy, record_sets
from encdec_adapt.files import paths
from encdec_adapt.objectives import framing

MANIFEST = 'teacher.json'


@dataclasses.dataclass(frozen=True)
class TeacherSpec:
  """Settings that determine the content of a stored teacher.

  Attributes:
    records: digests of the passes of the record set.
    shards: files per pass and part, as in the record set.
    teacher: path of the teacher.
    fingerprint: fingerprint of the teacher
      (`model_on_disk.StoredModel.fingerprint`).
    form: form of the probabilities, one of `ops.sparse_teacher.FORMS`.
    tokens: token ids per target, k.
    vocab_size: vocabulary size.
    seed: seed of the draws.
    rows: batch size of the computation.
    devices: device kind, mesh and dtypes.
    format: version of the records.
  """

  records: list[str]
  shards: int
  teacher: str
  fingerprint: str
  form: str
  tokens: int
  vocab_size: int
  seed: int
  rows: int
  devices: str
  format: int = 1

  @property
  def dtypes(self) -> tuple[str, str]:
    """Dtypes of ids and weights in a record."""
    ids = '<u2' if self.vocab_size <= 1 << 16 else '<u4'
    return ids, '<u2' if self.form == 'counts' else '<f2'

  @property
  def token_bytes(self) -> int:
    """Uncompressed bytes per target."""
    return self.tokens * sum(np.dtype(kind).itemsize for kind in self.dtypes)

  def shard_identity(self) -> dict[str, Any]:
    """Returns the settings that determine a shard."""
    return dataclasses.asdict(self)

  def encode(self, *arrays: np.ndarray) -> bytes:
    """Serialises ids and weights [n, k] of a row's targets."""
    pairs = zip(arrays, self.dtypes, strict=True)
    return b''.join(array.astype(kind).tobytes() for array, kind in pairs)

  def decode(self, record: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids and probabilities [n, k]; these sum to 1."""
    count = len(record) // self.token_bytes * self.tokens
    ids = np.frombuffer(record, self.dtypes[0], count)
    weights = np.frombuffer(record, self.dtypes[1], offset=ids.nbytes)
    weights = weights.astype(np.float32).reshape(-1, self.tokens)
    # Renormalised after rounding to float16.
    probabilities = weights / weights.sum(axis=1, keepdims=True)
    return ids.reshape(-1, self.tokens), probabilities


def read_manifest(
  folder: str | os.PathLike,
) -> tuple[TeacherSpec, dict[str, dict[str, Any]]]:
  """Returns a stored teacher's spec and its shards by name.

  Raises:
    UserError: the folder has no stored teacher.
  """
  path = paths.at(folder) / MANIFEST
  if not path.exists():
    raise errors.UserError(
      f'no stored teacher in {folder} ({MANIFEST} is missing); run `python -m'
      ' encdec_adapt.materialize --teacher=MODEL` with the same config.'
    )
  manifest = json.loads(path.read_bytes())
  return TeacherSpec(**manifest['spec']), manifest['shards']


def filler(rows: int, length: int, tokens: int) -> dict[str, np.ndarray]:
  """Returns the fields of B rows of padding, [B, T, k]."""
  shape = rows, length, tokens
  return {
    framing.STORED_IDS: np.zeros(shape, np.int32),
    framing.STORED_PROBABILITIES: np.zeros(shape, np.float32),
  }


class StoredTeacher:
  """Reader of a finished stored teacher, by row number.

  Attributes:
    digest: digest of its shards.
  """

  def __init__(self, folder: str | os.PathLike, records: record_sets.RecordSet):
    """Opens the folder and verifies its shards, like `RecordSet.open`.

    Raises:
      UserError: it is missing, damaged or of other records.
    """
    self._spec, shards = read_manifest(folder)
    if self._spec.records != records.digests:
      raise errors.UserError(
        f'config.teacher.checkpoint: {folder} has probabilities for other'
        f' records than those in {records.folder}; store the teacher for these'
        ' (`python -m encdec_adapt.materialize --teacher=MODEL`), or name their'
        ' config.data.folder.'
      )
    local = record_copy.fetch(paths.at(folder), shards)
    digests = ' '.join(entry['sha256'] for entry in shards.values())
    self.digest = hashlib.sha256(digests.encode()).hexdigest()
    self._source = sources.ArrayRecordDataSource(
      [str(local / name) for name in shards]
    )

  def fields(self, rows: Sequence[int], length: int) -> dict[str, np.ndarray]:
    """Reads the fields of a batch.

    Args:
      rows: row numbers, negative for filler.
      length: decoder length T of the batch.
    """
    fields = filler(len(rows), length, self._spec.tokens)
    slots = [slot for slot, row in enumerate(rows) if row >= 0]
    # ArrayRecord refuses to read nothing.
    records = slots and self._source.__getitems__([int(rows[i]) for i in slots])
    for slot, record in zip(slots, records, strict=True):
      # A row's targets start at position 0.
      for name, values in zip(fields, self._spec.decode(record), strict=True):
        fields[name][slot, : len(values)] = values
    return fields
