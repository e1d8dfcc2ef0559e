"""Making records and reading them: tokens per second per core.

Reading: rows of random tokens, as training reads them. `rows` only reads and
decodes, `batches` frames them too, `batches, teacher` also makes the
teacher's row; the ratio is to `rows`. Tokens are those a row can hold (S + T)
per second of processor time.

Making: Python's own text through tokenising, objective and packing in one
process, TensorFlow's import left out; tokens are those of the pairs.
"""

from collections.abc import Callable, Sequence
import pathlib
import tempfile
import time
from typing import Any

import numpy as np

from encdec_adapt.data import (
  batch,
  loader,
  materialization,
  records,
  text_sources,
)
from encdec_adapt.tokenizers import vocabularies, vocabulary_training
from tests import framing
from tests.benchmarks import results


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Measures and prints."""
  parser = results.parser(__doc__)
  parser.add_argument('--rows', type=int, default=4_000)
  parser.add_argument('--batch_size', type=int, default=32)
  parser.add_argument('--encoder_length', type=int, default=512)
  parser.add_argument('--decoder_length', type=int, default=512)
  parser.add_argument(
    '--text_bytes', type=int, default=3_000_000, help='0: do not make records'
  )
  parser.add_argument('--vocab_size', type=int, default=4096)
  arguments = parser.parse_args(argv)
  with tempfile.TemporaryDirectory() as folder:
    rows = _read(pathlib.Path(folder) / 'random', arguments)
    if arguments.text_bytes:
      rows.append(_make(pathlib.Path(folder) / 'text', arguments))
  return results.report('records', rows, arguments)


def _measure(task: str, tokens: int, run: Callable[[], Any]) -> dict[str, Any]:
  wall, processor = time.perf_counter(), time.process_time()
  run()
  wall = time.perf_counter() - wall
  processor = time.process_time() - processor
  return {
    'task': task,
    'tokens': tokens,
    'tokens/s per core': tokens / processor,
    'seconds': wall,
    'processor seconds': processor,
  }


def _read(folder: pathlib.Path, arguments) -> list[dict[str, Any]]:
  """Rows on reading."""
  spec = records.RecordSpec(
    source='random',
    split='train',
    objective='prefix_lm',
    encoder_length=arguments.encoder_length,
    decoder_length=arguments.decoder_length,
    shards=1,
  )
  rng = np.random.default_rng(0)
  with records.ShardWriter(folder, spec, 0, 0) as writer:
    for _ in range(arguments.rows):
      writer.write(_random_row(spec.lengths, rng))
    entry = writer.finish()
  records.write_manifest(folder, spec, {(0, 0): entry}, framing.DESCRIBED)
  record_set = records.RecordSet.open(folder)

  def decode():
    for first in range(0, arguments.rows, arguments.batch_size):
      stop = min(first + arguments.batch_size, arguments.rows)
      record_set.read(range(first, stop))

  def frame(teacher):
    stream = loader.Loader(
      record_set, spec.lengths, arguments.batch_size, teacher=teacher
    )
    for _ in stream:
      pass

  tokens = arguments.rows * (spec.encoder_length + spec.decoder_length)
  decode()  # The file is in memory from here on.
  rows = [
    _measure('rows', tokens, decode),
    _measure('batches', tokens, lambda: frame(False)),
    _measure('batches, teacher', tokens, lambda: frame(True)),
  ]
  for row in rows:
    row['ratio'] = row['tokens/s per core'] / rows[0]['tokens/s per core']
  return rows


def _random_row(
  lengths: batch.Lengths, rng: np.random.Generator
) -> list[batch.Pair]:
  """Four pairs that fill a row."""
  sides = [lengths.encoder // 4 - 1, lengths.decoder // 4]
  return [
    batch.Pair(*(rng.integers(5, 32_000, n, dtype=np.int32) for n in sides))
    for _ in range(4)
  ]


def _make(folder: pathlib.Path, arguments) -> dict[str, Any]:
  """The row on making records."""
  spec = records.RecordSpec(
    source='python',
    split='train',
    objective='prefix_lm',
    encoder_length=arguments.encoder_length,
    decoder_length=arguments.decoder_length,
    shards=1,
    max_bytes=arguments.text_bytes,
  )
  vocabulary = folder / 'vocabulary.model'
  documents = text_sources.open_source(
    'python', max_bytes=arguments.text_bytes
  ).documents()
  vocabulary_training.train_vocabulary(
    (document.text for document in documents),
    vocabulary,
    arguments.vocab_size,
    max_bytes=min(arguments.text_bytes, 1_000_000),
  )
  warm = records.RecordSpec(
    source='python',
    split='train',
    objective='prefix_lm',
    encoder_length=arguments.encoder_length,
    decoder_length=arguments.decoder_length,
    shards=1,
    max_bytes=20_000,
  )
  made = []

  def make(name, spec):
    made.extend(
      materialization.materialize_sets(
        [(spec, folder / name)],
        vocabularies.Choice(str(vocabulary)),
      )
    )

  make('warm', warm)  # Imports TensorFlow.
  row = _measure('making', 0, lambda: make('records', spec))
  totals = made[-1]['totals']
  # An encoder position per pair is BOS.
  row['tokens'] = (
    totals['encoder_positions'] - totals['pairs'] + totals['target_tokens']
  )
  row['tokens/s per core'] = row['tokens'] / row['processor seconds']
  return {**row, 'ratio': '-'}


if __name__ == '__main__':
  main()
