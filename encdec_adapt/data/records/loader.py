"""Batches of a record set as a pure function of the position.

The saved state is the number of rows consumed, in all and of every part of a
mixture (`data/records/row_order.py`), so a job resumes exactly even with
another batch size or another number of hosts. Every process makes only the rows
of each global batch that its devices hold; rows on devices of several processes
are made by each of them.

Grain prefetches in a thread. This module imports neither TensorFlow nor SeqIO.
"""

from collections.abc import Callable, Iterator, Sequence
import sys

import grain
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.data.records import (
  record_sets,
  row_order,
  row_rates,
  stored_teacher,
)
from encdec_adapt.objectives import framing, shared_noise


class Loader:
  """Iterator over training batches.

  A batch has the fields of `objectives/framing.py` and `row` [B] int32, the row
  numbers in the record set. Filler rows, of weight 0 and with the number
  `row_order.FILLER`, complete the last batch of a stream.

  Attributes:
    order: the order of the rows.
    position: rows consumed by the batches returned so far; save it.
    total: rows in the stream, None if it repeats without end.
  """

  def __init__(
    self,
    record_set: record_sets.RecordSet,
    lengths: framing.Lengths,
    batch_size: int,
    *,
    position: int = 0,
    consumed: Sequence[int] | None = None,
    first_step: int = 0,
    seed: int = 0,
    repeat: bool = False,
    rates: Sequence[row_rates.Phase] = (),
    teacher: bool = False,
    stored: stored_teacher.StoredTeacher | None = None,
    local: Sequence[int] | None = None,
    prefetch: int = 2,
  ):
    """Opens the stream at a position.

    Args:
      record_set: rows to read.
      lengths: S and T of the batch, which must equal those of the records.
      batch_size: rows of the global batch.
      position: rows consumed before.
      consumed: rows consumed of every part; see `row_order.Order`.
      first_step: global step of the next batch, which decides MEAP's shared
        masks and the phase of the rates.
      seed: seed of the order of rows.
      repeat: see `row_order.Order`; otherwise the stream ends after the last
        pass.
      rates: phases of a mixture; see `row_order.Order`.
      teacher: whether to make the teacher's fields.
      stored: a stored teacher, whose fields batches then have.
      local: rows of the global batch that this process makes, each 0 to
        batch_size - 1 (`sharding.placement.RowShards.rows`); None for all.
      prefetch: batches made ahead; 0 makes none.

    Raises:
      UserError: the records have other lengths or do not suit the rates, or
        the position is beyond the end.
    """
    _check_lengths(record_set, lengths)
    self.order = order = row_order.Order(
      record_set,
      seed=seed,
      repeat=repeat,
      rates=rates,
      position=position,
      consumed=consumed,
      step=first_step,
      batch_size=batch_size,
    )
    self.total = order.total
    if self.total is not None and not 0 <= position <= self.total:
      raise errors.UserError(
        f'position {position} is not within the {self.total} rows of'
        f' {record_set.folder}; the saved position belongs to other records, or'
        ' to a job with config.data.repeat'
      )
    self.position = position
    self._batch_size = batch_size
    slots = range(batch_size) if local is None else local
    # Parsing refuses a mixture with shared masks, so the first objective
    # speaks for all rows.
    share = shared_noise.share_of(record_set.spec.objectives[0])

    # A function of the step alone: prefetched batches that a job never
    # consumed leave no trace in the state that it saves.
    def make(step: int) -> framing.Batch:
      first = position + step * batch_size
      rows = [order.row(first + slot) for slot in slots]
      batch = read_batch(record_set, rows, lengths, teacher)
      if stored:
        batch |= stored.fields(rows, lengths.decoder)
      if not share:
        return batch
      # Masked here and not in the records: the published pattern depends on
      # the step, which a stored row does not know.
      return shared_noise.apply(
        batch, first_step + step, share, record_set.mask
      )

    # Grain needs a length; no job comes to the end of the largest one.
    batches = sys.maxsize if self.remaining is None else self.remaining
    self._batches = _prefetched(make, batches, prefetch)

  def __iter__(self) -> Iterator[framing.Batch]:
    return self

  def __next__(self) -> framing.Batch:
    """Returns the next batch.

    Raises:
      StopIteration: the last pass is over.
    """
    batch = next(self._batches)
    self.position += self._batch_size
    if self.total is not None:
      # The last batch may have filler, which is not a row of the records.
      self.position = min(self.position, self.total)
    return batch

  @property
  def remaining(self) -> int | None:
    """Number of remaining batches, None if the stream repeats without end."""
    if self.total is None:
      return None
    return -((self.position - self.total) // self._batch_size)

  def close(self) -> None:
    """Ends the reading thread; the loader returns no more batches."""
    self._batches.close()


def evaluation_batches(
  record_set: record_sets.RecordSet,
  lengths: framing.Lengths,
  batch_size: int,
  *,
  teacher: bool = False,
  prefix_offset: int = 0,
  local: Sequence[int] | None = None,
  prefetch: int = 2,
) -> Iterator[framing.Batch]:
  """Returns batches of every row once, in order; see `Loader` for the fields.

  Args:
    record_set: rows to read.
    lengths: S and T of the batch, which must equal those of the records.
    batch_size: rows of the global batch.
    teacher: whether to make the teacher's fields.
    prefix_offset: if not 0, row i has the inputs of row (i + prefix_offset)
      modulo the number of rows, so that targets follow the prefix of another
      example. Needs rows of a single pair.
    local: see `Loader`.
    prefetch: batches made ahead; 0 makes none.

  Raises:
    UserError: the records have other lengths, or prefixes cannot be
      exchanged.
  """
  _check_lengths(record_set, lengths)
  count = len(record_set)
  spec = record_set.spec
  # In a packed row, or without an encoder, targets have no prefix to exchange;
  # a multiple of the count would give every row its own prefix back.
  if prefix_offset and (
    spec.pack or not spec.encoder_length or prefix_offset % count == 0
  ):
    raise errors.UserError(
      f'{prefix_offset=} needs records of one pair per row with an encoder, and'
      ' an offset that is not a multiple of their number; those in'
      f' {record_set.folder} have pack={spec.pack},'
      f' encoder_length={spec.encoder_length} and {count} rows'
    )
  slots = range(batch_size) if local is None else local

  def make(step: int) -> framing.Batch:
    rows = [step * batch_size + slot for slot in slots]
    rows = [row if row < count else row_order.FILLER for row in rows]
    batch = read_batch(record_set, rows, lengths, teacher, prefix_offset)
    if spec.pack:  # One entry per possible segment.
      size = lengths.decoder or lengths.encoder
      batch['row'] = np.repeat(batch['row'][:, None], size, axis=1)
    return batch

  return _prefetched(make, -(-count // batch_size), prefetch)


def _read(
  record_set: record_sets.RecordSet, indices: Sequence[int], offset: int
) -> list[list[framing.Pair]]:
  """Reads rows; with an offset, row i gets the inputs of row i + offset."""
  rows = record_set.read(indices)
  if not offset:
    return rows
  donors = record_set.read([(i + offset) % len(record_set) for i in indices])
  # The teacher reads `prefix`, so that it has to follow the inputs.
  return [
    [pair._replace(inputs=donor.inputs, prefix=donor.prefix)]
    for (pair,), (donor,) in zip(rows, donors, strict=True)
  ]


def read_batch(
  record_set: record_sets.RecordSet,
  rows: Sequence[int],
  lengths: framing.Lengths,
  teacher: bool,
  prefix_offset: int = 0,
) -> framing.Batch:
  """Reads and frames rows.

  Args:
    record_set: the record set.
    rows: row numbers; `row_order.FILLER` gives a row of padding.
    lengths: S and T.
    teacher: whether to make the teacher's fields.
    prefix_offset: see `evaluation_batches`.

  Returns:
    The batch; see `Loader`.
  """
  # All rows in a single call: ArrayRecord reads its shards in parallel.
  numbers = [row for row in rows if row != row_order.FILLER]
  content = iter(_read(record_set, numbers, prefix_offset))
  # Objectives of a set have the same stored fields (`objective_names.parse`),
  # so that the first frames the rows of all.
  frame = record_set.spec.objectives[0].rows.frame
  framed = [
    frame(
      [] if row == row_order.FILLER else next(content),
      lengths,
      record_set.framing,
      teacher=teacher,
    )
    for row in rows
  ]
  return framing.stack_rows(framed) | {'row': np.array(rows, np.int32)}


def _prefetched(
  make: Callable[[int], framing.Batch], batches: int, prefetch: int
) -> grain.DatasetIterator:
  # One thread: framing holds the interpreter's lock, so more do not help.
  options = grain.ReadOptions(
    num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch
  )
  dataset = grain.MapDataset.range(batches).map(make)
  return iter(dataset.to_iter_dataset(options))


def _check_lengths(
  record_set: record_sets.RecordSet, lengths: framing.Lengths
) -> None:
  stored = record_set.spec.lengths
  if lengths != stored:
    raise errors.UserError(
      f'the records in {record_set.folder} have {stored}, not {lengths}; set'
      ' their lengths, or materialise records into another folder'
    )
