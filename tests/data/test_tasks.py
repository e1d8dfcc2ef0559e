"""SeqIO tasks: examples, shards, mixtures; the only test to import SeqIO."""

import pathlib

import numpy as np
import pytest

from encdec_adapt.data import (
  batch,
  objectives,
  randomness,
  sources,
  vocabularies,
)
from encdec_adapt.runtime import errors

seqio = pytest.importorskip('seqio')
tf = pytest.importorskip('tensorflow')

from encdec_adapt.data import tasks  # noqa: E402

LENGTHS = batch.Lengths(24, 24)


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp('text')
  kept = sources.open_source('python', max_documents=15).documents()
  for i, document in enumerate(kept):
    text = document.text[:700] + ' <unused0> \u2581'
    (folder / f'{i:02d}\u00e9.txt').write_text(text + '\0\0')
  return folder


@pytest.fixture(scope='module')
def vocabulary(folder):
  source = sources.open_source(f'text:{folder}/*.txt')
  return vocabularies.train_vocabulary(
    (document.text for document in source.documents()),
    folder / 'v.model',
    448,
  )


def _task(folder, vocabulary, objective='ul2', split='train', **options):
  options = {'seed': 3, 'eval_fraction': 0.3, **options}
  return tasks.make_task(
    sources.open_source(f'text:{folder}/*.txt'),
    split,
    vocabulary,
    objectives.make_objective(objective, LENGTHS, vocabulary),
    **options,
  )


def _key(example):
  return (
    example.source,
    example.id,
    *(part.tolist() for part in example.pair),
    example.spans,
    example.shared_spans,
  )


def _keys(task, shards=1):
  return [
    _key(example)
    for shard in range(shards)
    for example in tasks.examples(task, shard, shards)
  ]


@pytest.mark.parametrize('objective', ['prefix_lm', 'ul2'])
def test_examples_are_what_the_parts_make(folder, vocabulary, objective):
  made = objectives.make_objective(objective, LENGTHS, vocabulary)
  source = sources.open_source(f'text:{folder}/*.txt')
  expected = []
  for document in source.documents():
    if not sources.in_split(document.id, 'train', 0.3, 3):
      continue
    windows = made.segments(vocabulary.encode(document.text))
    for i, (window, ends) in enumerate(windows):
      name = f'{document.id}#{i}'
      rng = randomness.generator(3, 0, source.name, name)
      pair = made(window, ends, rng)
      expected.append(
        _key(tasks.Example(pair, source.name, name, *made.span_counts(pair)))
      )
  assert len(expected) > 64  # more than is fetched at once
  assert _keys(_task(folder, vocabulary, objective)) == expected


def test_examples_do_not_depend_on_the_number_of_shards(folder, vocabulary):
  task = _task(folder, vocabulary)
  whole = _keys(task)
  for shards in (2, 3):
    assert sorted(_keys(_task(folder, vocabulary), shards)) == sorted(whole)
  assert not list(tasks.examples(task, 39, 40))  # more shards than documents


def test_passes_and_seeds_draw_anew(folder, vocabulary):
  first = _keys(_task(folder, vocabulary))
  second = _keys(_task(folder, vocabulary, pass_index=1))
  assert [key[:2] for key in first] == [key[:2] for key in second]
  assert sum(a != b for a, b in zip(first, second, strict=True)) > 30


def test_splits_part_the_documents(folder, vocabulary):
  train, held_out = (
    {key[1].partition('#')[0] for key in _keys(_task(folder, vocabulary, **o))}
    for o in ({}, {'split': 'eval'})
  )
  assert train and held_out and not train & held_out
  assert train | held_out == {path.name for path in folder.glob('*.txt')}
  with pytest.raises(errors.UserError, match="split 'test'"):
    _task(folder, vocabulary, split='test')


def test_a_task_is_an_ordinary_seqio_task(folder, vocabulary):
  task = _task(folder, vocabulary, 'prefix_lm')
  assert task.splits == ('train',)
  dataset = task.get_dataset(
    {'inputs': 24, 'targets': 24}, 'train', shuffle=False
  )
  row = next(dataset.as_numpy_iterator())
  example = next(tasks.examples(task, 0, 1))
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
  assert wrapped.unk_id == 3
  assert wrapped.encode(text) == ids.tolist()
  assert wrapped.decode([*ids, 1, 100]) == text
  encoded = wrapped.encode_tf(tf.constant(text))
  np.testing.assert_array_equal(encoded.numpy(), ids)
  assert wrapped.decode_tf(encoded).numpy().decode() == text
  assert wrapped == tasks.SeqioVocabulary(
    vocabularies.Vocabulary(vocabulary.path)
  )


def test_mixtures_keep_their_rates(folder, vocabulary, tmp_path):
  (tmp_path / 'long.txt').write_text('some other words. ' * 400)
  objective = objectives.make_objective('prefix_lm', LENGTHS, vocabulary)
  one = _task(folder, vocabulary, 'prefix_lm')
  other = tasks.make_task(
    sources.open_source(f'text:{tmp_path}/*.txt'),
    'train',
    vocabulary,
    objective,
    seed=3,
  )
  mixture = tasks.make_mixture('two', [(one, 3.0), (other, 1.0)])
  mixed = _keys(mixture)
  assert mixed == _keys(mixture)
  for task in (one, other):
    alone = _keys(task)
    of_it = [key for key in mixed if key[0] == alone[0][0]]
    assert of_it == alone[: len(of_it)]
  share = len([key for key in mixed if str(folder) in key[0]]) / len(mixed)
  assert len(mixed) > 80 and share == pytest.approx(0.75, abs=0.12)


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
  source = sources.open_source(name)
  documents = list(source.documents())
  assert sorted(document.text for document in documents) == texts
  assert len({document.id for document in documents}) == 7
  assert documents == list(sources.open_source(name).documents())
  assert source.fingerprint() == sources.open_source(name).fingerprint()
  objective = objectives.make_objective('prefix_lm', LENGTHS, vocabulary)
  task = tasks.make_task(source, 'train', vocabulary, objective, seed=0)
  decoded = {
    vocabulary.decode([*example.pair.inputs, *example.pair.targets])
    for example in tasks.examples(task, 0, 1)
  }
  assert decoded == set(texts)
  with pytest.raises(errors.UserError, match=r"no feature 'text' but \['body'"):
    sources.open_source(name.removesuffix(':body'))
  with pytest.raises(errors.UserError, match='TFDS does not give it'):
    sources.open_source(name.replace('train', 'test'))
  with pytest.raises(errors.UserError, match='TFDS does not give it'):
    sources.open_source('tfds:no_such_dataset_at_all:train')


def test_what_reading_raises_comes_through(vocabulary, tmp_path):
  (tmp_path / 'a.jsonl').write_text('{"text": "fine"}\n{"body": 1}\n')
  objective = objectives.make_objective('prefix_lm', LENGTHS, vocabulary)
  task = tasks.make_task(
    sources.open_source(f'jsonl:{tmp_path}/a.jsonl'),
    'train',
    vocabulary,
    objective,
    seed=0,
  )
  with pytest.raises(errors.UserError, match='line 2, has no text'):
    list(tasks.examples(task, 0, 1))
