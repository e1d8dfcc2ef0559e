"""SeqIO tasks: examples, shards, mixtures; the only test to import SeqIO."""

import itertools
import pathlib

import numpy as np
import pytest

from encdec_adapt.cli import errors
from encdec_adapt.data import (
  batch,
  mixtures,
  objectives,
  randomness,
  text_sources,
)
from encdec_adapt.tokenizers import vocabularies, vocabulary_training

seqio = pytest.importorskip('seqio')
tf = pytest.importorskip('tensorflow')

from encdec_adapt.data import tasks  # noqa: E402

LENGTHS = batch.Lengths(24, 24)


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp('text')
  found = text_sources.open_source('python').documents()
  for i, document in enumerate(itertools.islice(found, 15)):
    text = document.text[:700] + ' <unused0> \u2581'
    (folder / f'{i:02d}\u00e9.txt').write_text(text + '\0\0')
  return folder


@pytest.fixture(scope='module')
def vocabulary(folder):
  source = text_sources.open_source(f'text:{folder}/*.txt')
  return vocabulary_training.train_vocabulary(
    (document.text for document in source.documents()),
    folder / 'v.model',
    448,
  )


def _source(folder):
  return text_sources.open_source(f'text:{folder}/*.txt')


def _objective(vocabulary, name='prefix_lm'):
  return objectives.make_objective(name, LENGTHS, vocabulary)


def _draw(split='train', eval_fraction=0.3, **options):
  return mixtures.Draw(split, eval_fraction, seed=3, **options)


def _mixture(folder, vocabulary, objective='ul2', **options):
  """A mixture of one source."""
  return tasks.make_mixture(
    [mixtures.Part(_source(folder), 1.0)],
    _draw(**options),
    vocabularies.Opened(vocabulary, vocabulary),
    _objective(vocabulary, objective),
  )


def _key(example):
  return (
    example.source,
    example.id,
    *(part.tolist() for part in example.pair.parts),
    example.shared_spans,
  )


def _keys(mixture, shards=1):
  return [
    _key(example)
    for shard in range(shards)
    for example in tasks.examples(mixture, shard, shards)
  ]


@pytest.mark.parametrize('objective', ['prefix_lm', 'ul2'])
def test_examples_are_what_the_parts_make(folder, vocabulary, objective):
  made = _objective(vocabulary, objective)
  source = _source(folder)
  expected = []
  for document in source.documents():
    if not text_sources.in_split(document.id, 'train', 0.3, 3):
      continue
    names = [f'{document.id}#{i}' for i in range(1000)]
    pairs = made.pairs(
      vocabulary.encode(document.text),
      lambda i, names=names: randomness.generator(3, 0, source.name, names[i]),
    )
    for name, pair in zip(names, pairs, strict=False):
      shared = made.shared_spans(pair)
      expected.append(_key(tasks.Example(pair, source.name, name, shared)))
  assert len(expected) > 64  # more than is fetched at once
  assert _keys(_mixture(folder, vocabulary, objective)) == expected


def test_examples_do_not_depend_on_the_number_of_shards(folder, vocabulary):
  whole = _keys(_mixture(folder, vocabulary))
  for shards in (2, 3):
    assert sorted(_keys(_mixture(folder, vocabulary), shards)) == sorted(whole)
  one = _mixture(folder, vocabulary)
  assert not list(tasks.examples(one, 39, 40))  # more shards than documents


def test_a_task_is_an_ordinary_seqio_task(folder, vocabulary):
  task = tasks.make_task(
    mixtures.Part(_source(folder), 1.0),
    _draw(),
    vocabularies.Opened(vocabulary, vocabulary),
    _objective(vocabulary),
  )
  assert task.splits == ('train',)
  dataset = task.get_dataset(
    {'inputs': 24, 'targets': 24}, 'train', shuffle=False
  )
  row = next(dataset.as_numpy_iterator())
  example = next(
    tasks.examples(_mixture(folder, vocabulary, 'prefix_lm'), 0, 1)
  )
  np.testing.assert_array_equal(row['inputs'], example.pair.inputs)
  np.testing.assert_array_equal(row['targets'], example.pair.targets)
  padded = seqio.EncDecFeatureConverter(pack=False)(
    dataset, {'inputs': 24, 'targets': 24}
  )
  assert next(padded.as_numpy_iterator())['encoder_input_tokens'].shape == (24,)
  with pytest.raises(ValueError, match='shuffle=False'):
    task.get_dataset(None, 'train', shuffle=True)


def test_seqio_vocabulary_has_our_ids(vocabulary):
  wrapped = tasks.SeqioVocabulary(vocabulary)
  text = 'a  b\n\u2581<unused3>'
  ids = vocabulary.encode(text)
  assert wrapped.vocab_size == vocabulary.size and wrapped.extra_ids == 0
  assert (wrapped.pad_id, wrapped.eos_id, wrapped.bos_id) == (0, 1, 2)
  assert wrapped.encode(text) == ids.tolist()
  assert wrapped.decode([*ids, 1, 100]) == text
  encoded = wrapped.encode_tf(tf.constant(text))
  np.testing.assert_array_equal(encoded.numpy(), ids)
  assert wrapped.decode_tf(encoded).numpy().decode() == text
  assert wrapped == tasks.SeqioVocabulary(
    vocabularies.open_vocabulary(vocabulary.path)
  )


def test_a_mixture_has_all_examples_of_its_parts(folder, vocabulary, tmp_path):
  (tmp_path / 'long.txt').write_text('some other words. ' * 400)
  parts = [
    mixtures.Part(_source(folder), 2.0),
    mixtures.Part(_source(tmp_path), 1.0),
  ]

  def make(parts):
    draw = _draw(eval_fraction=0.0)
    objective = _objective(vocabulary, 'prefix_lm_uniform')
    return tasks.make_mixture(
      parts, draw, vocabularies.Opened(vocabulary, vocabulary), objective
    )

  mixed = _keys(make(parts))
  assert mixed == _keys(make(parts))
  assert make(parts).splits == ('train',)
  alone = [_keys(make([part])) for part in parts]
  for part, keys in zip(parts, alone, strict=True):
    assert [key for key in mixed if key[0] == part.source.name] == keys
  assert len(mixed) == sum(map(len, alone))
  # In turn, not one after the other.
  names = [key[0] for key in mixed]
  assert all(a != b for a, b in zip(names[:100], names[1:100], strict=False))
  # Weight 2 draws every document twice, with other splits.
  half = len(alone[0]) // 2
  once = [key[2:] for key in alone[0][:half]]
  again = [key[2:] for key in alone[0][half:]]
  assert sum(a != b for a, b in zip(once, again, strict=True)) > 30
  for shards in (2, 3):
    assert sorted(_keys(make(parts), shards)) == sorted(mixed)


def _write_tfds(folder, texts):
  """A prepared TFDS dataset, as `tfds build` leaves it."""
  tfds = pytest.importorskip('tensorflow_datasets')
  features = tfds.features.FeaturesDict({'body': tfds.features.Text()})
  identity = tfds.core.dataset_info.DatasetIdentity(
    name='tiny',
    version=tfds.core.Version('1.0.0'),
    data_dir=str(folder),
    module_name='tiny',
  )
  info = tfds.core.DatasetInfo(builder=identity, features=features)
  writer = tfds.core.SequentialWriter(info, 3)
  writer.initialize_splits(['train'])
  writer.add_examples({'train': [{'body': text} for text in texts]})
  writer.close_all()
  features.save_config(folder)


def test_tfds_is_a_source(vocabulary, tmp_path):
  texts = [f'text number {i} \u2581' for i in range(7)]
  _write_tfds(tmp_path, texts)
  name = f'tfds:{tmp_path}:train:body'
  source = text_sources.open_source(name)
  documents = list(source.documents())
  assert sorted(document.text for document in documents) == texts
  assert len({document.id for document in documents}) == 7
  assert documents == list(text_sources.open_source(name).documents())
  assert source.fingerprint() == text_sources.open_source(name).fingerprint()
  mixture = tasks.make_mixture(
    [mixtures.Part(source, 1.0)],
    _draw(eval_fraction=0.0),
    vocabularies.Opened(vocabulary, vocabulary),
    _objective(vocabulary),
  )
  decoded = {
    vocabulary.decode([*example.pair.inputs, *example.pair.targets])
    for example in tasks.examples(mixture, 0, 1)
  }
  assert decoded == set(texts)
  with pytest.raises(
    errors.UserError, match=r"is no feature 'text' but \['body'"
  ):
    text_sources.open_source(name.removesuffix(':body'))
  with pytest.raises(errors.UserError, match='TFDS cannot open it'):
    text_sources.open_source(name.replace('train', 'test'))
  with pytest.raises(errors.UserError, match='TFDS cannot open it'):
    text_sources.open_source('tfds:no_such_dataset_at_all:train')


def test_what_reading_raises_comes_through(vocabulary, tmp_path):
  (tmp_path / 'a.jsonl').write_text('{"text": "fine"}\n{"body": 1}\n')
  mixture = tasks.make_mixture(
    mixtures.open_parts(f'python@0.01 + jsonl:{tmp_path}/a.jsonl'),
    _draw(eval_fraction=0.0),
    vocabularies.Opened(vocabulary, vocabulary),
    _objective(vocabulary),
  )
  with pytest.raises(errors.UserError, match='line 2, is not a JSON object'):
    list(tasks.examples(mixture, 0, 1))
