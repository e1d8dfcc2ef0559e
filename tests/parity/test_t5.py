"""T5 and its kin: encoders, stored copies, heads, and shapes of the presets."""

import shutil

import numpy as np
import pytest
from safetensors import numpy as safetensors

import encdec_adapt
from encdec_adapt.huggingface import config_json, tensor_folder
from encdec_adapt.huggingface import folder as folder_lib
from encdec_adapt.models import parameters, presets
from tests import tiny, toy_models
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
  flags = f'--source={tmp_path}/model', f'--output={tmp_path}/run'
  assert tiny.convert('import', *flags) == 0
  run = encdec_adapt.load(tmp_path / 'run')
  np.testing.assert_array_equal(np.asarray(run.encode(rows.encoder, mask)), got)


def test_copies_and_ignored_tensors_are_named(saved, tmp_path):
  _, folder, ours = saved('t5')
  table = safetensors.load_file(folder / tensor_folder.SINGLE)['shared.weight']
  cross = 'decoder.block.0.layer.1.EncDecAttention.relative_attention_bias'
  copies = ('encoder.embed_tokens.weight', 'lm_head.weight')
  more = dict.fromkeys(copies, table)
  more[f'{cross}.weight'] = np.zeros((8, 4), np.float32)
  # The config does not say it, and the values do: the head is tied.
  shutil.copytree(folder, tmp_path / 'model')
  toy_models.change(
    tmp_path / 'model', lambda t: t | more, tie_word_embeddings=False
  )
  opened = folder_lib.ModelFolder(tmp_path / 'model')
  assert opened.config == ours.config
  assert set(opened.unused) == {*copies, f'{cross}.weight'}
  test_folders.assert_comes_back(tmp_path / 'model', tmp_path / 'again')


def test_byt5_is_verified_with_transformers(tmp_path, capsys):
  fields = tiny_models.T5 | {'vocab_size': 384}
  settings = transformers.T5Config(**fields)
  theirs = tiny_models.make(tiny_models.CASES['t5'], settings=settings)
  theirs.save_pretrained(tmp_path)
  transformers.ByT5Tokenizer().save_pretrained(tmp_path)
  assert tiny.convert('verify', *[tmp_path] * 2, '--with=transformers') == 0
  assert 'lists of ids of texts are equal' in capsys.readouterr().out


@pytest.mark.long
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
  head = 0 if decoder.head.tied else decoder.vocab_size * decoder.width
  assert parameters.count(config) == model.num_parameters() + head
