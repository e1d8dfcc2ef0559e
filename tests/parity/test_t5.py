"""T5 and its kin: encoders, stored copies, heads, and shapes of the presets."""

import json
import shutil

import numpy as np
import pytest
from safetensors import numpy as safetensors

import encdec_adapt
from encdec_adapt.base import errors
from encdec_adapt.huggingface import config_json, tensor_folder
from encdec_adapt.huggingface import folder as folder_lib
from encdec_adapt.models import parameters, presets
from tests.parity import test_folders, tiny_models

pytestmark = pytest.mark.parity
torch, transformers = tiny_models.torch, tiny_models.transformers


@pytest.mark.parametrize('family', ['T5', 'UMT5'])
def test_encoders(family, tmp_path):
  settings = getattr(transformers, f'{family}Config')(**tiny_models.T5)
  case = tiny_models.Case(f'{family}EncoderModel', lambda: settings, '')
  theirs = tiny_models.make(case)
  theirs.save_pretrained(tmp_path / 'model')
  ours = encdec_adapt.load(tmp_path / 'model')
  assert parameters.count(ours.config) == theirs.num_parameters()
  rows = tiny_models.batch(tiny_models.CASES['t5'])
  mask = rows.encoder_mask
  tokens = torch.tensor(rows.encoder).long()
  with torch.no_grad():
    expected = theirs(tokens, torch.tensor(mask).long()).last_hidden_state
  got = np.asarray(ours.encode(rows.encoder, mask))
  tolerance = dict(rtol=0, atol=tiny_models.TOLERANCE)
  np.testing.assert_allclose(got[mask], expected.numpy()[mask], **tolerance)
  test_folders.assert_comes_back(tmp_path / 'model', tmp_path / 'again')


def changed(source, folder, config=None, tensors=None):
  """Copies a folder with other fields and further tensors."""
  shutil.copytree(source, folder)
  file = folder / tensor_folder.CONFIG
  raw = json.loads(file.read_text()) | (config or {})
  file.write_text(json.dumps(raw))
  file = folder / tensor_folder.SINGLE
  stored = safetensors.load_file(file) | (tensors or {})
  safetensors.save_file(stored, file, {'format': 'pt'})
  return folder_lib.ModelFolder(folder)


def test_copies_and_ignored_tensors_are_named(saved, tmp_path):
  _, folder, ours = saved('t5')
  table = safetensors.load_file(folder / tensor_folder.SINGLE)['shared.weight']
  cross = 'decoder.block.0.layer.1.EncDecAttention.relative_attention_bias'
  copies = ('encoder.embed_tokens.weight', 'lm_head.weight')
  more = dict.fromkeys(copies, table)
  more[f'{cross}.weight'] = np.zeros((8, 4), np.float32)
  # The config does not say it, and the values do: the head is tied.
  opened = changed(
    folder, tmp_path / 'model', {'tie_word_embeddings': False}, more
  )
  assert opened.config == ours.config
  assert set(opened.unused) == {*copies, f'{cross}.weight'}
  test_folders.assert_comes_back(tmp_path / 'model', tmp_path / 'again')


@pytest.mark.parametrize(
  'config, tensors, message',
  [
    (
      {'relative_attention_num_buckets': 16},
      {},
      r'relative_attention_bias.weight .* shape \[8, 4\].*requires \[16, 4\]',
    ),
    (
      {},
      {'lm_head.weight': np.ones((70, 32), np.float32)},
      r'lm_head.weight .* has shape \[70, 32\].* requires \[67, 32\]',
    ),
  ],
)
def test_tensors_that_do_not_fit(config, tensors, message, saved, tmp_path):
  with pytest.raises(errors.UserError, match=message):
    changed(saved('t5')[1], tmp_path / 'model', config, tensors)


@pytest.mark.parametrize('size', presets.T5)
def test_counts_of_the_classes(size):
  config = presets.t5(size)
  raw, _ = config_json.raw_from_model(config)
  kind = getattr(transformers, raw['architectures'][0])
  fields = {k: v for k, v in raw.items() if k != 'architectures'}
  with torch.device('meta'):
    model = kind(kind.config_class(**fields))
  decoder = config.decoder
  # transformers 5 ties the head of every model that is built from a config.
  head = 0 if decoder.tied_head else decoder.vocab_size * decoder.width
  assert parameters.count(config) == model.num_parameters() + head
