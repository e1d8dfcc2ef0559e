"""Packs (inputs, targets) pairs into rows of two lengths.

A pair takes m + 1 encoder and n decoder positions (`objectives/framing.py`),
and a row holds pairs as long as both sides fit: two-dimensional bin packing.
Pairs are read until they fill some thousand rows, and placed from the largest
to the smallest (by the sum of their shares of both sides), each into the open
row that it leaves with the least room (best-fit decreasing; room is the norm of
the free shares of both sides, weighted by their demands). On documents of mixed
lengths this fills more than 0.97 of the binding side.

The same pairs are packed in order, too, which is cheap, and the result with
fewer rows is used. The pairs of the last row in order, which is still open, go
to the next round, so that no stream ever takes more rows than packing it in
order.

This module needs numpy alone: neither TensorFlow nor jax.
"""

import bisect
from collections.abc import Iterable, Iterator
import math

import numpy as np

from encdec_adapt.objectives import framing

# Rows that are packed together: fewer where they are long, for memory's sake.
_ROWS = 4096
_POSITIONS = 1 << 25


def pack_pairs(
  pairs: Iterable[framing.Pair],
  lengths: framing.Lengths,
  *,
  rows_at_once: int | None = None,
) -> Iterator[list[framing.Pair]]:
  """Packs pairs into rows; pairs are never split, lost or repeated.

  Args:
    pairs: pairs, read as rows are needed.
    lengths: lengths of the rows; a side of length 0 is not used.
    rows_at_once: rows that are packed together, at least 1; their pairs are in
      memory. None for 4096, or fewer if those have over 34M positions.

  Yields:
    The pairs of a row, at least one, in the order of the stream.

  Raises:
    ValueError: a pair is longer than a row, or has no targets.
  """
  capacity = np.array([lengths.encoder, lengths.decoder])
  if rows_at_once is None:
    rows_at_once = max(min(_ROWS, _POSITIONS // lengths.teacher), 1)
  # A side of length 0 has no cost: a limit of at least 1 is never reached.
  limits = (rows_at_once * np.maximum(capacity, 1)).tolist()
  waiting: list[framing.Pair] = []
  costs: list[tuple[int, int]] = []
  stream = iter(pairs)
  ended = False
  while not ended:
    ended = True
    # Plain integers: arrays of two numbers took longer than all else here.
    encoder, decoder = map(sum, zip(*costs, strict=True)) if costs else (0, 0)
    for pair in stream:
      cost = pair_cost(pair, lengths)
      waiting.append(pair)
      costs.append(cost)
      encoder, decoder = encoder + cost[0], decoder + cost[1]
      if encoder >= limits[0] or decoder >= limits[1]:
        ended = False
        break
    if not waiting:
      return
    in_order = _pack_in_order(costs, lengths)
    # The last row in order, to which the next round may add: its pairs are the
    # last of the round, so that the others are a prefix of `costs`.
    open_row = [] if ended else in_order.pop()
    closed = len(waiting) - len(open_row)
    best_fit = _pack_best_fit(np.array(costs)[:closed], capacity)
    for row in min(in_order, best_fit, key=len):
      yield [waiting[i] for i in row]
    waiting, costs = waiting[closed:], costs[closed:]


def _pack_in_order(
  costs: list[tuple[int, int]], lengths: framing.Lengths
) -> list[list[int]]:
  """Packs pairs as they come, each into the last row or a new row."""
  rows: list[list[int]] = []
  encoder = decoder = 0  # Free positions of the last row.
  for i, (inputs, targets) in enumerate(costs):
    if not rows or inputs > encoder or targets > decoder:
      rows.append([])
      encoder, decoder = lengths.encoder, lengths.decoder
    rows[-1].append(i)
    encoder, decoder = encoder - inputs, decoder - targets
  return rows


def _pack_best_fit(costs: np.ndarray, capacity: np.ndarray) -> list[list[int]]:
  """Packs pairs from the largest to the smallest, each where it fits best.

  Open rows are indexed by their free positions of the side with more demand,
  and within each number sorted by those of the other side. Searching all rows
  for each pair would take time quadratic in the number of rows.

  Args:
    costs: positions of the pairs, [n, 2].
    capacity: positions of a row, [2].

  Returns:
    Indices of the pairs by row, ascending in each row; rows by their first.
  """
  shares = costs / np.maximum(capacity, 1)
  demand = shares.sum(axis=0)
  # Free positions of the side with less demand matter less: when the other side
  # is full everywhere, some of them stay free however pairs are placed.
  weights = demand / demand.max(initial=1e-9) / np.maximum(capacity, 1)
  # Stable: records must not depend on the way in which a processor's sort
  # treats equal pairs.
  order = np.argsort(-shares.sum(axis=1), kind='stable').tolist()
  # The side that binds comes first: rows have few free positions of it, which
  # ends the search below early.
  sides = [0, 1] if demand[0] >= demand[1] else [1, 0]
  weight, other_weight = weights[sides].tolist()
  size, other_size = capacity[sides].tolist()
  needs = costs[:, sides].tolist()
  rows: list[list[int]] = []
  # By free positions: (free positions of the other side, row), sorted.
  by_room: list[list[tuple[int, int]]] = [[] for _ in range(size + 1)]
  # Bit n is set if and only if `by_room[n]` is not empty, so that the search
  # skips a run of empty lists in a single step of integer arithmetic.
  occupied = 0
  for i in order:
    need, other_need = needs[i]
    least, slot = math.inf, None
    room, bits = need, occupied >> need  # Bit 0 of `bits` stands for `room`.
    while bits:
      # `bits & -bits` is the lowest set bit: the least room in which rows are.
      skip = (bits & -bits).bit_length()
      room, bits = room + skip - 1, bits >> skip
      waste = ((room - need) * weight) ** 2
      # More room only wastes more: no later row can be better.
      if waste >= least:
        break
      # Entries are sorted, so that the first in which the other side fits
      # wastes the least of this room; a tuple of a single number sorts before
      # all entries with this number.
      index = bisect.bisect_left(by_room[room], (other_need,))
      if index < len(by_room[room]):
        other_room = by_room[room][index][0]
        waste += ((other_room - other_need) * other_weight) ** 2
        # Strictly less: of equal rows that with the least room is used.
        if waste < least:
          least, slot = waste, (room, index)
      room += 1
    if slot is None:
      room, other_room, row = size, other_size, len(rows)
      rows.append([])
    else:
      room, index = slot
      other_room, row = by_room[room].pop(index)
      # The bit was set, so that `^` clears it when the list became empty.
      occupied ^= (not by_room[room]) << room
    rows[row].append(i)
    bisect.insort(by_room[room - need], (other_room - other_need, row))
    occupied |= 1 << room - need
  # In the order of the stream, as the rows of `_pack_in_order` are.
  return sorted(sorted(row) for row in rows)


def single_pairs(
  pairs: Iterable[framing.Pair], lengths: framing.Lengths
) -> Iterator[list[framing.Pair]]:
  """Yields rows of a single pair, in order: `pack=False`.

  Raises:
    ValueError: a pair is longer than a row, or has no targets.
  """
  for pair in pairs:
    pair_cost(pair, lengths)
    yield [pair]


def pair_cost(pair: framing.Pair, lengths: framing.Lengths) -> tuple[int, int]:
  """Returns encoder and decoder positions of a pair that fits into a row."""
  encoder, decoder = pair.positions(lengths)
  if not len(pair.targets):
    raise ValueError(f'a pair of {len(pair.inputs)} inputs has no targets')
  if encoder > lengths.encoder or decoder > lengths.decoder:
    raise ValueError(
      f'a pair takes {encoder} encoder and {decoder} decoder positions, more'
      f' than the {lengths.encoder} and {lengths.decoder} of a row'
    )
  return encoder, decoder
