"""Making records and reading them: tokens per second per core, and packing.

Reading: rows of random tokens, as training reads them. `rows` only reads and
decodes, `batches` frames them too, `batches, teacher` also makes the
teacher's row; the ratio is to `rows`. Tokens are those a row can hold (S + T)
per second of processor time.

Making: Python's own text through tokenising, objective and packing in one
process, as whole documents and as paragraphs; the ratio is to the tokenizer
alone on the same texts. `SeqIO live` is the same task read as a SeqIO user
reads it, one example at a time and unpacked.

Packing: fill of both sides of the made rows, from their manifest; processor
time of packing their pairs again; and the rows as a share of those that packing
the pairs in the order they come needs.
"""

from collections.abc import Callable, Sequence
import json
import pathlib
import tempfile
import time
from typing import Any

import numpy as np

from encdec_adapt.data.making import materialization, packing, shard_jobs
from encdec_adapt.data.records import loader, record_sets, record_writing
from encdec_adapt.data.sources import text_sources
from encdec_adapt.objectives import framing
from encdec_adapt.tokenizers import vocabulary_pair, vocabulary_training
from tests import gemma_ids
from tests.benchmarks import results
from tests.data.making import test_packing


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Measures and prints."""
  arguments = results.parser(
    __doc__,
    rows=4_000,
    batch_size=32,
    encoder_length=512,
    decoder_length=512,
    text_bytes=3_000_000,  # 0: do not make records.
    vocab_size=4096,
    short='',  # FILE.jsonl#FIELD: other short documents than paragraphs.
  ).parse_args(argv)
  with tempfile.TemporaryDirectory() as folder:
    rows = _read(pathlib.Path(folder) / 'random', arguments)
    if arguments.text_bytes:
      rows += _make(pathlib.Path(folder) / 'text', arguments)
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
  spec = record_sets.RecordSpec(
    source='python',  # Which is not read: rows are random.
    split='train',
    objective='prefix_lm',
    encoder_length=arguments.encoder_length,
    decoder_length=arguments.decoder_length,
    shards=1,
  )
  rng = np.random.default_rng(0)
  parts = [record_sets.Part('prefix_lm', 'python')]
  (key,) = record_writing.shard_keys(spec, parts)
  with record_writing.ShardWriter(folder, spec, key) as writer:
    for _ in range(arguments.rows):
      writer.write(_random_row(spec.lengths, rng))
    entry = writer.finish()
  record_writing.write_manifest(
    folder, spec, parts, {key: entry}, gemma_ids.DESCRIBED
  )
  record_set = record_sets.RecordSet.open(folder)

  def decode():
    for first in range(0, arguments.rows, arguments.batch_size):
      stop = min(first + arguments.batch_size, arguments.rows)
      record_set.read(range(first, stop))

  def frame(teacher):
    for _ in loader.Loader(record_set, arguments.batch_size, teacher=teacher):
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
  lengths: framing.Lengths, rng: np.random.Generator
) -> list[framing.Pair]:
  """Four pairs that fill a row."""
  sides = [lengths.encoder // 4 - 1, lengths.decoder // 4]
  return [
    framing.Pair(*(rng.integers(5, 32_000, n, dtype=np.int32) for n in sides))
    for _ in range(4)
  ]


def _make(folder: pathlib.Path, arguments) -> list[dict[str, Any]]:
  """Rows on making records, beside the tokenizer alone and SeqIO's view."""
  folder.mkdir()
  source = text_sources.open_source('python', max_bytes=arguments.text_bytes)
  long = [document.text for document in source.documents()]
  vocabulary = vocabulary_training.train_vocabulary(
    long, folder / 'vocabulary.model', arguments.vocab_size, max_bytes=1_000_000
  )
  paragraphs = [part for text in long for part in text.split('\n\n')]
  short = [part for part in paragraphs if 100 < len(part) < 400]
  if arguments.short:
    path, _, field = arguments.short.partition('#')
    lines = pathlib.Path(path).read_text().splitlines()
    short = [json.loads(line)[field] for line in lines]
  rows = []
  for length, texts in (('long', long), ('short', short)):
    file = folder / f'{length}.jsonl'
    file.write_text('\n'.join(json.dumps({'text': text}) for text in texts))
    tokens = sum(len(vocabulary.encode(text)) for text in texts)
    alone = _measure(
      f'tokenizer, {length} documents',
      tokens,
      lambda texts=texts: [vocabulary.encode(text) for text in texts],
    )
    made = [
      _make_records(folder, file, vocabulary, tokens, length, name, arguments)
      for name in ('prefix_lm', 'ul2')
    ]
    made.append(_live(file, vocabulary, tokens, length, arguments))
    for row in (alone, *made):
      row['ratio'] = row['tokens/s per core'] / alone['tokens/s per core']
    rows += [alone, *made]
  return rows


def _make_records(
  folder, file, vocabulary, tokens, length, objective, arguments
) -> dict[str, Any]:
  """The row on making records of an objective, and on their packing."""
  lengths = framing.Lengths(arguments.encoder_length, arguments.decoder_length)
  pairs: list[framing.Pair] = []

  def read(job, tokens):
    for example in shard_jobs.read_examples(job, tokens):
      pairs.append(example)
      yield example

  spec = record_sets.RecordSpec(
    source=f'jsonl:{file}',
    split='train',
    objective=objective,
    encoder_length=lengths.encoder,
    decoder_length=lengths.decoder,
    sentinels='recycle',
    shards=1,
  )
  records = folder / f'{objective}-{length}'
  row = _measure(
    f'{objective}, {length} documents',
    tokens,
    lambda: materialization.materialize_sets(
      [(spec, records)],
      vocabulary_pair.Choice(vocabulary.path),
      reader=read,
    ),
  )
  start = time.process_time()
  packed = sum(1 for _ in packing.pack_pairs(pairs, lengths))
  seconds = time.process_time() - start
  in_order = test_packing.count_in_order(
    [(len(pair.inputs), len(pair.targets)) for pair in pairs], lengths
  )
  manifest = record_sets.read_manifest(records)
  return row | {
    'encoder fill': manifest['fill']['encoder'],
    'decoder fill': manifest['fill']['decoder'],
    'us/example': 1e6 * seconds / len(pairs),
    'rows of in order': packed / in_order,
  }


def _live(file, vocabulary, tokens, length, arguments) -> dict[str, Any]:
  """The row on SeqIO's own pipeline: the same task, one example at a time."""
  from encdec_adapt.data.seqio import seqio_tasks
  from encdec_adapt.data.sources import mixtures

  (part,) = mixtures.open_parts(f'jsonl:{file}')
  task = seqio_tasks.make_task(
    part, mixtures.Draw('train', 0.0, 0), vocabulary, 'prefix_lm'
  )
  lengths = {
    'inputs': arguments.encoder_length,
    'targets': arguments.decoder_length,
  }

  def read():
    dataset = task.get_dataset(lengths, 'train', shuffle=False)
    for _ in dataset.as_numpy_iterator():
      pass

  read()  # Traces the pipeline.
  return _measure(f'prefix_lm, {length} documents, SeqIO live', tokens, read)


if __name__ == '__main__':
  main()
