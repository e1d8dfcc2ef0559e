"""Batches of a record set as a pure function of the position.

The saved state is the number of rows consumed, in total and per part of a
mixture (`data/records/row_order.py`), so a job resumes exactly even with
another batch size or number of hosts. Each process makes only its devices' rows
of a global batch; several processes may make the same row.

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


class Loader(Iterator[framing.Batch]):
  """Iterator over training batches.

  A batch has the fields of `objectives/framing.py` and `row` [B] int32, the row
  numbers in the record set. Filler rows (weight 0, number `row_order.FILLER`)
  complete the last batch.

  Attributes:
    order: order of the rows.
    position: rows consumed by the batches returned so far, to be saved.
    total: rows in the stream; None if it repeats forever.
    stored_teacher: the stored teacher; None without one.
  """

  def __init__(
    self,
    record_set: record_sets.RecordSet,
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
      batch_size: rows of the global batch.
      position: rows consumed before.
      consumed: rows consumed per part; see `row_order.Order`.
      first_step: global step of the next batch; determines MEAP's shared masks
        and the phase of the rates.
      seed: seed of the row order.
      repeat: whether to repeat forever (see `row_order.Order`) instead of
        ending after the last pass.
      rates: phases of mixture rates; see `row_order.Order`.
      teacher: whether to make the teacher's fields.
      stored: stored teacher; adds its fields to the batches.
      local: indices of this process's rows in the global batch, each 0 to
        batch_size - 1 (`sharding.placement.RowShards.rows`); None for all.
      prefetch: batches made ahead; 0 makes none.

    Raises:
      UserError: the rates do not match the records, or the position is beyond
        the end.
    """
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
    self.position, self.stored_teacher = position, stored
    self._batch_size = batch_size
    slots = range(batch_size) if local is None else local
    # Parsing rejects mixtures with shared masks, so the first objective
    # represents all rows.
    share = shared_noise.share_of(record_set.spec.objectives[0])

    # A pure function of the step: unconsumed prefetched batches do not affect
    # the saved state.
    def make(step: int) -> framing.Batch:
      first = position + step * batch_size
      rows = [order.row(first + slot) for slot in slots]
      batch = read_batch(record_set, rows, teacher)
      if stored:
        batch |= stored.fields(rows, record_set.spec.decoder_length)
      if not share:
        return batch
      # Masked here, not in the records: the published pattern depends on the
      # step.
      return shared_noise.apply(
        batch, first_step + step, share, record_set.mask
      )

    # Grain needs a finite length; no job reaches this one.
    batches = sys.maxsize if self.remaining is None else self.remaining
    self._batches = _prefetched(make, batches, prefetch)

  def __next__(self) -> framing.Batch:
    """Returns the next batch.

    Raises:
      StopIteration: the stream has ended.
    """
    batch = next(self._batches)
    self.position += self._batch_size
    if self.total is not None:
      # The last batch may contain filler.
      self.position = min(self.position, self.total)
    return batch

  @property
  def remaining(self) -> int | None:
    """Number of remaining batches; None if the stream repeats forever."""
    if self.total is None:
      return None
    return -((self.position - self.total) // self._batch_size)

  def close(self) -> None:
    """Stops the prefetch thread; the loader returns no more batches."""
    self._batches.close()


def evaluation_batches(
  record_set: record_sets.RecordSet,
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
    batch_size: rows of the global batch.
    teacher: whether to make the teacher's fields.
    prefix_offset: if not 0, row i gets the inputs of row (i + prefix_offset)
      modulo the number of rows: targets follow another example's prefix.
      Requires one pair per row.
    local: see `Loader`.
    prefetch: batches made ahead; 0 makes none.

  Raises:
    UserError: prefixes cannot be exchanged.
  """
  count = len(record_set)
  spec = record_set.spec
  # Packed rows and models without an encoder have no prefix to exchange; a
  # multiple of the count would leave every row its own prefix.
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
    batch = read_batch(record_set, rows, teacher, prefix_offset)
    if spec.pack:  # One entry per possible segment.
      size = spec.decoder_length or spec.encoder_length
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
  # The teacher reads `prefix`, so it must match the inputs.
  return [
    [pair._replace(inputs=donor.inputs, prefix=donor.prefix)]
    for (pair,), (donor,) in zip(rows, donors, strict=True)
  ]


def read_batch(
  record_set: record_sets.RecordSet,
  rows: Sequence[int],
  teacher: bool,
  prefix_offset: int = 0,
) -> framing.Batch:
  """Reads and frames rows.

  Args:
    record_set: the record set.
    rows: row numbers; `row_order.FILLER` gives a row of padding.
    teacher: whether to make the teacher's fields.
    prefix_offset: see `evaluation_batches`.

  Returns:
    The batch; see `Loader`.
  """
  # A single call, because ArrayRecord then reads its shards in parallel.
  numbers = [row for row in rows if row != row_order.FILLER]
  content = iter(_read(record_set, numbers, prefix_offset))
  # All objectives of a set have the same stored fields
  # (`objective_names.parse`), so the first one frames all rows.
  spec = record_set.spec
  frame = spec.objectives[0].rows.frame
  framed = [
    frame(
      [] if row == row_order.FILLER else next(content),
      spec.lengths,
      record_set.framing,
      teacher=teacher,
    )
    for row in rows
  ]
  return framing.stack_rows(framed) | {'row': np.array(rows, np.int32)}


def _prefetched(
  make: Callable[[int], framing.Batch], batches: int, prefetch: int
) -> grain.DatasetIterator:
  # One thread: framing holds the GIL, so more would not help.
  options = grain.ReadOptions(
    num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch
  )
  dataset = grain.MapDataset.range(batches).map(make)
  return iter(dataset.to_iter_dataset(options))
