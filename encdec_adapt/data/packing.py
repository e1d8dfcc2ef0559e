"""Packs (inputs, targets) pairs into rows of two lengths.

A pair takes m + 1 encoder and n decoder positions (`data/batch.py`), and a
row holds pairs as long as both sides fit: two-dimensional bin packing. The
packer has a bounded pool of pairs. It starts a row with the largest of a few
random pairs; then, as long as one fits, it adds the pair that brings the row
nearest to its goal, alone or with one more pair after it. The goal is a full
binding side, and on the other side its share of what is in the pool, so that
the remaining pairs keep a ratio that can be packed. (The norm-based greedy
rule of Panigrahy et al. 2011, "Heuristics for vector bin packing", aims at two
full sides: with rows of 512 + 256 it spends short targets on filling inputs
that need not be full.) On documents of mixed lengths it fills more than 0.97
of the binding side.

This module imports numpy only: neither TensorFlow nor jax.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from encdec_adapt.data import batch

_POOL_SIZE = 2048  # Pairs.
# A row starts with the largest of this many pairs: large pairs are hard to
# place, but always taking the largest would leave their complements alone.
_FIRST = 4
_TRIED = 4  # Pairs that are also tried together with a following one.
# The pool's ratio is a sample: a side that is nearly as full as the other has
# the goal of being full, too.
_SLACK = 1.05


def pack_pairs(
  pairs: Iterable[batch.Pair],
  lengths: batch.Lengths,
  rng: np.random.Generator,
  *,
  pool_size: int = _POOL_SIZE,
) -> Iterator[list[batch.Pair]]:
  """Packs pairs into rows; every pair is in exactly one row, whole.

  Args:
    pairs: pairs, read as the pool empties.
    lengths: S and T of the rows; S = 0 packs the targets alone.
    rng: draws the first pair of each row and the pairs that are tried.
    pool_size: number of pairs to choose from.

  Yields:
    The pairs of one row, at least one, in the order of framing.

  Raises:
    ValueError: a pair is longer than a row, or has no targets.
  """
  capacity = np.array([lengths.encoder, lengths.decoder])
  scale = np.maximum(capacity, 1)
  costs = np.zeros((2, pool_size), np.int64)  # [side, pair in the pool]
  pool: list[batch.Pair] = []
  stream = iter(pairs)
  while True:
    for pair in stream:
      costs[:, len(pool)] = pair_cost(pair, lengths)
      pool.append(pair)
      if len(pool) == pool_size:
        break
    if not pool:
      return
    demand = costs[:, : len(pool)].sum(axis=1) / scale
    goal = scale * np.minimum(_SLACK * demand / demand.max(), 1)
    row, free = [], capacity
    pick = _first(costs[:, : len(pool)], scale, rng)
    while pick is not None:
      row.append(pool[pick])
      free, goal = free - costs[:, pick], goal - costs[:, pick]
      last = len(pool) - 1
      pool[pick], costs[:, pick] = pool[last], costs[:, last]
      pool.pop()
      pick = _next(costs[:, :last], free, goal, scale, rng)
    yield row


def _first(
  costs: np.ndarray, scale: np.ndarray, rng: np.random.Generator
) -> int:
  """Returns the index of the largest of a few random pairs of [2, n]."""
  drawn = rng.integers(costs.shape[1], size=_FIRST)
  return int(drawn[np.argmax(_square(costs[:, drawn], scale))])


def _next(
  costs: np.ndarray,
  free: np.ndarray,
  goal: np.ndarray,
  scale: np.ndarray,
  rng: np.random.Generator,
) -> int | None:
  """Chooses the next pair of a row.

  Args:
    costs: positions of the pool's pairs, [2, n].
    free: free positions of the row, [2].
    goal: positions missing to the goal, [2]; negative beyond it.
    scale: positions of a row, [2].
    rng: draws the candidate pairs tried in addition to the best single one.

  Returns:
    The pair's index in the pool, None if none fits.
  """
  fits = np.flatnonzero(_fit(costs, free))
  if not len(fits):
    return None
  costs = costs[:, fits]
  distance = _square(goal[:, None] - costs, scale)
  best = int(np.argmin(distance))
  tried = np.append(rng.integers(len(fits), size=_TRIED - 1), best)
  both = costs[:, tried, None] + costs[:, None]  # [2, tried, n]
  after = _square(goal[:, None, None] - both, scale)
  after[~_fit(both, free)] = np.inf
  after[np.arange(len(tried)), tried] = np.inf  # A pair exists once.
  nearest = after.min(axis=1)
  if nearest.min() < distance[best]:
    best = tried[np.argmin(nearest)]
  return int(fits[best])


def _fit(costs: np.ndarray, free: np.ndarray) -> np.ndarray:
  """Returns which costs [2, ...] are within `free` [2] on both sides."""
  return (costs[0] <= free[0]) & (costs[1] <= free[1])


def _square(positions: np.ndarray, scale: np.ndarray) -> np.ndarray:
  """Returns the squared norm of shares of a row, from positions [2, ...]."""
  encoder, decoder = positions[0] / scale[0], positions[1] / scale[1]
  return encoder * encoder + decoder * decoder


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
  encoder = batch.encoder_cost(pair, lengths)
  decoder = len(pair.targets)
  if not decoder:
    raise ValueError(f'a pair of {len(pair.inputs)} inputs has no targets')
  if encoder > lengths.encoder or decoder > lengths.decoder:
    raise ValueError(
      f'a pair takes {encoder} encoder and {decoder} decoder positions, more'
      f' than the {lengths.encoder} and {lengths.decoder} of a row'
    )
  return encoder, decoder
