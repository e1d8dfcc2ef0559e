"""The order of training rows: which row is read at each position.

A stream permutes the rows of one pass after another by a key of (seed, pass).
Without rates one stream reads every row of the record set once in a pass. With
rates (`data/row_rates.py`) every part of the set has a stream of its own, and
an interleaving of a fixed length decides whose turn it is, so that the order is
a pure function of the position, the same on any number of hosts. A job resumes
exactly from the position and the number of rows read of every stream; later
phases may then have other rates.
"""

import bisect
from collections.abc import Sequence
import hashlib
import itertools

from grain import experimental
import numpy as np

from encdec_adapt.cli import errors
from encdec_adapt.data import records, row_rates

FILLER = -1  # `row` of a row that only completes a batch; its weights are 0.
_ROUNDS = 4  # Rounds of Grain's index shuffle (its default).
# Rows after which an interleaving repeats: shares hold to a ten-thousandth.
_CYCLE = 10_000


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


class _Interleaving:
  """Assigns positions to streams by their shares, and repeats.

  Attributes:
    turns: stream of every position of a cycle, [length] int.
  """

  def __init__(self, shares: Sequence[float]):
    """Spreads the turns of every stream evenly over the cycle.

    Args:
      shares: share of the positions of every stream; they sum to 1.
    """
    length = _CYCLE if len(shares) > 1 else 1
    exact = np.array(shares) * length
    quotas = np.floor(exact).astype(int)
    # Largest remainders; a stream with a share has at least one turn.
    rest = np.argsort(quotas - exact, kind='stable')[: length - quotas.sum()]
    quotas[rest] += 1
    missing = (quotas == 0) & (exact > 0)
    quotas[missing] = 1
    quotas[quotas.argmax()] -= missing.sum()
    streams = np.repeat(np.arange(len(quotas)), quotas)
    within = np.concatenate([np.arange(quota) for quota in quotas])
    order = np.argsort((within + 0.5) / quotas[streams], kind='stable')
    self.turns = streams[order]
    self._quotas = quotas
    taken = self.turns[:, None] == np.arange(len(quotas))
    self._before = np.concatenate(
      [np.zeros((1, len(quotas)), int), taken.cumsum(axis=0)]
    )

  def counts(self, position: int) -> np.ndarray:
    """Returns the turns of every stream before a position, [streams]."""
    cycles, offset = divmod(position, len(self.turns))
    return cycles * self._quotas + self._before[offset]

  def turn(self, stream: int, count: int) -> float:
    """Returns the position of a stream's turn after `count` others."""
    if not self._quotas[stream]:
      return np.inf
    cycles, offset = divmod(count, int(self._quotas[stream]))
    (places,) = np.nonzero(self.turns == stream)
    return cycles * len(self.turns) + int(places[offset])


class Order:
  """The order of a training stream: position -> row number.

  Attributes:
    total: rows in the order: it ends before the first part that would start
      over; None if parts repeat without end.
  """

  def __init__(
    self,
    record_set: records.RecordSet,
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
    # First positions, interleavings and rows read before them, by phase.
    self._starts: list[int] = []
    self._phases: list[tuple[_Interleaving, np.ndarray]] = []
    for phase in range(
      max(bisect.bisect_right(steps, step) - 1, 0), len(steps)
    ):
      start = position + max(steps[phase] - step, 0) * batch_size
      if self._starts:
        counts = self.consumed(start)
      self._starts.append(start)
      self._phases.append((_Interleaving(shares[phase]), np.array(counts)))
    self.total = None if repeat else self._end()

  def _end(self) -> int:
    """Returns the first position whose stream has no row left."""
    for i, (turns, counts) in enumerate(self._phases):
      before = turns.counts(self._starts[i]) - counts
      end = min(
        turns.turn(stream, before[stream] + each.rows)
        for stream, each in enumerate(self._streams)
      )
      if self._starts[i + 1 :] and end >= self._starts[i + 1]:
        continue
      return int(end)
    raise AssertionError('the last phase has no end')

  def _phase(self, position: int) -> int:
    return max(bisect.bisect_right(self._starts, position) - 1, 0)

  def consumed(self, position: int) -> np.ndarray:
    """Returns the rows of every stream before a position, [streams].

    Args:
      position: at least the position that the order was defined from.
    """
    phase = self._phase(position)
    turns, counts = self._phases[phase]
    first = self._starts[phase]
    return counts + turns.counts(position) - turns.counts(first)

  def row(self, position: int) -> int:
    """Returns the row at a position, `FILLER` after the end of the order."""
    if self.total is not None and position >= self.total:
      return FILLER
    turns, _ = self._phases[self._phase(position)]
    stream = turns.turns[position % len(turns.turns)]
    return self._streams[stream].row(int(self.consumed(position)[stream]))


def _own_rates(record_set: records.RecordSet) -> Sequence[row_rates.Phase]:
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
