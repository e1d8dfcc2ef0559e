"""Packs (inputs, targets) pairs into rows of two lengths.

A pair takes m + 1 encoder and n decoder positions (`objectives/framing.py`),
and a row holds pairs as long as both sides fit: two-dimensional bin packing.
Pairs are read until they fill some thousand rows, and placed from the largest
to the smallest (by the sum of their shares of both sides), each into the open
row that it leaves with the least room (best-fit decreasing; room is the norm of
the free shares of both sides, of which the side with less demand counts less).
On documents of mixed lengths this fills more than 0.97 of the binding side.

The same pairs are packed in order, too, which is cheap; where that needs fewer
rows, it is taken. The pairs of its last row, which is still open, are left for
the next round, so no stream ever takes more rows than packing it in order.

This module imports numpy only: neither TensorFlow nor jax.
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
  """Packs pairs into rows; every pair is in exactly one row, whole.

  Args:
    pairs: pairs, read as rows are needed.
    lengths: lengths of the rows; a side of length 0 is not used.
    rows_at_once: rows that are packed together, at least 1, whose pairs are in
      memory; None for 4096, or fewer if those have over 34M positions.

  Yields:
    The pairs of one row, at least one, in the order of the stream.

  Raises:
    ValueError: a pair is longer than a row, or has no targets.
  """
  capacity = np.array([lengths.encoder, lengths.decoder])
  if rows_at_once is None:
    rows_at_once = max(min(_ROWS, _POSITIONS // lengths.teacher), 1)
  most = (rows_at_once * np.maximum(capacity, 1)).tolist()
  waiting: list[framing.Pair] = []
  costs: list[tuple[int, int]] = []
  stream = iter(pairs)
  ended = False
  while not ended:
    ended = True
    # Plain integers: arrays of two take longer than all else here.
    encoder, decoder = map(sum, zip(*costs, strict=True)) if costs else (0, 0)
    for pair in stream:
      cost = pair_cost(pair, lengths)
      waiting.append(pair)
      costs.append(cost)
      encoder, decoder = encoder + cost[0], decoder + cost[1]
      if encoder >= most[0] or decoder >= most[1]:
        ended = False
        break
    if not waiting:
      return
    array = np.array(costs)
    rows = in_order = _pack_in_order(costs, lengths)
    kept = [] if ended else in_order.pop()
    best = _pack_best_fit(array[: len(waiting) - len(kept)], capacity)
    if len(best) < len(in_order):
      rows = best
    for row in rows:
      yield [waiting[i] for i in row]
    waiting, costs = ([one[i] for i in kept] for one in (waiting, costs))


def _pack_in_order(
  costs: list[tuple[int, int]], lengths: framing.Lengths
) -> list[list[int]]:
  """Packs pairs as they come, each into the last row or a new one."""
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
  """Packs pairs from the largest to the smallest.

  Rows are kept by their free positions of the side with more demand, and there
  in the order of the free positions of the other, so that few are looked at.

  Args:
    costs: positions of the pairs, [n, 2].
    capacity: positions of a row, [2].

  Returns:
    Indices of the pairs by row; each row, and all by their first, in order.
  """
  shares = costs / np.maximum(capacity, 1)
  demand = shares.sum(axis=0)
  weights = demand / demand.max(initial=1e-9) / np.maximum(capacity, 1)
  order = np.argsort(-shares.sum(axis=1), kind='stable').tolist()
  sides = [0, 1] if demand[0] >= demand[1] else [1, 0]
  weight, other_weight = weights[sides].tolist()
  size, other_size = capacity[sides].tolist()
  needs = costs[:, sides].tolist()
  rows: list[list[int]] = []
  # By free positions: (free positions of the other side, row), sorted.
  by_room: list[list[tuple[int, int]]] = [[] for _ in range(size + 1)]
  occupied = 0  # Bit n: whether some row has n free positions.
  for i in order:
    need, other_need = needs[i]
    best, found = math.inf, None
    room, above = need, occupied >> need
    while above:
      skip = (above & -above).bit_length()
      room, above = room + skip - 1, above >> skip
      left = ((room - need) * weight) ** 2
      if left >= best:
        break
      at = bisect.bisect_left(by_room[room], (other_need,))
      if at < len(by_room[room]):
        other = by_room[room][at][0]
        left += ((other - other_need) * other_weight) ** 2
        if left < best:
          best, found = left, (room, at)
      room += 1
    if found is None:
      room, other, row = size, other_size, len(rows)
      rows.append([])
    else:
      room, at = found
      other, row = by_room[room].pop(at)
      occupied ^= (not by_room[room]) << room
    rows[row].append(i)
    bisect.insort(by_room[room - need], (other - other_need, row))
    occupied |= 1 << room - need
  return sorted(sorted(row) for row in rows)


def single_pairs(
  pairs: Iterable[framing.Pair], lengths: framing.Lengths
) -> Iterator[list[framing.Pair]]:
  """Yields rows of one pair each, in order: `pack=False`.

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
