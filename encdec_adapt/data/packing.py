"""Packs (inputs, targets) pairs into rows of two lengths.

A pair takes m + 1 encoder and n decoder positions (`data/batch.py`), and a
row holds pairs as long as both sides fit: two-dimensional bin packing. Pairs
are read until they fill some thousand rows, and placed from the largest to the
smallest (by the sum of their shares of both sides), each into the open row
that it leaves with the least room (best-fit decreasing; room is the norm of the
free shares of both sides, of which the side with less demand counts less). On
documents of mixed lengths this fills more than 0.97 of the binding side.

The same pairs are packed in order, too, which is cheap; where that needs fewer
rows, it is taken. The pairs of its last row, which is still open, are left for
the next round, so no stream ever takes more rows than packing it in order.

This module imports numpy only: neither TensorFlow nor jax.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from encdec_adapt.data import batch

# Rows that are packed together: fewer where they are long, for memory's sake.
_ROWS = 4096
_POSITIONS = 1 << 25


def pack_pairs(
  pairs: Iterable[batch.Pair],
  lengths: batch.Lengths,
  *,
  rows_at_once: int | None = None,
) -> Iterator[list[batch.Pair]]:
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
  waiting: list[batch.Pair] = []
  costs: list[tuple[int, int]] = []
  demand = np.zeros(2)
  stream = iter(pairs)
  ended = False
  while not ended:
    ended = True
    for pair in stream:
      waiting.append(pair)
      costs.append(pair_cost(pair, lengths))
      demand += costs[-1]
      if (demand >= rows_at_once * np.maximum(capacity, 1)).any():
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
    demand = np.array(costs).sum(axis=0) if kept else np.zeros(2)


def _pack_in_order(
  costs: list[tuple[int, int]], lengths: batch.Lengths
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

  Args:
    costs: positions of the pairs, [n, 2].
    capacity: positions of a row, [2].

  Returns:
    Indices of the pairs by row; each row, and all by their first, in order.
  """
  shares = costs / np.maximum(capacity, 1)
  demand = shares.sum(axis=0)
  weights = demand / demand.max(initial=1e-9)
  order = np.argsort(-shares.sum(axis=1), kind='stable')
  rows: list[list[int]] = []
  free = np.zeros((2, len(costs)), np.int64)  # [side, row]
  shared = weights / np.maximum(capacity, 1)
  for i in order:
    inputs, targets = costs[i]
    left = free[:, : len(rows)] - costs[i][:, None]
    fits = np.flatnonzero((left[0] >= 0) & (left[1] >= 0))
    if len(fits):
      encoder, decoder = left[:, fits] * shared[:, None]
      row = fits[np.argmin(encoder * encoder + decoder * decoder)]
    else:
      row = len(rows)
      rows.append([])
      free[:, row] = capacity
    rows[row].append(int(i))
    free[:, row] -= (inputs, targets)
  return sorted(sorted(row) for row in rows)


def single_pairs(
  pairs: Iterable[batch.Pair], lengths: batch.Lengths
) -> Iterator[list[batch.Pair]]:
  """Yields rows of one pair each, in order: `pack=False`.

  Raises:
    ValueError: a pair is longer than a row, or has no targets.
  """
  for pair in pairs:
    pair_cost(pair, lengths)
    yield [pair]


def pair_cost(pair: batch.Pair, lengths: batch.Lengths) -> tuple[int, int]:
  """Returns encoder and decoder positions of a pair that fits into a row."""
  encoder, decoder = batch.positions(pair, lengths)
  if not len(pair.targets):
    raise ValueError(f'a pair of {len(pair.inputs)} inputs has no targets')
  if encoder > lengths.encoder or decoder > lengths.decoder:
    raise ValueError(
      f'a pair takes {encoder} encoder and {decoder} decoder positions, more'
      f' than the {lengths.encoder} and {lengths.decoder} of a row'
    )
  return encoder, decoder
