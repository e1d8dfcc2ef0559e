"""Fill of our pair packer against packing pairs in the order they come.

Pairs are those of our objectives on documents of mixed lengths (log-normal,
median 300 tokens). Where the sides of a row do not have the ratio of the
pairs, one side binds and the other cannot be full.
"""

from collections.abc import Iterable, Iterator, Sequence
import time
import types
from typing import Any

import numpy as np

from encdec_adapt.data import batch, objective_names, packing
from tests import framing
from tests.benchmarks import results

CASES = tuple(
  (objective, lengths)
  for objective in ('prefix_lm', 'prefix_lm_uniform', 'ul2')
  for lengths in ((256, 256), (512, 256), (1024, 1024))
  # Half of the tokens of some denoisers are targets.
  if (objective, lengths) != ('ul2', (512, 256))
)
_SPECIAL_IDS = types.SimpleNamespace(
  path='',
  eos=framing.EOS,
  sentinels=range(10, 106),
  mode_ids={'R': 7, 'S': 8, 'X': 9},
)


def pack_in_order(
  pairs: Iterable[batch.Pair], lengths: batch.Lengths
) -> Iterator[list[batch.Pair]]:
  """Adds pairs to a row until one does not fit, then starts the next row.

  The usual greedy way, which most input pipelines have.
  """
  row: list[batch.Pair] = []
  used = np.zeros(2, np.int64)
  capacity = np.array([lengths.encoder, lengths.decoder])
  for pair in pairs:
    cost = np.array(packing.pair_cost(pair, lengths))
    if row and (used + cost > capacity).any():
      yield row
      row, used = [], np.zeros(2, np.int64)
    row.append(pair)
    used += cost
  if row:
    yield row


def make_pairs(
  documents: int, objective: str, lengths: batch.Lengths
) -> list[batch.Pair]:
  """Pairs of documents whose lengths spread over two orders of magnitude."""
  rng = np.random.default_rng(0)
  split = objective_names.make_objective(
    objective, lengths, _SPECIAL_IDS, sentinel_policy='recycle'
  )
  pairs = []
  for length in rng.lognormal(np.log(300), 1.0, documents).astype(int) + 1:
    pairs += split.pairs(np.full(length, 200, np.int32), lambda _: rng)
  return pairs


def fill(
  rows: Sequence[Sequence[batch.Pair]], lengths: batch.Lengths
) -> tuple[float, float]:
  """Returns the used share of encoder and decoder positions, 0 to 1."""
  used = np.array(
    [packing.pair_cost(pair, lengths) for row in rows for pair in row]
  ).sum(axis=0)
  total = np.maximum([lengths.encoder, lengths.decoder], 1) * len(rows)
  encoder, decoder = used / total
  return float(encoder), float(decoder)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Measures and prints; the ratio is of the binding sides' fill."""
  parser = results.parser(__doc__)
  parser.add_argument('--documents', type=int, default=8_000)
  arguments = parser.parse_args(argv)

  rows = []
  for objective, lengths in CASES:
    rows += _compare(batch.Lengths(*lengths), objective, arguments.documents)
  return results.report('packing', rows, arguments)


def _compare(
  lengths: batch.Lengths, objective: str, documents: int
) -> list[dict[str, Any]]:
  """Rows of both packers on the same pairs."""
  pairs = make_pairs(documents, objective, lengths)
  packed, seconds = {}, {}
  for name in ('ours', 'in order'):
    start = time.perf_counter()
    if name == 'ours':
      packed[name] = list(packing.pack_pairs(pairs, lengths))
    else:
      packed[name] = list(pack_in_order(pairs, lengths))
    seconds[name] = time.perf_counter() - start
  fills = {name: fill(rows, lengths) for name, rows in packed.items()}
  # Every packer places the same tokens, so the same side binds.
  binding = int(np.argmax(fills['ours']))
  return [
    {
      'row': f'{lengths.encoder}+{lengths.decoder}',
      'objective': objective,
      'packer': name,
      'pairs': len(pairs),
      'rows': len(packed[name]),
      'encoder fill': fills[name][0],
      'decoder fill': fills[name][1],
      'binding': ('encoder', 'decoder')[binding],
      'ratio': fills[name][binding] / fills['in order'][binding],
      'us/pair': 1e6 * seconds[name] / len(pairs),
    }
    for name in packed
  ]


if __name__ == '__main__':
  main()
