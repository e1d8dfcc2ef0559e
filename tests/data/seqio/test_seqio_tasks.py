"""SeqIO tasks: examples, shards, mixtures; the only test to import SeqIO."""

import functools
import itertools
import pathlib

import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.data.making import shard_jobs
from encdec_adapt.data.records import record_sets, record_writing
from encdec_adapt.data.sources import document_source, mixtures, text_sources
from encdec_adapt.objectives import framing, objective_names, randomness
from encdec_adapt.tokenizers import vocabulary_pair, vocabulary_training

seqio = pytest.importorskip('seqio')
tf = pytest.importorskip('tensorflow')

from encdec_adapt.data.seqio import seqio_tasks  # noqa: E402

LENGTHS = framing.Lengths(24, 24)


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp('text')
  documents = text_sources.open_source('python').documents()
  for i, document in enumerate(itertools.islice(documents, 15)):
    text = document.text[:700] + ' <unused0> \u2581'
    (folder / f'{i:02d}\u00e9.txt').write_text(text + '\0\0')
  return folder


@pytest.fixture(scope='module')
def vocabulary(folder):
  source = _source(folder)
  return vocabulary_training.train_vocabulary(
    (document.text for document in source.documents()),
    folder / 'v.model',
    448,
  )


def _source(folder):
  return text_sources.open_source(f'text:{folder}/*.txt')


def _draw(split='train', eval_fraction=0.3, **options):
  return mixtures.Draw(split, eval_fraction, seed=3, **options)


def _job(source, vocabulary, objective, shard=0, shards=1, **changes):
  """The job of a shard of records."""
  fields = dict(source=source, encoder_length=24, decoder_length=24, seed=3)
  return shard_jobs.ShardJob(
    folder='',
    spec=record_sets.RecordSpec(
      split='train', objective=objective, shards=shards, **fields | changes
    ),
    choice=vocabulary_pair.Choice(vocabulary.path),
    parts=[record_sets.Part(objective, source.partition('@')[0])],
    key=record_writing.ShardKey(0, 0, shard),
    reader=shard_jobs.read_examples,
  )


def _examples(part, vocabulary, objective, *shard):
  """Examples of a shard, as records are made from them."""
  source = f'{part.source.name}@{part.weight}'
  job = _job(source, vocabulary, objective, *shard, eval_fraction=0.3)
  return list(shard_jobs.read_examples(job))


def _key(pair):
  return (pair.documents, *(part.tolist() for part in pair.parts))


@pytest.mark.parametrize('objective', ['prefix_lm', 'ul2'])
def test_examples_are_what_the_parts_make(folder, vocabulary, objective):
  maker = objective_names.parse_one(objective).make(LENGTHS, vocabulary)
  part = mixtures.Part(_source(folder), 1.0)
  expected = []
  for document in part.source.documents():
    if document_source.in_split(document.id, 'train', 0.3, 3):
      expected += maker.examples(
        [(document.id, vocabulary.encode(document.text))],
        functools.partial(randomness.generator, 3, 0, part.source.name),
      )
  examples = _examples(part, vocabulary, objective)
  assert len(examples) > 64
  assert [_key(example.pair) for example in examples] == [
    _key(pair) for pair in expected
  ]
  # Records do not depend on the number of shards.
  shards = [
    _key(example.pair)
    for i in range(3)
    for example in _examples(part, vocabulary, objective, i, 3)
  ]
  assert sorted(shards) == sorted(map(_key, expected))
  assert not _examples(part, vocabulary, objective, 39, 40)


def test_concatenated_windows_are_keyed_by_the_shard(folder, vocabulary):
  part = mixtures.Part(_source(folder), 1.0)
  first, repeated, second = (
    [_key(e.pair) for e in _examples(part, vocabulary, 'ul2_published', i, 2)]
    for i in (0, 0, 1)
  )
  assert first == repeated and {key[0] for key in first}.isdisjoint(
    {key[0] for key in second}
  )
  assert any(len(documents) > 1 for documents, *_ in first)


def test_weights_draw_documents_again_with_other_splits(folder, vocabulary):
  twice = _examples(
    mixtures.Part(_source(folder), 2.0), vocabulary, 'prefix_lm_uniform'
  )
  half = len(twice) // 2
  first, second = (
    [_key(example.pair)[1:] for example in draw]
    for draw in (twice[:half], twice[half:])
  )
  assert sum(a != b for a, b in zip(first, second, strict=True)) > 30


def test_a_task_is_an_ordinary_seqio_task(folder, vocabulary):
  part = mixtures.Part(_source(folder), 1.0)
  task = seqio_tasks.make_task(part, _draw(), vocabulary, 'ul2')
  assert task.splits == ('train',)
  lengths = {'inputs': 24, 'targets': 24}
  dataset = task.get_dataset(lengths, 'train', shuffle=False)
  rows = list(dataset.as_numpy_iterator())
  examples = _examples(part, vocabulary, 'ul2')
  for row, example in zip(rows, examples, strict=True):
    np.testing.assert_array_equal(row['inputs'], example.pair.inputs)
    np.testing.assert_array_equal(row['targets'], example.pair.targets)
  padded = seqio.EncDecFeatureConverter(pack=False)(dataset, lengths)
  assert next(padded.as_numpy_iterator())['encoder_input_tokens'].shape == (24,)
  with pytest.raises(ValueError, match='shuffle=False'):
    task.get_dataset(None, 'train', shuffle=True)


def test_objectives_are_preprocessors_of_other_tasks(vocabulary):
  task = seqio.Task(
    'foreign',
    source=seqio.FunctionDataSource(
      lambda split, shuffle_files, seed=None: (
        tf.data.Dataset.from_tensor_slices(
          {'text': ['one two three four', 'five six seven']}
        )
      ),
      splits=('train',),
    ),
    preprocessors=[
      functools.partial(
        seqio_tasks.make_pairs, objective='bart_masking:share=0.5'
      )
    ],
    output_features=seqio_tasks.features(vocabulary),
  )
  dataset = task.get_dataset({'inputs': 64, 'targets': 64}, shuffle=False)
  rows = list(dataset.as_numpy_iterator())
  texts = [vocabulary.decode(row['targets']) for row in rows]
  assert texts == ['one two three four', 'five six seven']
  assert [row['documents'] for row in rows] == [b'0', b'1']
  for row in rows:
    masked = (row['inputs'] == vocabulary.mask).sum()
    assert masked == round(0.5 * (len(row['targets']) - 1))


@pytest.mark.long
def test_shipped_tasks_are_registered():
  name = 'encdec_adapt_span_corruption'
  task = seqio.get_mixture_or_task(name)
  lengths = {'inputs': 64, 'targets': 32}
  row = next(task.get_dataset(lengths, shuffle=False).as_numpy_iterator())
  assert len(row['inputs']) <= 63 and len(row['targets'])
  names = seqio.TaskRegistry.names()
  texts = {'causal_lm', 'prefix_lm', 'span_corruption', 'ul2', 'bart', 'meap'}
  assert {f'encdec_adapt_{name}' for name in texts} <= set(names)
  # They need a mixture of noises, and other documents than texts.
  others = ('denoise', 'pairs', 'chat', 'classify', 'tag')
  assert not {f'encdec_adapt_{name}' for name in others} & set(names)
  mixture = seqio.get_mixture_or_task('encdec_adapt_prefix_lm_and_ul2')
  dataset = mixture.get_dataset({'inputs': 64, 'targets': 64}, shuffle=False)
  assert next(dataset.as_numpy_iterator())['inputs'].dtype == np.int32


def test_seqio_vocabulary_has_our_ids(vocabulary):
  wrapped = seqio_tasks.SeqioVocabulary(vocabulary)
  text = 'a  b\n\u2581<unused3>'
  ids = vocabulary.encode(text)
  assert wrapped.vocab_size == vocabulary.size and wrapped.extra_ids == 0
  assert (wrapped.pad_id, wrapped.eos_id, wrapped.bos_id) == (0, 1, 2)
  assert wrapped.encode(text) == ids.tolist()
  assert wrapped.decode([*ids, 1, 100]) == text
  encoded = wrapped.encode_tf(tf.constant(text))
  np.testing.assert_array_equal(encoded.numpy(), ids)
  assert wrapped.decode_tf(encoded).numpy().decode() == text
  assert wrapped == seqio_tasks.SeqioVocabulary(
    vocabulary_pair.open_vocabulary(vocabulary.path)
  )


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
  texts = [f'\ufefftext number {i} \u2581' for i in range(7)]
  _write_tfds(tmp_path, texts)
  name = f'tfds:{tmp_path}:train:body'
  source = text_sources.open_source(name)
  documents = list(source.documents())
  assert sorted(document.text for document in documents) == texts
  assert len({document.id for document in documents}) == 7
  assert documents == list(text_sources.open_source(name).documents())
  assert source.fingerprint() == text_sources.open_source(name).fingerprint()
  documents_read = seqio_tasks.documents(
    mixtures.Part(source, 1.0), _draw(eval_fraction=0.0), 0, 1
  )
  assert list(documents_read) == documents
  for shards in (2, 9):  # By index, also where some have none.
    divided = [source.documents(None, i, shards) for i in range(shards)]
    assert list(itertools.chain(*divided)) == documents
  capped = text_sources.open_source(name, max_bytes=82)
  halves = [list(capped.documents(None, i, 2)) for i in (0, 1)]
  assert sorted(doc.id for doc in itertools.chain(*halves)) == sorted(
    doc.id for doc in documents[:4]
  )
  with pytest.raises(
    errors.UserError, match=r"is no feature 'text' but \['body'"
  ):
    text_sources.open_source(name.removesuffix(':body'))
  with pytest.raises(errors.UserError, match='TFDS cannot open it'):
    text_sources.open_source(name.replace('train', 'test'))
  with pytest.raises(errors.UserError, match='TFDS cannot open it'):
    text_sources.open_source('tfds:no_such_dataset_at_all:train')


def test_bad_documents_may_be_left_out_and_are_counted(vocabulary, tmp_path):
  lines = [b'{"text": "fine"}', b'{"body": 1}', b'{"text": "\xff"}'] * 10
  (tmp_path / 'a.jsonl').write_bytes(b'\n'.join(lines))
  source = f'jsonl:{tmp_path}/a.jsonl'
  job = _job(source, vocabulary, 'prefix_lm', 1, 2, bad_documents='skip')
  # A bad one takes no other with it.
  assert len(list(shard_jobs.read_examples(job))) == 5
  assert job.counts['bad_documents'] == 10


def test_what_reading_raises_comes_through(tmp_path):
  (tmp_path / 'a.jsonl').write_text('{"text": "fine"}\n{"body": 1}\n')
  part = mixtures.Part(
    text_sources.open_source(f'jsonl:{tmp_path}/a.jsonl'), 1.0
  )
  problem = 'line 2, has no field .text. but body'
  with pytest.raises(errors.UserError, match=problem):
    list(seqio_tasks.documents(part, _draw(eval_fraction=0.0), 0, 1))
  # TensorFlow, which would log tracebacks, sees no error, unless a user's
  # task reads the documents.
  source = seqio_tasks.DocumentSource(part, _draw(eval_fraction=0.0))
  assert not list(source.batches(None, raises=False))
  assert 'line 2, has no field' in str(source.failure)
  with pytest.raises(tf.errors.OpError, match='line 2, has no field'):
    list(source.get_dataset())


def test_examples_without_a_label_are_named_by_file_and_line(
  vocabulary, tmp_path
):
  (tmp_path / 'a.jsonl').write_text(
    '{"text": "x", "label": "a"}\n{"text": "y", "label": "c"}\n'
  )
  source = f'labels:{tmp_path}/a.jsonl#text,label'
  job = _job(source, vocabulary, 'classify:labels=a|b', decoder_length=0)
  words = "example .*/a.jsonl, line 2: its label 'c'"
  with pytest.raises(errors.UserError, match=words):
    list(shard_jobs.read_examples(job))
