"""The vision part of T5Gemma 2: carried along, or taken from elsewhere."""

import re

import numpy as np
import pytest

from encdec_adapt.interop import tensor_folder
from encdec_adapt.runtime import errors
from tests import tiny
from tests.parity import tiny_models

pytestmark = pytest.mark.parity
convert_ = tiny.convert
PROJECTION = 'model.encoder.multi_modal_projector.mm_input_projection_weight'


def import_export(folder, *flags):
  source, run, output = (folder / name for name in ('model', 'run', 'out'))
  convert_('import', f'--source={source}', f'--output={run}')
  convert_('export', f'--checkpoint={run}', f'--output={output}', *flags)
  return output


def tensors(folder):
  opened = tensor_folder.TensorFolder.open(folder)
  return {name: opened.read(name) for name in opened.tensors}


def image_logits(model):
  """Logits of a row with an image in it."""
  torch = tiny_models.torch
  generator = torch.Generator().manual_seed(3)
  ids = tiny_models.IMAGE_IDS
  tokens = [2, ids['boi_token_index'], ids['image_token_index']]
  tokens += [ids['eoi_token_index'], 5, 6]
  with torch.no_grad():
    return model(
      input_ids=torch.tensor([tokens]),
      decoder_input_ids=torch.tensor([[2, 7, 8]]),
      pixel_values=torch.randn((1, 3, 28, 28), generator=generator),
      use_cache=False,
    ).logits.numpy()


def test_a_folder_with_images_comes_back_bit_for_bit(tmp_path):
  theirs = tiny_models.make(tiny_models.CASES['t5gemma2'])
  theirs.save_pretrained(tmp_path / 'model')
  output = import_export(tmp_path)
  before, after = tensors(tmp_path / 'model'), tensors(output)
  assert before.keys() == after.keys()
  for name, array in before.items():
    assert after[name].dtype == array.dtype
    assert after[name].tobytes() == array.tobytes(), name
  again = tiny_models.load(output)  # Nothing missing, nothing unexpected.
  np.testing.assert_array_equal(image_logits(theirs), image_logits(again))
  # The part keeps its dtype; the text has the one asked for.
  half = tmp_path / 'half'
  flags = [f'--checkpoint={tmp_path}/run', '--dtype=bfloat16']
  convert_('export', *flags, f'--output={half}')
  kinds = {name: str(array.dtype) for name, array in tensors(half).items()}
  assert kinds[PROJECTION] == 'float32'
  assert kinds['model.decoder.norm.weight'] == 'bfloat16'


@pytest.fixture
def without(tmp_path):
  """A T5Gemma 2 whose folder has text only."""
  model = tiny_models.make(tiny_models.CASES['t5gemma2'])
  model.save_pretrained(tmp_path / 'whole')
  convert_(
    'export',
    f'--checkpoint={tmp_path}/whole',
    f'--output={tmp_path}/model',
    '--dtype=float32',
  )
  safetensors = pytest.importorskip('safetensors.numpy')
  file = tmp_path / 'model' / tensor_folder.SINGLE
  text = {
    name: array
    for name, array in safetensors.load_file(file).items()
    if 'vision_tower' not in name and 'multi_modal' not in name
  }
  safetensors.save_file(text, file, {'format': 'pt'})
  return tmp_path


def test_text_alone_names_what_is_missing(without, capsys):
  output = import_export(without)
  shown = capsys.readouterr().out
  for words in (shown, (output / 'README.md').read_text()):
    assert PROJECTION in words and 'vision_tower.*' in words
  assert not any('vision_tower' in name for name in tensors(output))


def test_the_vision_part_of_a_gemma3(without, capsys):
  donor = tiny_models.make(tiny_models.CASES['gemma3_images'], seed=7)
  donor.save_pretrained(without / 'donor')
  output = import_export(without, f'--vision={without}/donor')
  theirs, ours = tensors(without / 'donor'), tensors(output)
  name = PROJECTION.removeprefix('model.encoder.')
  np.testing.assert_array_equal(ours[PROJECTION], theirs[name])
  card = (output / 'README.md').read_text()
  assert re.search('vision part, [0-9]+ tensors, is that of `donor`', card)
  again = tiny_models.load(output)
  assert again.config.encoder.vision_config.num_hidden_layers == 2
  assert np.isfinite(image_logits(again)).all()


@pytest.mark.parametrize(
  'change, words',
  [
    ('width', 'projects to width 48, and the encoder has width 32'),
    ('none', 'has no vision part'),
    ('decoder', 'is for what transformers loads as T5Gemma 2'),
  ],
)
def test_vision_parts_that_do_not_fit(change, words, without):
  donor, checkpoint = without / 'donor', without / 'model'
  case = tiny_models.CASES['gemma3_images' if change == 'width' else 'gemma3']
  settings = case.settings()
  if change == 'width':
    settings.text_config.update({'hidden_size': 48})
  tiny_models.make(case, settings=settings).save_pretrained(donor)
  if change == 'decoder':
    checkpoint = donor
  with pytest.raises(errors.UserError, match=words):
    convert_(
      'export',
      f'--checkpoint={checkpoint}',
      f'--output={without}/out',
      f'--vision={donor}',
    )
  assert not (without / 'out').exists()
