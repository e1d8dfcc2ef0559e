"""Batches of a record set, as a pure function of the position.

The position is the number of rows consumed: nothing else is saved. Row n of a
training stream lies in the pass that n falls into; within a pass the order is
a permutation keyed by (seed, pass). So a stream continues exactly with
another batch size or another number of hosts. Every process makes only the
rows of each global batch that its devices hold; where several hold the same
rows, each makes them.

Grain reads ahead in a thread. Imports neither TensorFlow nor SeqIO.
"""

import bisect
from collections.abc import Callable, Iterator, Sequence
import hashlib
import sys

import grain
from grain import experimental
import numpy as np

from encdec_adapt.cli import errors
from encdec_adapt.data import batch, records

FILLER = -1  # `row` of a row that only fills up a batch; its weights are 0
_ROUNDS = 4  # of Grain's index shuffle, its own default


class Order:
  """The order of a training stream: position -> row number.

  Attributes:
    total: rows in the stream, None if it repeats for ever.
  """

  def __init__(
    self,
    starts: Sequence[int],
    *,
    seed: int = 0,
    repeat: bool = False,
  ):
    """Defines the order.

    Args:
      starts: first row of each pass, and the number of rows at the end.
      seed: of the permutations.
      repeat: start over after the last pass, in another order.
    """
    self._starts = list(starts)
    self._seed = seed
    self._rows = self._starts[-1]
    self.total = None if repeat else self._rows

  def row(self, position: int) -> int:
    """Row number at a position, `FILLER` beyond the end of the stream."""
    if self.total is not None and position >= self.total:
      return FILLER
    epoch, position = divmod(position, self._rows)
    which = bisect.bisect_right(self._starts, position) - 1
    start, stop = self._starts[which : which + 2]
    key = permutation_seed(self._seed, epoch, which)
    return start + experimental.index_shuffle(
      index=position - start,
      max_index=stop - start - 1,
      seed=key,
      rounds=_ROUNDS,
    )


def permutation_seed(seed: int, epoch: int, pass_index: int) -> int:
  """32-bit key of the order of one pass in one repetition."""
  text = f'order {seed} {epoch} {pass_index}'.encode()
  return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest())


class Loader:
  """Training batches; an iterator.

  A batch holds the fields of `data/batch.py` and `row` [B] int32: the row
  numbers in the record set. The last batch of a stream is filled up with
  rows of weight 0 whose `row` is `FILLER`.

  Attributes:
    position: rows consumed by the batches handed out so far; save it.
    total: rows in the stream, None if it repeats for ever.
  """

  def __init__(
    self,
    record_set: records.RecordSet,
    lengths: batch.Lengths,
    batch_size: int,
    *,
    position: int = 0,
    seed: int = 0,
    repeat: bool = False,
    teacher: bool = False,
    local: Sequence[int] | None = None,
    prefetch: int = 2,
  ):
    """Opens the stream at a position.

    Args:
      record_set: where rows come from.
      lengths: S and T of the batch; those the records were made for.
      batch_size: rows of the global batch.
      position: rows consumed before.
      seed: of the order of rows.
      repeat: see `Order`; without it the stream ends after the last pass.
      teacher: also make the teacher's fields.
      local: places in the global batch that this process makes, of 0 to
        batch_size - 1 (`sharding.placement.RowShards.rows`); all by default.
      prefetch: batches made ahead, 0 makes none.

    Raises:
      UserError: the lengths are not the records', or the position is beyond
        the end.
      ValueError: `local` is empty or not within the batch.
    """
    local = _places(batch_size, local)
    _check_lengths(record_set, lengths)
    order = Order(record_set.starts, seed=seed, repeat=repeat)
    self.total = order.total
    if self.total is not None and not 0 <= position <= self.total:
      raise errors.UserError(
        f'position {position} is not within the {self.total} rows of'
        f' {record_set.folder}; the saved position belongs to other records'
      )
    self.position = position
    self._batch_size = batch_size

    def make(step: int) -> batch.Batch:
      first = position + step * batch_size
      rows = [order.row(first + i) for i in local]
      return _frame(record_set, rows, lengths, teacher)

    left = sys.maxsize if self.left is None else self.left
    self._batches = _prefetched(make, left, prefetch)

  def __iter__(self) -> Iterator[batch.Batch]:
    return self

  def __next__(self) -> batch.Batch:
    """The next batch.

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
    """Batches to come, None if the stream repeats for ever."""
    if self.total is None:
      return None
    return -((self.position - self.total) // self._batch_size)

  def close(self) -> None:
    """Ends the reading thread; the loader gives no more batches."""
    self._batches.close()


def evaluation_batches(
  record_set: records.RecordSet,
  lengths: batch.Lengths,
  batch_size: int,
  *,
  teacher: bool = False,
  prefix_offset: int = 0,
  local: Sequence[int] | None = None,
  prefetch: int = 2,
) -> Iterator[batch.Batch]:
  """Every row once, in order; the last batch padded with weight 0.

  Args:
    record_set: where rows come from.
    lengths: S and T of the batch; those the records were made for.
    batch_size: rows of the global batch.
    teacher: also make the teacher's fields.
    prefix_offset: other than 0, give row i the inputs of row
      (i + prefix_offset) modulo the number of rows, so that targets follow
      the prefix of another example. Needs rows of one pair.
    local: places in the global batch that this process makes, of 0 to
      batch_size - 1 (`sharding.placement.RowShards.rows`); all by default.
    prefetch: batches made ahead, 0 makes none.

  Returns:
    An iterator over batches as a `Loader` gives them.

  Raises:
    UserError: the lengths are not the records', or prefixes cannot be
      exchanged.
    ValueError: `local` is empty or not within the batch.
  """
  local = _places(batch_size, local)
  _check_lengths(record_set, lengths)
  count = len(record_set)
  if prefix_offset:
    _check_prefixes(record_set, prefix_offset)

  def make(step: int) -> batch.Batch:
    rows = [step * batch_size + i for i in local]
    rows = [row if row < count else FILLER for row in rows]
    return _frame(record_set, rows, lengths, teacher, prefix_offset)

  return _prefetched(make, -(-count // batch_size), prefetch)


def _read_rolled(
  record_set: records.RecordSet, indices: Sequence[int], offset: int
) -> list[list[batch.Pair]]:
  """Rows of one pair whose inputs come from the row `offset` further on."""
  others = [(i + offset) % len(record_set) for i in indices]
  own = record_set.read(indices)
  return [
    [batch.Pair(other.inputs, pair.targets, other.prefix)]
    for (pair,), (other,) in zip(own, record_set.read(others), strict=True)
  ]


def _frame(
  record_set: records.RecordSet,
  rows: Sequence[int],
  lengths: batch.Lengths,
  teacher: bool,
  prefix_offset: int = 0,
) -> batch.Batch:
  """Reads and frames rows; `FILLER` gives a row of padding."""
  some = [row for row in rows if row != FILLER]
  content = iter(
    _read_rolled(record_set, some, prefix_offset)
    if prefix_offset
    else record_set.read(some)
  )
  result = batch.stack_rows(
    [
      batch.frame_row(
        next(content) if row != FILLER else [],
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
  make: Callable[[int], batch.Batch], batches: int, prefetch: int
) -> grain.DatasetIterator:
  """Iterates make(0), make(1), .. with `prefetch` of them made ahead."""
  # One thread: framing holds the interpreter's lock, so more do not help.
  options = grain.ReadOptions(
    num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch
  )
  dataset = grain.MapDataset.range(batches).map(make)
  return iter(dataset.to_iter_dataset(options))


def _places(batch_size: int, local: Sequence[int] | None) -> Sequence[int]:
  """Places in a global batch that this process makes."""
  whole = range(batch_size)
  places = whole if local is None else local
  if not places or not set(places) <= set(whole):
    raise ValueError(f'places {places} of a batch of {batch_size} rows')
  return places


def _check_lengths(
  record_set: records.RecordSet, lengths: batch.Lengths
) -> None:
  """Refuses lengths that the records were not made for."""
  if lengths != record_set.spec.lengths:
    made = record_set.spec.lengths
    raise errors.UserError(
      f'lengths encoder={lengths.encoder}, decoder={lengths.decoder} are not'
      f' those of the records in {record_set.folder}:'
      f' encoder={made.encoder}, decoder={made.decoder}; set these, or'
      ' materialise records of the lengths you want into another folder'
    )


def _check_prefixes(record_set: records.RecordSet, offset: int) -> None:
  """Refuses to exchange prefixes where that makes no sense."""
  spec, count = record_set.spec, len(record_set)
  if spec.pack or not spec.encoder_length or offset % count == 0:
    raise errors.UserError(
      f'prefix_offset={offset} needs records of one pair per row with an'
      ' encoder, and an offset that is no multiple of their number; those in'
      f' {record_set.folder} have pack={spec.pack},'
      f' encoder_length={spec.encoder_length} and {count} rows'
    )
