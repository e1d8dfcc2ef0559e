"""Packs (inputs, targets) pairs into rows of two lengths.

A pair takes m + 1 encoder and n decoder positions (`data/batch.py`), and a
row holds pairs as long as both sides fit: a two-sided bin packing. The packer
looks at a bounded pool of pairs. It starts a row with the largest of a few
drawn at random, then adds, as long as one fits, the pair that brings the row
nearest to its goal, or that would with one more pair after it. The goal is
that the side that binds is full and the other holds its share of what is in
the pool, so that what is left keeps the ratio in which it can be packed. (The
norm-based greedy rule of Panigrahy et al. 2011, "Heuristics for vector bin
packing", has a goal of both sides full: with rows of 512 + 256 it spends
short targets on filling inputs that need not be full.) On documents of mixed
lengths it fills above 0.97 of the side that binds.

Imports numpy only: neither TensorFlow nor jax.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from encdec_adapt.data import batch

POOL_SIZE = 2048  # pairs; a shard's last ones have fewer to choose from
# A row starts with the largest of so many: large pairs are the hard ones, but
# taking the very largest would leave its complements without theirs.
_FIRST = 4
_TRIED = 4  # pairs for which the next one is looked at, too
# The pool's ratio is a sample: a side that is nearly as full as the other is
# to be full, too.
_SLACK = 1.05


def pack_pairs(
  pairs: Iterable[batch.Pair],
  lengths: batch.Lengths,
  rng: np.random.Generator,
  *,
  pool_size: int = POOL_SIZE,
) -> Iterator[list[batch.Pair]]:
  """Packs pairs into rows; every pair is in exactly one row, whole.

  Args:
    pairs: read as the pool empties, so it may be longer than memory.
    lengths: S and T of the rows; S = 0 packs the targets alone.
    rng: draws what each row starts with and which pairs are tried.
    pool_size: how many pairs are looked at for each row.

  Yields:
    The pairs of one row, never none, in the order they are framed.

  Raises:
    ValueError: a pair is longer than a row, or has no targets.
  """
  capacity = np.array([lengths.encoder, lengths.decoder])
  scale = np.maximum(capacity, 1)
  costs = np.zeros((2, pool_size), np.int64)  # of the pool, by side
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
  """The largest of a few pairs drawn from a pool [2, n]."""
  drawn = rng.integers(costs.shape[1], size=_FIRST)
  return int(drawn[np.argmax(_square(costs[:, drawn], scale))])


def _next(
  costs: np.ndarray,
  free: np.ndarray,
  goal: np.ndarray,
  scale: np.ndarray,
  rng: np.random.Generator,
) -> int | None:
  """The pair that a row goes on with.

  Args:
    costs: of the pool, [2, n].
    free: positions that are left on both sides, [2].
    goal: positions to fill for the goal, [2], negative where it is exceeded.
    scale: the row's positions, [2].
    rng: draws the pairs that are tried besides the best one alone.

  Returns:
    Its index in the pool, None if no pair fits.
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
  after[np.arange(len(tried)), tried] = np.inf  # Each pair is there once.
  nearest = after.min(axis=1)
  if nearest.min() < distance[best]:
    best = tried[np.argmin(nearest)]
  return int(fits[best])


def _fit(costs: np.ndarray, free: np.ndarray) -> np.ndarray:
  """Which costs [2, ...] are within `free` [2] on both sides."""
  return (costs[0] <= free[0]) & (costs[1] <= free[1])


def _square(positions: np.ndarray, scale: np.ndarray) -> np.ndarray:
  """Squared length of shares of a row, from positions [2, ...]."""
  encoder, decoder = positions[0] / scale[0], positions[1] / scale[1]
  return encoder * encoder + decoder * decoder


def single_pairs(
  pairs: Iterable[batch.Pair], lengths: batch.Lengths
) -> Iterator[list[batch.Pair]]:
  """Rows of one pair each, in the order given: `pack=False`.

  Raises:
    ValueError: a pair is longer than a row, or has no targets.
  """
  for pair in pairs:
    pair_cost(pair, lengths)
    yield [pair]


def pair_cost(pair: batch.Pair, lengths: batch.Lengths) -> tuple[int, int]:
  """Encoder and decoder positions of a pair, checked to fit into a row."""
  encoder = batch.encoder_cost(pair, lengths)
  decoder = len(pair.targets)
  if not decoder:
    raise ValueError(
      f'a pair of {len(pair.inputs)} inputs has no targets; an objective must'
      ' leave at least one token to predict'
    )
  if encoder > lengths.encoder or decoder > lengths.decoder:
    raise ValueError(
      f'a pair takes {encoder} encoder and {decoder} decoder positions, more'
      f' than the {lengths.encoder} and {lengths.decoder} of a row; the'
      ' objective must split documents for these lengths'
    )
  return encoder, decoder


def fill(
  rows: Sequence[Sequence[batch.Pair]], lengths: batch.Lengths
) -> tuple[float, float]:
  """Share of the rows' encoder and decoder positions in use, 0 to 1.

  The encoder's is 0 where rows have no encoder (S = 0).
  """
  used = np.array(
    [pair_cost(pair, lengths) for row in rows for pair in row]
  ).sum(axis=0)
  total = np.maximum([lengths.encoder, lengths.decoder], 1) * len(rows)
  encoder, decoder = used / total
  return float(encoder), float(decoder)
