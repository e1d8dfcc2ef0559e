"""Fill of our pair packer against packing pairs in the order they come.

Pairs are made from documents of mixed lengths (log-normal), cut into windows
and split in two: uniformly at random, so that each pair's two sides differ,
or in half. Rows of several shapes: where the ratio of the row's sides is not
that of the pairs, one side binds and only its fill can be near 1.
"""

from collections.abc import Iterable, Iterator, Sequence
import time
from typing import Any

import numpy as np

from encdec_adapt.data import batch, packing
from tests.benchmarks import results


def pack_in_order(
  pairs: Iterable[batch.Pair], lengths: batch.Lengths
) -> Iterator[list[batch.Pair]]:
  """Adds pairs to a row until one does not fit, then starts the next row.

  The usual way of packing for two sides (T5X and SeqIO's trim-and-pack).
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
  documents: int, lengths: batch.Lengths, split: str, rng: np.random.Generator
) -> list[batch.Pair]:
  """Pairs of documents whose lengths spread over two orders of magnitude."""
  window = min(lengths.encoder, lengths.decoder)
  pairs = []
  for length in rng.lognormal(5.0, 1.0, documents).astype(int) + 2:
    for start in range(0, length, window):
      size = min(window, length - start)
      if size < 2:
        continue
      cut = size // 2 if split == 'half' else int(rng.integers(1, size))
      tokens = np.zeros(size, np.int32)
      pairs.append(batch.Pair(tokens[:cut], tokens[cut:]))
  return pairs


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Measures and prints; the ratio is of the binding sides' fill."""
  parser = results.parser(__doc__)
  parser.add_argument('--documents', type=int, default=20_000)
  arguments = parser.parse_args(argv)

  rows = []
  for encoder, decoder in ((512, 512), (512, 256), (1024, 1024)):
    for split in ('half', 'uniform'):
      rows += _compare(batch.Lengths(encoder, decoder), split, arguments)
  return results.report('packing', rows, arguments)


def _compare(lengths: batch.Lengths, split: str, arguments):
  """Rows of both packers on the same pairs."""
  pairs = make_pairs(
    arguments.documents, lengths, split, np.random.default_rng(0)
  )
  packers = {
    'ours': lambda: packing.pack_pairs(
      pairs, lengths, np.random.default_rng(0)
    ),
    'in order': lambda: pack_in_order(pairs, lengths),
  }
  rows = []
  for name, pack in packers.items():
    start = time.perf_counter()
    packed = list(pack())
    seconds = time.perf_counter() - start
    encoder, decoder = packing.fill(packed, lengths)
    rows.append(
      {
        'row': f'{lengths.encoder}+{lengths.decoder}',
        'split': split,
        'packer': name,
        'pairs': len(pairs),
        'rows': len(packed),
        'encoder fill': encoder,
        'decoder fill': decoder,
        'binding fill': max(encoder, decoder),
        'pairs/s': len(pairs) / seconds,
      }
    )
  for row in rows:
    row['ratio'] = row['binding fill'] / rows[1]['binding fill']
  return rows


if __name__ == '__main__':
  main()
