"""SeqIO tasks: examples, shards, mixtures, and TFDS as a source."""

import functools
import itertools
import re
import shlex

import numpy as np
import pytest

from encdec_adapt import materialize
from encdec_adapt.base import errors
from encdec_adapt.data.sources import mixtures, text_sources
from encdec_adapt.objectives import objective_names
from encdec_adapt.tokenizers import vocabulary_pair
from tests import tiny
from tests.data.making import test_shard_jobs

seqio = pytest.importorskip('seqio')
tf = pytest.importorskip('tensorflow')

from encdec_adapt.data.seqio import seqio_tasks  # noqa: E402


@pytest.fixture(scope='module')
def vocabulary():
  return vocabulary_pair.open_vocabulary(test_shard_jobs.VOCABULARY)


def _key(row):
  """The fields of an example, as `test_shard_jobs.key` of a pair."""
  return tuple(row['documents'].decode().split(' ')), *(
    row[name].tolist() for name in ('inputs', 'targets')
  )


def _draw(split='train', eval_fraction=0.3):
  return mixtures.Draw(split, eval_fraction, seed=3)


SHIPPED = [
  name.removeprefix('encdec_adapt_')
  for name in seqio.TaskRegistry.names()
  if name.startswith('encdec_adapt_')
]


@pytest.mark.parametrize('name', SHIPPED)
def test_examples_are_those_of_records(vocabulary, tmp_path, name):
  objective = objective_names.parse_one(name)
  source = test_shard_jobs.write_text(tmp_path)
  part = mixtures.Part(text_sources.open_source(source), 1.0)
  task = seqio_tasks.make_task(
    part, _draw(), vocabulary, name, sentinels='recycle'
  )
  sides = {'inputs': 'encoder', 'targets': 'decoder'}
  lengths = {
    feature: 24
    for feature, side in sides.items()
    if side in objective.rows.sides
  }
  rows = task.get_dataset(lengths, 'train', shuffle=False).as_numpy_iterator()
  pairs = test_shard_jobs.read(
    source,
    name,
    encoder_length=lengths.get('inputs', 0),
    decoder_length=lengths.get('targets', 0),
    sentinels='recycle',
  )
  keys = list(map(_key, rows)), list(map(test_shard_jobs.key, pairs))
  # Windows over several documents are numbered in a batch, or in a shard.
  if not objective.options.get('concatenate'):
    assert keys[0] == keys[1]
  assert keys[0] and keys[1]


def test_a_task_is_an_ordinary_seqio_task(vocabulary, tmp_path):
  source = test_shard_jobs.write_text(tmp_path)
  part = mixtures.Part(text_sources.open_source(source), 1.0)
  task = seqio_tasks.make_task(part, _draw(), vocabulary, 'ul2')
  assert task.splits == ('train',)
  lengths = {'inputs': 24, 'targets': 24}
  dataset = task.get_dataset(lengths, 'train', shuffle=False)
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
def test_shipped_tasks_read_what_every_python_carries():
  texts = {'causal_lm', 'prefix_lm', 'span_corruption', 'ul2', 'bart', 'meap'}
  assert texts <= {*SHIPPED}
  # They need a mixture of noises, and other documents than texts.
  assert not {'denoise', 'pairs', 'chat', 'classify', 'tag'} & {*SHIPPED}
  lengths = {'inputs': 64, 'targets': 64}
  rows = seqio.get_mixture_or_task('encdec_adapt_prefix_lm').get_dataset(
    lengths, shuffle=False
  )
  pairs = test_shard_jobs.read(
    'python',
    'prefix_lm',
    choice=vocabulary_pair.Choice('bytes', added_sentinels=100),
    encoder_length=64,
    decoder_length=64,
    eval_fraction=0.04,
    seed=0,
  )
  for row, pair in zip(rows.take(50).as_numpy_iterator(), pairs, strict=False):
    assert _key(row) == test_shard_jobs.key(pair)
  mixture = seqio.get_mixture_or_task('encdec_adapt_prefix_lm_and_ul2')
  dataset = mixture.get_dataset(lengths, shuffle=False)
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


def _write_tfds(folder, name, rows):
  """A prepared TFDS dataset of texts, as `tfds build` leaves it."""
  tfds = pytest.importorskip('tensorflow_datasets')
  folder.mkdir(parents=True, exist_ok=True)
  features = tfds.features.FeaturesDict(
    {field: tfds.features.Text() for field in rows[0]}
  )
  identity = tfds.core.dataset_info.DatasetIdentity(
    name=name,
    version=tfds.core.Version('1.0.0'),
    data_dir=str(folder),
    module_name=name,
  )
  info = tfds.core.DatasetInfo(builder=identity, features=features)
  writer = tfds.core.SequentialWriter(info, 3)
  writer.initialize_splits(['train'])
  writer.add_examples({'train': rows})
  writer.close_all()
  features.save_config(folder)


def test_tfds_is_a_source(vocabulary, tmp_path):
  texts = [f'\ufefftext number {i} \u2581' for i in range(7)]
  _write_tfds(tmp_path, 'tiny', [{'body': text} for text in texts])
  name = f'tfds:{tmp_path}:train:body'
  source = text_sources.open_source(name)
  documents = list(source.documents())
  assert sorted(document.text for document in documents) == texts
  assert len({document.id for document in documents}) == 7
  assert documents == list(text_sources.open_source(name).documents())
  assert source.fingerprint() == text_sources.open_source(name).fingerprint()
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


def test_errors_of_reading_reach_users_of_a_task(tmp_path):
  (tmp_path / 'a.jsonl').write_text('{"text": "fine"}\n{"body": 1}\n')
  source = text_sources.open_source(f'jsonl:{tmp_path}/a.jsonl')
  part = mixtures.Part(source, 1.0)
  documents = seqio_tasks.DocumentSource(part, _draw(eval_fraction=0.0))
  with pytest.raises(tf.errors.OpError, match='line 2, has no field'):
    list(documents.get_dataset())


@pytest.mark.long
def test_the_example_of_the_page_runs(tmp_path, monkeypatch, capsys):
  page = tiny.ROOT / 'encdec_adapt' / 'data' / 'seqio' / 'README.md'
  blocks = re.findall(r'```(\w*)\n(.*?)```', page.read_text(), re.DOTALL)
  *module, program = (text for kind, text in blocks if kind == 'python')
  commands = [text.replace('\\\n', '') for kind, text in blocks if not kind]
  rows = [{'title': text[:40], 'body': text} for text in tiny.text(12)]
  _write_tfds(tmp_path / 'tfds' / 'tales' / '1.0.0', 'tales', rows)
  (tmp_path / 'tales.py').write_text('\n'.join(module))
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  small = ['--config.data.workers=1', '--config.data.shards=1']
  small += ['--config.data.eval_fraction=0.3']
  for command in commands:
    python, _, name, *flags = shlex.split(command)
    assert (python, name) == ('python', 'encdec_adapt.materialize')
    assert tiny.call(materialize, *flags, *small) == 0
  exec(program, {})
  shown = capsys.readouterr().out
  for name in ('prefix_lm of seqio:tales_title', 'ul2 of seqio:tales_body'):
    assert name in shown
  # Inputs of PrefixLM and, with UL2's mode token, inputs of UL2.
  assert {line[:3] == '[S]' for line in shown.splitlines()[-8:]} == {
    True,
    False,
  }
