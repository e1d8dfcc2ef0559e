"""Examples of a shard: those of its documents, whichever shards there are."""

import pathlib

import pytest

from encdec_adapt.data.making import shard_jobs
from encdec_adapt.data.records import record_sets, record_writing
from encdec_adapt.data.sources import text_sources
from encdec_adapt.objectives import framing, objective_names, randomness
from encdec_adapt.tokenizers import vocabulary_pair
from tests import tiny

VOCABULARY = str(tiny.ROOT / 'configs' / 'decoders' / 'base')
CHOICE = vocabulary_pair.Choice(VOCABULARY)
LENGTHS = framing.Lengths(24, 24)


def write_text(folder: pathlib.Path) -> str:
  """Writes small documents; returns the name of their source."""
  for i, text in enumerate(tiny.text(15)):
    text = (text * 3)[:700] + ' <unused0> \u2581'
    (folder / f'{i:02d}\u00e9.txt').write_text(text + '\0\0')
  return f'text:{folder}/*.txt'


def read(source, objective, shard=0, shards=1, choice=CHOICE, **changes):
  """Yields the pairs of a shard, as records are made from them."""
  fields = dict(encoder_length=24, decoder_length=24, seed=3, eval_fraction=0.3)
  job = shard_jobs.ShardJob(
    folder='',
    spec=record_sets.RecordSpec(
      source, 'train', objective, shards=shards, **fields | changes
    ),
    choice=choice,
    parts=[record_sets.Part(objective, source.partition('@')[0])],
    key=record_writing.ShardKey(0, 0, shard),
    reader=shard_jobs.read_examples,
  )
  yield from shard_jobs.read_examples(job, None)


def key(pair):
  return (pair.documents, *(part.tolist() for part in pair.parts))


@pytest.mark.parametrize('objective', ['prefix_lm', 'ul2'])
def test_examples_are_what_the_parts_make(tmp_path, objective):
  source = write_text(tmp_path)
  vocabulary = vocabulary_pair.open_vocabulary(VOCABULARY)
  maker = objective_names.parse_one(objective).make(LENGTHS, vocabulary)
  expected = []
  texts = text_sources.open_source(source)
  for document in texts.documents():
    if texts.in_split(document.id, 'train', 0.3, 3):
      expected += maker.examples(
        [(document.id, vocabulary.encode(document.text))],
        randomness.Keyed(3, 0, source),
      )
  pairs = list(read(source, objective))
  assert len(pairs) > 64
  assert [*map(key, pairs)] == [*map(key, expected)]
  # Records do not depend on the number of shards.
  shards = [pair for i in range(3) for pair in read(source, objective, i, 3)]
  assert sorted(map(key, shards)) == sorted(map(key, expected))
  assert not list(read(source, objective, 39, 40))


def test_concatenated_windows_are_keyed_by_the_shard(tmp_path):
  source = write_text(tmp_path)
  first, repeated, second = (
    [key(pair) for pair in read(source, 'ul2_published', i, 2)]
    for i in (0, 0, 1)
  )
  assert first == repeated
  assert {x[0] for x in first}.isdisjoint({x[0] for x in second})
  assert any(len(documents) > 1 for documents, *_ in first)


def test_weights_draw_documents_again_with_other_splits(tmp_path):
  twice = list(read(f'{write_text(tmp_path)}@2.0', 'prefix_lm_uniform'))
  half = len(twice) // 2
  first, second = (
    [key(pair)[1:] for pair in draw] for draw in (twice[:half], twice[half:])
  )
  assert sum(a != b for a, b in zip(first, second, strict=True)) > 30
