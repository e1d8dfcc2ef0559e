"""Decoder-only reward models as sequence classifiers of transformers."""

import json

from flax import traverse_util
import numpy as np
import pytest

import encdec_adapt
from encdec_adapt.huggingface import config_json, export, tensor_folder
from encdec_adapt.models import model_config
from tests import toy_models
from tests.parity import test_folders, tiny_models

pytestmark = pytest.mark.parity

FIELDS = {'decoder': {'bos_token_id': 2, 'eos_token_id': 1, 'pad_token_id': 0}}


def _save(name, saved, folder, fields=FIELDS):
  """Exports a reward model of the stack of a case; returns its config."""
  _, _, ours = saved(name)
  config = model_config.reward_model(ours.config)
  arrays = traverse_util.flatten_dict(toy_models.params(config), sep='/')
  export.write(folder, config, arrays, fields=fields)
  return config


@pytest.mark.long
@pytest.mark.parametrize(
  'name',
  [
    name
    for name, case in tiny_models.CASES.items()
    if not case.is_pair
    and name != 'gemma3_images'
    and 'gemma4' not in name  # transformers has no class of it.
    and 'MaskedLM' not in case.architecture  # No reward models.
  ],
)
def test_rewards_equal_those_of_a_sequence_classifier(name, saved, tmp_path):
  config = _save(name, saved, tmp_path / 'model')
  ours = encdec_adapt.load(tmp_path / 'model')
  assert ours.config == config
  theirs = tiny_models.load(tmp_path / 'model')
  assert theirs.config.num_labels == 1
  rows = tiny_models.batch(tiny_models.CASES[name])
  # Rows without padding and with padding on the right.
  tokens, mask = rows.decoder[:2], rows.decoder_mask[:2]
  tensors = {'input_ids': tokens, 'attention_mask': mask}
  tensors = {k: tiny_models.torch.tensor(v).long() for k, v in tensors.items()}
  with tiny_models.torch.no_grad():
    expected = theirs(**tensors).logits[:, 0].numpy()
  last = mask.sum(1) - 1
  found = np.asarray(ours.logits(tokens, decoder_mask=mask))[[0, 1], last, 0]
  np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)
  theirs.save_pretrained(tmp_path / 'theirs')
  test_folders.assert_comes_back(tmp_path / 'theirs', tmp_path / 'again')


def test_an_end_that_is_padding_is_read(saved, tmp_path):
  fields = {'decoder': {**FIELDS['decoder'], 'pad_token_id': 1}}
  _save('qwen2', saved, tmp_path / 'model', fields)
  raw = json.loads((tmp_path / 'model' / tensor_folder.CONFIG).read_text())
  # transformers reads the last token that is not padding.
  assert raw['pad_token_id'] is None and raw['eos_token_id'] == 1


def test_pairs_are_written_in_our_layout(tmp_path):
  pair = model_config.encoder_decoder(toy_models.stack(), toy_models.stack())
  config = model_config.reward_model(pair)
  with pytest.raises(Exception, match='head is of kind reward'):
    config_json.raw_from_model(config)
  raw = config_json.native_from_model(config)
  assert 'auto_map' not in raw
  assert config_json.model_from_raw(raw)[0] == config
