"""Batches of a record set as a pure function of the position.

The saved state is the number of rows consumed, in all and of every part of a
mixture (`data/records/row_order.py`), so a job resumes exactly even with
another batch size or another number of hosts. Every process makes only the rows
of each global batch that its devices hold; where several processes hold the
same rows, each makes them.

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
)
from encdec_adapt.objectives import framing, shared_masks


class Loader:
  """Iterator over training batches.

  A batch has the fields of `objectives/framing.py` and `row` [B] int32, the row
  numbers in the record set. The last batch of a stream is completed with
  rows of weight 0 whose `row` is `row_order.FILLER`.

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
    local: Sequence[int] | None = None,
    prefetch: int = 2,
  ):
    """Opens the stream at a position.

    Args:
      record_set: rows to read.
      lengths: S and T of the batch, which must be the records' own.
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
    _check_position(record_set, position, self.total)
    self.position = position
    self._batch_size = batch_size
    places = range(batch_size) if local is None else local
    # Rows that share their masks have no other objective beside them.
    share = record_set.spec.objectives[0].shared_mask_share

    def make(step: int) -> framing.Batch:
      first = position + step * batch_size
      rows = [order.row(first + i) for i in places]
      made = _frame(record_set, rows, lengths, teacher)
      if share:
        made = shared_masks.apply(
          made, first_step + step, share, record_set.mask
        )
      return made

    left = sys.maxsize if self.left is None else self.left
    self._batches = _prefetched(make, left, prefetch)

  def __iter__(self) -> Iterator[framing.Batch]:
    return self

  def __next__(self) -> framing.Batch:
    """Returns the next batch.

    Raises:
      StopIteration: the last pass is over.
    """
    result = next(self._batches)
    self.position += self._batch_size
    if self.total is not None:
      self.position = min(self.position, self.total)
    return result

  @property
  def left(self) -> int | None:
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
    lengths: S and T of the batch, which must be the records' own.
    batch_size: rows of the global batch.
    teacher: whether to make the teacher's fields.
    prefix_offset: if not 0, row i has the inputs of row (i + prefix_offset)
      modulo the number of rows, so that targets follow the prefix of another
      example. Needs rows of one pair.
    local: see `Loader`.
    prefetch: batches made ahead; 0 makes none.

  Raises:
    UserError: the records have other lengths, or prefixes cannot be
      exchanged.
  """
  _check_lengths(record_set, lengths)
  count = len(record_set)
  if prefix_offset:
    _check_prefixes(record_set, prefix_offset)
  places = range(batch_size) if local is None else local

  def make(step: int) -> framing.Batch:
    rows = [step * batch_size + i for i in places]
    rows = [row if row < count else row_order.FILLER for row in rows]
    return _frame(record_set, rows, lengths, teacher, prefix_offset)

  return _prefetched(make, -(-count // batch_size), prefetch)


def _read(
  record_set: record_sets.RecordSet, indices: Sequence[int], offset: int
) -> list[list[framing.Pair]]:
  """Reads rows; with an offset, row i gets the inputs of row i + offset."""
  own = record_set.read(indices)
  if not offset:
    return own
  others = record_set.read([(i + offset) % len(record_set) for i in indices])
  return [
    [pair._replace(inputs=other.inputs, prefix=other.prefix)]
    for (pair,), (other,) in zip(own, others, strict=True)
  ]


def _frame(
  record_set: record_sets.RecordSet,
  rows: Sequence[int],
  lengths: framing.Lengths,
  teacher: bool,
  prefix_offset: int = 0,
) -> framing.Batch:
  """Reads and frames rows; `row_order.FILLER` gives a row of padding."""
  some = [row for row in rows if row != row_order.FILLER]
  content = iter(_read(record_set, some, prefix_offset))
  frame = record_set.spec.objectives[0].maker.frame
  result = framing.stack_rows(
    [
      frame(
        next(content) if row != row_order.FILLER else [],
        lengths,
        record_set.framing,
        teacher=teacher,
      )
      for row in rows
    ]
  )
  result['row'] = np.array(rows, np.int32)
  return result


def _prefetched(
  make: Callable[[int], framing.Batch], batches: int, prefetch: int
) -> grain.DatasetIterator:
  """Iterates over make(0), make(1), .. with `prefetch` of them made ahead."""
  # One thread: framing holds the interpreter's lock, so more do not help.
  options = grain.ReadOptions(
    num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch
  )
  dataset = grain.MapDataset.range(batches).map(make)
  return iter(dataset.to_iter_dataset(options))


def _check_position(
  record_set: record_sets.RecordSet, position: int, total: int | None
) -> None:
  if total is not None and not 0 <= position <= total:
    raise errors.UserError(
      f'position {position} is not within the {total} rows of'
      f' {record_set.folder}; the saved position belongs to other records, or'
      ' to a job with config.data.repeat'
    )


def _check_lengths(
  record_set: record_sets.RecordSet, lengths: framing.Lengths
) -> None:
  made = record_set.spec.lengths
  if lengths != made:
    raise errors.UserError(
      f'the records in {record_set.folder} have {made}, not {lengths}; set'
      ' their lengths, or materialise records into another folder'
    )


def _check_prefixes(record_set: record_sets.RecordSet, offset: int) -> None:
  spec, count = record_set.spec, len(record_set)
  if spec.pack or not spec.encoder_length or offset % count == 0:
    raise errors.UserError(
      f'prefix_offset={offset} needs records of one pair per row with an'
      ' encoder, and an offset that is no multiple of their number; those in'
      f' {record_set.folder} have pack={spec.pack},'
      f' encoder_length={spec.encoder_length} and {count} rows'
    )
