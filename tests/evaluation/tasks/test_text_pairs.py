"""Answers to pairs, compared with the references of the file."""

import dataclasses
import json

import pytest

from encdec_adapt.base import errors
from encdec_adapt.evaluation.tasks import text_pairs
from encdec_adapt.files import paths
from encdec_adapt.models import model_config
from encdec_adapt.stored import model_on_disk
from encdec_adapt.tokenizers import vocabulary_pair
from tests import toy_models
from tests.tokenizers import t5_files

ROWS = [{'q': 'a "b', 'a': 'c'}, {'q': 'd', 'a': 'e, f'}]


def _write(path):
  if path.suffix == '.parquet':
    pa = pytest.importorskip('pyarrow')
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist(ROWS), path)
  elif path.suffix == '.tsv':
    path.write_text('q\ta\na "b\tc\nd\te, f\n')
  elif path.suffix == '.json':
    path.write_text(json.dumps(ROWS, indent=1))
  else:
    path.write_text('\n'.join(map(json.dumps, ROWS)))


@pytest.mark.parametrize('kind', ['jsonl', 'json', 'tsv', 'parquet'])
def test_pairs_are_read_from_every_kind_of_file(tmp_path, kind):
  file = tmp_path / f'a.{kind}'
  _write(file)
  pairs = text_pairs.read(f'{file}#q,a')
  assert list(pairs.inputs) == ['a "b', 'd']
  assert list(pairs.targets) == [['c'], ['e, f']]
  assert pairs.name == 'a'


@pytest.mark.parametrize(
  'name, text, message',
  [
    ('a.tsv', 'q\ta\nb\n', 'line 2 has 1 fields, but the first line 2: q, a'),
    ('a.tsv', 'q\ta\n', 'a.tsv is empty'),
    ('a.json', '[{"q": "b"}]', 'item 1: q must be a text and a a text'),
    ('a.json', '[]', 'a.json is empty'),
    ('a.parquet', 'text', 'a.parquet is not a parquet file'),
  ],
)
def test_bad_files_are_refused(tmp_path, name, text, message):
  (tmp_path / name).write_text(text)
  with pytest.raises(errors.UserError, match=message):
    text_pairs.read(f'{tmp_path}/{name}#q,a')


pytest.importorskip('sacrebleu', reason="needs pip install -e '.[eval]'")


def test_references_keep_characters_that_the_vocabulary_lacks(tmp_path):
  stack = toy_models.stack(**toy_models.T5, vocab_size=t5_files.PIECES + 100)
  config = model_config.encoder_decoder(stack, stack)
  file = t5_files.train(tmp_path / 'spiece.model')
  choice = vocabulary_pair.Choice(str(file))
  stored = model_on_disk.StoredModel(paths.at(tmp_path), config, choice, dict)
  model = dataclasses.replace(toy_models.load(config), stored=stored)
  (tmp_path / 'config.json').write_text('{}')
  (answer,) = model.generate(['the fox'], max_tokens=4)
  row = {'input': 'the fox', 'target': f'日本 {answer}'}
  (tmp_path / 'a.jsonl').write_text(json.dumps(row))
  pairs = text_pairs.read(f'{tmp_path}/a.jsonl', max_tokens=4)
  *scores, prediction = pairs.scores(model, 1, lambda *_: None)
  assert prediction.references == [row['target']]
  values = {score.metric: score.value for score in scores}
  assert prediction.cut and values['cut_short'] == 1
  assert values['exact_match'] == 0 and values['chrf'] < 100
  # Scores with other words are not found in the place of these.
  other = text_pairs.read(f'{tmp_path}/a.jsonl', tokenizers='char')
  assert other.options() != pairs.options()
