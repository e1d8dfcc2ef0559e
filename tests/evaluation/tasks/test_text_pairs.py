"""Answers to pairs, compared with the references of the file."""

import dataclasses
import json

import pytest

from encdec_adapt.evaluation.tasks import text_pairs
from encdec_adapt.files import paths
from encdec_adapt.models import model_config
from encdec_adapt.stored import model_on_disk
from encdec_adapt.tokenizers import vocabulary_pair
from tests import toy_models
from tests.tokenizers import t5_files

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
  assert values['exact_match'] == 0 and values['chrf'] < 100
  # Scores with other words are not found in the place of these.
  other = text_pairs.read(f'{tmp_path}/a.jsonl', tokenizers='char')
  assert other.options() != pairs.options()
