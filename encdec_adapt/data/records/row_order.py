"""The order of training rows: which row is read at each position.

A stream permutes the rows of one pass after another by a key of (seed, pass).
Without rates one stream reads every row of the record set once in a pass. With
rates (`data/records/row_rates.py`) every part of the set has a stream of its
own, and an interleaving decides whose turn it is. The order is a pure function
of the position, so it is the same on any number of hosts. A job resumes exactly
from the position and the number of rows read of every stream; later phases may
then have other rates.
"""

import bisect
from collections.abc import Sequence
import functools
import hashlib
import itertools

from grain import experimental
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.data.records import record_sets, row_rates

FILLER = -1  # `row` of a row that only completes a batch; its weights are 0.
_ROUNDS = 4  # Rounds of Grain's index shuffle (its default).
_BLOCK = 4096  # Positions of an interleaving that are computed together.


class _Stream:
  """Rows of ranges, one range after the other, each permuted."""

  def __init__(
    self, ranges: Sequence[tuple[int, int]], seed: int, repeat: bool
  ):
    self._ranges = ranges
    counts = [stop - start for start, stop in ranges]
    self._ends = [*itertools.accumulate(counts)]
    self._seed = seed
    self.rows = None if repeat else self._ends[-1]

  def row(self, index: int) -> int:
    """Returns the row number at an index of the stream."""
    epoch, index = divmod(index, self._ends[-1])
    which = bisect.bisect_right(self._ends, index)
    start, stop = self._ranges[which]
    return start + experimental.index_shuffle(
      index=index - self._ends[which] + stop - start,
      max_index=stop - start - 1,
      seed=_permutation_seed(self._seed, epoch, which),
      rounds=_ROUNDS,
    )


def _permutation_seed(seed: int, epoch: int, pass_index: int) -> int:
  """Returns the 32-bit key of the order of one pass in one repetition."""
  text = f'order {seed} {epoch} {pass_index}'.encode()
  return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest())


class Interleaving:
  """Gives the positions in turn to streams, in proportion to their shares.

  Turn k of a stream with share p has the time (k + 1/2) / p; positions are all
  turns in the order of their times. Any part of it can be computed by itself.
  """

  def __init__(self, shares: Sequence[float]):
    """Defines the interleaving.

    Args:
      shares: share of the positions of every stream; they sum to 1.
    """
    self._shares = np.array(shares)
    self._block = functools.lru_cache(maxsize=2)(self._make_block)

  def _before(self, time: float) -> np.ndarray:
    """Returns the number of turns of every stream before a time, [streams]."""
    with np.errstate(divide='ignore'):
      counts = np.maximum(np.ceil(self._shares * time - 0.5), 0)
      # Rounded; times are compared, so that all blocks agree.
      counts += (counts + 0.5) / self._shares < time
      counts -= (counts > 0) & ((counts - 0.5) / self._shares >= time)
    return counts.astype(int)

  def _make_block(
    self, index: int
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Computes a block of positions.

    Returns:
      Streams and turns of the positions, [_BLOCK] each, and the turns of every
      stream before the block, [streams].
    """
    slack = len(self._shares)  # Counts by time may be off by one per stream.
    before = self._before(index * _BLOCK - slack)
    more = np.ceil(self._shares * (_BLOCK + 3 * slack)).astype(int) + 2
    more[self._shares == 0] = 0
    streams = np.repeat(np.arange(slack), more)
    turns = np.concatenate(
      [np.arange(i, i + n) for i, n in zip(before, more, strict=True)]
    )
    times = (turns + 0.5) / self._shares[streams]
    order = np.lexsort((streams, times))
    start = index * _BLOCK - before.sum()
    before = before + np.bincount(streams[order[:start]], minlength=slack)
    order = order[start : start + _BLOCK]
    return streams[order], turns[order], before

  def turn(self, position: int) -> tuple[int, int]:
    """Returns the stream of a position, and which of its turns it is."""
    index, offset = divmod(position, _BLOCK)
    streams, turns, _ = self._block(index)
    return int(streams[offset]), int(turns[offset])

  def counts(self, position: int) -> np.ndarray:
    """Returns the turns of every stream before a position, [streams]."""
    index, offset = divmod(position, _BLOCK)
    streams, _, before = self._block(index)
    return before + np.bincount(streams[:offset], minlength=len(before))

  def position(self, stream: int, turn: int) -> float:
    """Returns the position of a turn of a stream; infinite without a share."""
    if not self._shares[stream]:
      return np.inf
    time = (turn + 0.5) / self._shares[stream]
    before = self._before(time)
    same = self._before(np.nextafter(time, np.inf)) - before
    return int(before.sum() + same[:stream].sum())


class Order:
  """The order of a training stream: position -> row number.

  Attributes:
    total: rows in the order: it ends before the first part that would start
      over; None if parts repeat without end.
  """

  def __init__(
    self,
    record_set: record_sets.RecordSet,
    *,
    seed: int = 0,
    repeat: bool = False,
    rates: Sequence[row_rates.Phase] = (),
    position: int = 0,
    consumed: Sequence[int] | None = None,
    step: int = 0,
    batch_size: int = 1,
  ):
    """Defines the order from a position on.

    Args:
      record_set: the rows.
      seed: seed of the permutations.
      repeat: whether parts start over after their last pass, permuted
        differently.
      rates: phases of the mixture; () for the rates of the records, if they
        have any.
      position: rows consumed before.
      consumed: `consumed(position)` of the order that was saved; None
        without rates, and at position 0.
      step: step that the position belongs to.
      batch_size: rows of a step.

    Raises:
      UserError: the rates do not suit the parts of the records, or the order
        was saved with rates and is to continue without, or the reverse.
    """
    rates = rates or _own_rates(record_set)
    if rates:
      ranges = [*zip(*record_set.ranges, strict=True)]
    else:
      # The parts of a pass follow each other.
      ranges = [[(one[0][0], one[-1][1]) for one in record_set.ranges]]
    self._streams = [_Stream(each, seed, repeat) for each in ranges]
    counts = [position] + [0] * (len(ranges) - 1)
    counts = counts if consumed is None else consumed
    if len(counts) != len(ranges):
      raise errors.UserError(
        f'config.data.rates: the checkpoint has the positions of {len(counts)}'
        f' parts, and the records are now read as {len(ranges)}; set it back'
        ' (parts can get other rates on resume, but not get or lose them)'
      )
    shares = [phase.row_shares(record_set.parts) for phase in rates] or [[1.0]]
    steps = [phase.step for phase in rates] or [0]
    # By phase: first position; interleaving, and the rows of every stream that
    # were read beyond its turns.
    self._starts: list[int] = []
    self._phases: list[tuple[Interleaving, np.ndarray]] = []
    now = max(bisect.bisect_right(steps, step) - 1, 0)
    for phase in range(now, len(steps)):
      start = position + max(steps[phase] - step, 0) * batch_size
      if self._starts:
        counts = self.consumed(start)
      self._starts.append(start)
      turns = Interleaving(shares[phase])
      self._phases.append((turns, np.array(counts) - turns.counts(start)))
    self.total = None if repeat else self._end()

  def _end(self) -> int:
    """Returns the first position whose stream has no row left."""
    for start, (turns, beyond) in zip(
      [*self._starts[1:], np.inf], self._phases, strict=True
    ):
      end = min(
        turns.position(i, stream.rows - beyond[i])
        for i, stream in enumerate(self._streams)
      )
      if end < start:
        break
    return int(end)

  def _phase(self, position: int) -> tuple[Interleaving, np.ndarray]:
    return self._phases[max(bisect.bisect_right(self._starts, position) - 1, 0)]

  def consumed(self, position: int) -> np.ndarray:
    """Returns the rows of every stream before a position, [streams].

    Args:
      position: at least the position that the order was defined from.
    """
    turns, beyond = self._phase(position)
    return beyond + turns.counts(position)

  def row(self, position: int) -> int:
    """Returns the row at a position, `FILLER` after the end of the order."""
    if self.total is not None and position >= self.total:
      return FILLER
    turns, beyond = self._phase(position)
    stream, turn = turns.turn(position)
    return self._streams[stream].row(int(turn + beyond[stream]))


def _own_rates(record_set: record_sets.RecordSet) -> Sequence[row_rates.Phase]:
  """Returns the rates that the SeqIO mixture of a record set has, or ()."""
  rates = [part['rate'] for part in record_set.parts]
  if all(rate is None for rate in rates):
    return ()
  if None in rates:
    raise errors.UserError(
      'config.data.rates is empty, and only some sources of the records have'
      f' rates of a SeqIO mixture: {rates}; state rates for all of them'
    )
  return (row_rates.Phase(0, 'examples', tuple(rates)),)
