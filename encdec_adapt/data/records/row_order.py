"""Order of training rows: position -> row number.

A stream permutes the rows of each pass with a key of (seed, pass). Without
rates, a single stream reads every row of the record set once per pass. With
rates (`data/records/row_rates.py`), every part of the set has a stream, and an
interleaving assigns positions to streams. The order is a pure function of the
position, independent of the number of hosts. A job resumes exactly from the
position and the rows read per stream; later phases may change their rates.

This module imports neither TensorFlow nor SeqIO.
"""

import bisect
from collections.abc import Sequence
import functools
import hashlib
import itertools
from typing import NamedTuple

from grain import experimental
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.data.records import record_sets, row_rates

FILLER = -1  # `row` of a row that only completes a batch; its weights are 0.
_ROUNDS = 4  # Rounds of Grain's index shuffle (its default).
# Positions of an interleaving computed together: sorting a block is cheaper
# than finding each position alone. Saved state does not depend on it.
_BLOCK = 4096


class _Stream:
  """Rows of consecutive ranges, each range permuted."""

  def __init__(
    self, ranges: Sequence[tuple[int, int]], seed: int, repeat: bool
  ):
    self._ranges = ranges
    counts = [stop - start for start, stop in ranges]
    self._ends = [*itertools.accumulate(counts)]
    self._seed = seed
    self.rows = None if repeat else self._ends[-1]

  def row(self, index: int) -> int:
    epoch, index = divmod(index, self._ends[-1])
    # `bisect_right` skips empty ranges: their end equals the preceding end.
    pass_index = bisect.bisect_right(self._ends, index)
    start, stop = self._ranges[pass_index]
    # Hashed, because sums would give passes of neighbouring seeds the same
    # order. The shuffle takes 32-bit keys.
    key = f'order {self._seed} {epoch} {pass_index}'.encode()
    # A bijection computed per index: no permutation in memory, and no replay on
    # resume.
    return start + experimental.index_shuffle(
      index=index - self._ends[pass_index] + stop - start,
      max_index=stop - start - 1,
      seed=int.from_bytes(hashlib.blake2b(key, digest_size=4).digest()),
      rounds=_ROUNDS,
    )


class Interleaving:
  """Assigns positions to streams in proportion to their shares.

  Turn k of a stream with share p has the time (k + 1/2) / p. Positions are all
  turns sorted by time, then by stream. Any block of positions can be computed
  independently of earlier blocks.
  """

  def __init__(self, shares: Sequence[float]):
    """Defines the interleaving.

    Args:
      shares: each stream's share of the positions; they sum to 1.
    """
    self._shares = np.array(shares)
    # Two blocks: a batch may cross the end of a block.
    self._block = functools.lru_cache(maxsize=2)(self._make_block)

  def _turns_until(self, time: float) -> np.ndarray:
    """Returns the number of turns of every stream before a time, [streams]."""
    with np.errstate(divide='ignore'):  # Streams without a share: no turns.
      counts = np.maximum(np.ceil(self._shares * time - 0.5), 0)
      # The product is rounded, so the count may be off by one. It is corrected
      # with the quotient that `_make_block` sorts by: both must agree to the
      # last bit, or a turn would be in two blocks or in none.
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
    # Shares sum to 1, so about t turns have a time before t; each stream's
    # rounding adds less than one turn. With one more position per stream on
    # both sides, the candidates include every turn of the block.
    slack = len(self._shares)
    first_turns = self._turns_until(index * _BLOCK - slack)
    candidates = np.ceil(self._shares * (_BLOCK + 3 * slack)).astype(int) + 2
    candidates[self._shares == 0] = 0
    streams = np.repeat(np.arange(slack), candidates)
    turns = np.concatenate(
      [
        np.arange(i, i + n)
        for i, n in zip(first_turns, candidates, strict=True)
      ]
    )
    times = (turns + 0.5) / self._shares[streams]
    order = np.lexsort((streams, times))  # By time, then by stream.
    # All earlier turns come before all candidates, so their number is the
    # position of the first candidate.
    start = index * _BLOCK - first_turns.sum()
    skipped = np.bincount(streams[order[:start]], minlength=slack)
    order = order[start : start + _BLOCK]
    return streams[order], turns[order], first_turns + skipped

  def turn(self, position: int) -> tuple[int, int]:
    """Returns the stream and turn of a position."""
    index, offset = divmod(position, _BLOCK)
    streams, turns, _ = self._block(index)
    return int(streams[offset]), int(turns[offset])

  def counts(self, position: int) -> np.ndarray:
    """Returns the turns of every stream before a position, [streams]."""
    index, offset = divmod(position, _BLOCK)
    streams, _, first_turns = self._block(index)
    return first_turns + np.bincount(
      streams[:offset], minlength=len(first_turns)
    )

  def position(self, stream: int, turn: int) -> float:
    """Returns the position of a stream's turn; infinite without a share."""
    if not self._shares[stream]:
      return np.inf
    time = (turn + 0.5) / self._shares[stream]
    earlier = self._turns_until(time)
    # Turns at exactly this time: the next float is the first time after them.
    # Among equal times, streams with smaller numbers come first.
    equal = self._turns_until(np.nextafter(time, np.inf)) - earlier
    return int(earlier.sum() + equal[:stream].sum())


class _Phase(NamedTuple):
  """An interleaving of turns of one or more rows, from a position on.

  Attributes:
    start: the first position; a turn begins there.
    turns: the interleaving.
    size: rows of a turn.
    ahead: rows each stream is ahead of its turns (negative: behind).
  """

  start: int
  turns: Interleaving
  size: int
  ahead: np.ndarray

  def turn(self, position: int) -> tuple[int, int]:
    """Returns the turn of a position and the row's index in it."""
    turn, offset = divmod(position - self.start, self.size)
    return turn + self.start // self.size, offset

  def first(self, stream: int, turn: int) -> float:
    """Returns the first position of a stream's turn, possibly infinite."""
    number = self.turns.position(stream, turn)
    return self.start + (number - self.start // self.size) * self.size


class Order:
  """Order of a training stream: position -> row number.

  Attributes:
    total: number of rows: the order ends before the first part that would start
      over; None if parts repeat forever.
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
      repeat: whether parts start over after their last pass, in a new
        permutation.
      rates: phases of the mixture; () for the rates of the records, if any.
      position: rows consumed before.
      consumed: `consumed(position)` of the saved order; None without rates and
        at position 0.
      step: step at the position.
      batch_size: rows of a step.

    Raises:
      UserError: the rates do not match the parts of the records, or the order
        was saved with rates and resumes without them, or the reverse.
    """
    rates = rates or _mixture_rates(record_set)
    if rates:
      ranges = [*zip(*record_set.ranges, strict=True)]
    else:
      # Parts of a pass have consecutive row numbers, so one range shuffles them
      # together.
      ranges = [[(parts[0][0], parts[-1][1]) for parts in record_set.ranges]]
    self._streams = [_Stream(passes, seed, repeat) for passes in ranges]
    if consumed is None:
      consumed = [position] + [0] * (len(ranges) - 1)
    if len(consumed) != len(ranges):
      raise errors.UserError(
        'config.data.rates: the checkpoint has the positions of'
        f' {len(consumed)} parts, and the records are now read as'
        f' {len(ranges)}; set it back (parts can get other rates on resume, but'
        ' not get or lose them)'
      )
    shares = [phase.row_shares(record_set.parts) for phase in rates] or [[1.0]]
    steps = [phase.step for phase in rates] or [0]
    # Interleavings count turns from position 0, independently of earlier
    # phases.
    self._starts: list[int] = []
    self._phases: list[_Phase] = []
    # Earlier phases are not rebuilt: `consumed` is their whole effect, and a
    # resumed job may not know their rates.
    current = max(bisect.bisect_right(steps, step) - 1, 0)
    for phase in range(current, len(steps)):
      # Future steps have the current batch size.
      start = position + max(steps[phase] - step, 0) * batch_size
      if self._starts:
        consumed = self.consumed(start)
      self._starts.append(start)
      whole = rates and rates[phase].unit == row_rates.BATCHES
      size = batch_size if whole else 1
      turns = Interleaving(shares[phase])
      ahead = np.array(consumed) - size * turns.counts(start // size)
      self._phases.append(_Phase(start, turns, size, ahead))
    self.total = None if repeat else self._end()

  def _end(self) -> int:
    phases = zip([*self._starts[1:], np.inf], self._phases, strict=True)
    for next_start, phase in phases:
      # Drops incomplete turns.
      end = min(
        phase.first(i, (stream.rows - phase.ahead[i]) // phase.size)
        for i, stream in enumerate(self._streams)
      )
      # A stream that would end after the next phase's start may not: the rates
      # change.
      if end < next_start:
        break
    return int(end)

  def _phase(self, position: int) -> _Phase:
    return self._phases[max(bisect.bisect_right(self._starts, position) - 1, 0)]

  def consumed(self, position: int) -> np.ndarray:
    """Returns the rows consumed of every stream before a position, [streams].

    Args:
      position: at least the initial position of the order.
    """
    phase = self._phase(position)
    turn, offset = phase.turn(position)
    counts = phase.ahead + phase.size * phase.turns.counts(turn)
    if offset:
      counts[phase.turns.turn(turn)[0]] += offset
    return counts

  def row(self, position: int) -> int:
    """Returns the row number at a position; `FILLER` after the end."""
    if self.total is not None and position >= self.total:
      return FILLER
    phase = self._phase(position)
    turn, offset = phase.turn(position)
    stream, number = phase.turns.turn(turn)
    index = phase.ahead[stream] + phase.size * number + offset
    return self._streams[stream].row(int(index))


def _mixture_rates(
  record_set: record_sets.RecordSet,
) -> Sequence[row_rates.Phase]:
  rates = [part['rate'] for part in record_set.parts]
  if all(rate is None for rate in rates):
    return ()
  if None in rates:
    raise errors.UserError(
      'config.data.rates is empty, and only some sources of the records have'
      f' rates of a SeqIO mixture: {rates}; state rates for all of them'
    )
  return (row_rates.Phase(0, 'examples', tuple(rates)),)
