"""Packs (inputs, targets) pairs into rows of two lengths.

A pair takes m + 1 encoder and n decoder positions (`objectives/framing.py`),
and a row holds pairs as long as both sides fit: two-dimensional bin packing. A
buffer of pairs for some thousand rows is packed with best-fit decreasing: from
the largest pair to the smallest (sum of its shares of both sides), each into
the open row with the least room left (norm of the free shares of both sides,
weighted by their demands). Documents of mixed lengths fill more than 0.97 of
the binding side.

The same pairs are also packed in order, which is cheap, and the result with
fewer rows is used. Pairs of the last in-order row, which is still open, move to
the next round, so that a stream never takes more rows than packing it in order.

This module imports numpy, but neither TensorFlow nor jax.
"""

import bisect
from collections.abc import Iterable, Iterator
import math

import numpy as np

from encdec_adapt.objectives import framing

# Rows packed together; fewer if they are long, to bound memory.
_ROWS = 4096
_POSITIONS = 1 << 25


def pack_pairs(
  pairs: Iterable[framing.Pair],
  lengths: framing.Lengths,
  *,
  rows_at_once: int | None = None,
) -> Iterator[list[framing.Pair]]:
  """Packs pairs into rows; never splits, drops or repeats a pair.

  Args:
    pairs: pairs, read lazily.
    lengths: row lengths; 0 for an unused side.
    rows_at_once: rows packed together in memory, at least 1. None for 4096, or
      fewer if those have over 34M positions.

  Yields:
    The pairs of a row, at least one, in stream order.

  Raises:
    ValueError: a pair is longer than a row, or has no targets.
  """
  capacity = np.array([lengths.encoder, lengths.decoder])
  if rows_at_once is None:
    rows_at_once = max(min(_ROWS, _POSITIONS // lengths.teacher), 1)
  # A side of length 0 costs nothing, so it never reaches a limit of 1.
  limits = (rows_at_once * np.maximum(capacity, 1)).tolist()
  waiting: list[framing.Pair] = []
  costs: list[tuple[int, int]] = []
  stream = iter(pairs)
  ended = False
  while not ended:
    ended = True
    # Plain integers: arrays of two numbers dominated the time.
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
    # The next round may add to the last in-order row. Its pairs are the last of
    # the round, so the others are a prefix of `costs`.
    open_row = [] if ended else in_order.pop()
    closed = len(waiting) - len(open_row)
    best_fit = _pack_best_fit(np.array(costs)[:closed], capacity)
    for row in min(in_order, best_fit, key=len):
      yield [waiting[i] for i in row]
    waiting, costs = waiting[closed:], costs[closed:]


def _pack_in_order(
  costs: list[tuple[int, int]], lengths: framing.Lengths
) -> list[list[int]]:
  """Packs pairs in order, each into the last row or a new row."""
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
  """Packs pairs by best-fit decreasing.

  Open rows are indexed by free positions of the side with more demand, then
  sorted by free positions of the other side. Searching all rows for each pair
  would be quadratic in the number of rows.

  Args:
    costs: positions of the pairs, [n, 2].
    capacity: positions of a row, [2].

  Returns:
    Indices of the pairs of each row, ascending; rows sorted by first index.
  """
  shares = costs / np.maximum(capacity, 1)
  demand = shares.sum(axis=0)
  # Free positions of the side with less demand matter less: some stay free in
  # any packing once the other side is full.
  weights = demand / demand.max(initial=1e-9) / np.maximum(capacity, 1)
  # Stable: records must not depend on how a processor sorts equal pairs.
  order = np.argsort(-shares.sum(axis=1), kind='stable').tolist()
  # The binding side comes first: its few free positions end the search early.
  sides = [0, 1] if demand[0] >= demand[1] else [1, 0]
  weight, other_weight = weights[sides].tolist()
  size, other_size = capacity[sides].tolist()
  needs = costs[:, sides].tolist()
  rows: list[list[int]] = []
  # By free positions: (free positions of the other side, row), sorted.
  by_room: list[list[tuple[int, int]]] = [[] for _ in range(size + 1)]
  # Bit n is set if and only if `by_room[n]` is not empty: the search skips runs
  # of empty lists in one integer operation.
  occupied = 0
  for i in order:
    need, other_need = needs[i]
    least, slot = math.inf, None
    room, bits = need, occupied >> need  # Bit 0 of `bits` stands for `room`.
    while bits:
      # `bits & -bits` is the lowest set bit: the least sufficient room.
      skip = (bits & -bits).bit_length()
      room, bits = room + skip - 1, bits >> skip
      waste = ((room - need) * weight) ** 2
      # More room only wastes more: no later row can be better.
      if waste >= least:
        break
      # Entries are sorted, so the first entry that fits the other side wastes
      # the least of this room. A 1-tuple sorts before all entries with its
      # number.
      index = bisect.bisect_left(by_room[room], (other_need,))
      if index < len(by_room[room]):
        other_room = by_room[room][index][0]
        waste += ((other_room - other_need) * other_weight) ** 2
        # Strictly less: ties go to the row with the least room.
        if waste < least:
          least, slot = waste, (room, index)
      room += 1
    if slot is None:
      room, other_room, row = size, other_size, len(rows)
      rows.append([])
    else:
      room, index = slot
      other_room, row = by_room[room].pop(index)
      # The bit is set, so `^` clears it if the list is now empty.
      occupied ^= (not by_room[room]) << room
    rows[row].append(i)
    bisect.insort(by_room[room - need], (other_room - other_need, row))
    occupied |= 1 << room - need
  # In stream order, like the rows of `_pack_in_order`.
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
  """Returns encoder and decoder positions of a pair; checks that it fits."""
  encoder, decoder = pair.positions(lengths)
  if not len(pair.targets):
    raise ValueError(f'a pair of {len(pair.inputs)} inputs has no targets')
  if encoder > lengths.encoder or decoder > lengths.decoder:
    raise ValueError(
      f'a pair takes {encoder} encoder and {decoder} decoder positions, more'
      f' than the {lengths.encoder} and {lengths.decoder} of a row'
    )
  return encoder, decoder
