"""Registered SeqIO tasks and mixtures as sources."""

import json
import sys

import pytest

from encdec_adapt.base import errors
from encdec_adapt.data.sources import mixtures

seqio = pytest.importorskip('seqio')
tf = pytest.importorskip('tensorflow')

MODULE = """
import seqio
import tensorflow as tf

def _source(rows):
  def read(split, shuffle_files, seed=None):
    return tf.data.Dataset.from_tensor_slices(rows)
  return seqio.FunctionDataSource(
    read, splits=('train',), num_input_examples={'train': len(rows['targets'])}
  )

vocabulary = seqio.ByteVocabulary()
feature = seqio.Feature(vocabulary, add_eos=True)
for name, count in (('small', 100), ('large', 900)):
  seqio.TaskRegistry.add(
    'foreign_' + name,
    source=_source({
      'inputs': [f'question {name} {i}' for i in range(count)],
      'targets': [f'answer {i}' for i in range(count)],
    }),
    preprocessors=[
      seqio.preprocessors.tokenize, seqio.preprocessors.append_eos
    ],
    output_features={'inputs': feature, 'targets': feature},
  )
seqio.TaskRegistry.add(
  'foreign_raw',
  source=_source({'text': ['one', b'\\xff', 'three'], 'targets': ['a'] * 3}),
  preprocessors=[],
  output_features={},
)
seqio.MixtureRegistry.add(
  'foreign_mix', [('foreign_small', 9.0), ('foreign_large', 1.0)]
)
"""


@pytest.fixture(scope='module', autouse=True)
def modules(tmp_path_factory):
  folder = tmp_path_factory.mktemp('modules')
  (folder / 'foreign_tasks.py').write_text(MODULE)
  sys.path.insert(0, str(folder))
  yield
  sys.path.remove(str(folder))


def _open(name, kind='pairs'):
  return mixtures.open_parts(name, seqio_modules=('foreign_tasks',), kind=kind)


def test_a_task_gives_pairs_or_text():
  (part,) = _open('seqio:foreign_small')
  documents = list(part.source.documents())
  assert len(documents) == 100
  assert json.loads(documents[3].text) == ['question small 3', 'answer 3']
  assert documents[3].id == 'foreign_small:train:0:3'
  (part,) = _open('seqio:foreign_small:train', kind='text')
  assert next(part.source.documents()).text == 'answer 0'
  assert part.source.fingerprint() == part.source.fingerprint()


def test_shards_read_the_files_of_a_task(tmp_path):
  for i, count in enumerate((5, 1, 4)):
    lines = [f'file {i} line {j}' for j in range(count)]
    (tmp_path / f'{i}.txt').write_text('\n'.join(lines))
  seqio.TaskRegistry.add(
    'foreign_lines',
    source=seqio.TextLineDataSource({'train': f'{tmp_path}/*.txt'}),
    # Ids that every file has.
    preprocessors=[
      lambda lines: lines.map(
        lambda line: {'text': line, 'id': tf.strings.substr(line, 7, 6)}
      )
    ],
    output_features={},
  )
  (part,) = _open('seqio:foreign_lines', kind='text')
  texts = {doc.id: doc.text for doc in part.source.documents()}
  assert texts['foreign_lines:train:2:line 3'] == 'file 2 line 3'
  assert len(texts) == 10
  for shards in (2, 3, 8):
    divided = [
      (doc.id, doc.text)
      for i in range(shards)
      for doc in part.source.documents(None, i, shards)
    ]
    assert sorted(divided) == sorted(texts.items())


def test_features_that_are_not_encoded_are_read_as_they_are():
  (part,) = mixtures.open_parts(
    'seqio:foreign_raw', seqio_modules=('foreign_tasks',), skip_bad=True
  )
  assert [doc.text for doc in part.source.documents()] == ['one', 'three']
  assert part.source.counts['bad_documents'] == 1
  (part,) = _open('seqio:encdec_adapt_causal_lm', kind='text')
  with pytest.raises(errors.UserError, match='needs the lengths'):
    next(part.source.documents())


def test_a_mixture_loses_nothing_and_has_its_rates():
  parts = _open('seqio:foreign_mix')
  draw = mixtures.Draw('train', 0.0, seed=0)
  ids = [{doc.id for doc in part.documents(draw)} for part in parts]
  assert len(set.union(*ids)) == 1000
  drawn = {
    part.source.name: (part.rate, len(names))
    for part, names in zip(parts, ids, strict=True)
  }
  assert drawn == {
    'seqio:foreign_small:train': (9.0, 100),
    'seqio:foreign_large:train': (1.0, 900),
  }


@pytest.mark.parametrize(
  'name, words',
  [
    (
      'seqio:foreign_smal',
      "'foreign_smal' is registered; did you mean foreign",
    ),
    ('seqio:foreign_small:test', "no split 'test' but \\['train'\\]"),
  ],
)
def test_names_that_are_not_registered_are_refused(name, words):
  with pytest.raises(errors.UserError, match=words):
    _open(name)


def test_modules_and_features_that_are_missing_are_named():
  with pytest.raises(errors.UserError, match="'no_such_module' cannot be"):
    mixtures.open_parts('seqio:foreign_mix', seqio_modules=('no_such_module',))
  seqio.TaskRegistry.add(
    'foreign_bare',
    source=seqio.FunctionDataSource(
      lambda split, shuffle_files, seed=None: (
        seqio.get_mixture_or_task('foreign_small')
        .source.get_dataset(split)
        .map(lambda row: {'label': row['targets']})
      ),
      splits=('train',),
    ),
    preprocessors=[],
    output_features={},
  )
  (part,) = _open('seqio:foreign_bare')
  with pytest.raises(
    errors.UserError, match=r"no feature 'inputs' but \['label"
  ):
    list(part.source.documents())
