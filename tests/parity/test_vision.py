"""The vision part of T5Gemma 2: carried along, or taken from a donor."""

import json
import re
import shutil

import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.huggingface import tensor_folder
from tests import tiny, toy_models
from tests.parity import tiny_models

pytestmark = pytest.mark.parity
convert_ = tiny.convert
START = 'model.encoder.'
PROJECTION = f'{START}multi_modal_projector.mm_input_projection_weight'


PIXELS = 'preprocessor_config.json'
PROCESSOR = 'processor_config.json'
NORM = 'vision_tower.encoder.layers.1.layer_norm1.bias'
OLD_NORM = NORM.replace('tower.', 'tower.vision_model.', 1)


def save(case, folder, seed=0, *, spelling='new'):
  """Saves a model with its image processor files.

  Args:
    case: name of the case.
    folder: folder to make.
    seed: seed of the weights.
    spelling: 'old' for the tensor names of transformers 4.
  """
  model = tiny_models.make(tiny_models.CASES[case], seed)
  model.save_pretrained(folder)
  images = tiny_models.transformers.Gemma3ImageProcessorPil
  images(size={'height': 28, 'width': 28}).save_pretrained(folder)
  (folder / PROCESSOR).write_text(
    json.dumps({'image_seq_length': 1, 'processor_class': 'Gemma3Processor'})
  )
  if spelling == 'old':
    rename = ('vision_tower.', 'vision_tower.vision_model.')
    toy_models.change(folder, lambda t: {k.replace(*rename): t[k] for k in t})
  return model


def import_export(folder, *flags):
  source, run, output = (folder / name for name in ('model', 'run', 'out'))
  convert_('import', f'--source={source}', f'--output={run}')
  convert_('export', f'--checkpoint={run}', f'--output={output}', *flags)
  return output


def tensors(folder):
  opened = tensor_folder.TensorFolder(folder)
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


@pytest.mark.long
@pytest.mark.parametrize('spelling', ['new', 'old'])
def test_a_folder_with_images_comes_back_bit_for_bit(spelling, tmp_path):
  theirs = save('t5gemma2', tmp_path / 'model', spelling=spelling)
  output = import_export(tmp_path)
  before, after = tensors(tmp_path / 'model'), tensors(output)
  assert before.keys() == after.keys()
  for name, array in before.items():
    assert after[name].dtype == array.dtype
    assert after[name].tobytes() == array.tobytes(), name
  again = tiny_models.load(output)  # Nothing missing, nothing unexpected.
  np.testing.assert_array_equal(image_logits(theirs), image_logits(again))
  for name in (PIXELS, PROCESSOR):
    one, other = ((x / name).read_bytes() for x in (output, tmp_path / 'model'))
    assert one == other, name
  pixels = tiny_models.transformers.AutoImageProcessor.from_pretrained(output)
  assert pixels.size['height'] == 28
  # The part keeps its dtype; the text has the one asked for.
  half = tmp_path / 'half'
  flags = [f'--checkpoint={tmp_path}/run', '--dtype=bfloat16']
  convert_('export', *flags, f'--output={half}')
  kinds = {name: str(array.dtype) for name, array in tensors(half).items()}
  assert kinds[PROJECTION] == 'float32'
  assert kinds['model.decoder.norm.weight'] == 'bfloat16'


@pytest.fixture
def without(tmp_path):
  """A folder of T5Gemma 2 with text only."""
  model = tiny_models.make(tiny_models.CASES['t5gemma2'])
  model.save_pretrained(tmp_path / 'model')
  parts = ('vision_tower', 'multi_modal')
  toy_models.change(
    tmp_path / 'model',
    lambda t: {k: t[k] for k in t if not any(part in k for part in parts)},
  )
  return tmp_path


def test_text_alone_names_what_is_missing(without, capsys):
  output = import_export(without)
  shown = capsys.readouterr().out
  for words in (shown, (output / 'README.md').read_text()):
    assert 'multi_modal_projector.*' in words and 'vision_tower.*' in words
  assert not any('vision_tower' in name for name in tensors(output))


@pytest.mark.parametrize('spelling', ['new', 'old'])
def test_the_vision_part_of_a_gemma3(spelling, without):
  donor = without / 'donor'
  save('gemma3_images', donor, 7, spelling=spelling)
  if spelling == 'old':
    for name in (PIXELS, PROCESSOR):
      (donor / name).unlink()
  output = import_export(without, f'--vision={without}/donor')
  theirs, ours = tensors(without / 'donor'), tensors(output)
  name = PROJECTION.removeprefix(START)
  np.testing.assert_array_equal(ours[PROJECTION], theirs[name])
  card = (output / 'README.md').read_text()
  assert re.search('vision part, [0-9]+ tensors, is that of `donor`', card)
  if spelling != 'old':
    for name in (PIXELS, PROCESSOR):
      assert (output / name).read_bytes() == (donor / name).read_bytes()
  again = tiny_models.load(output)  # Nothing missing, nothing unexpected.
  assert again.config.encoder.vision_config.num_hidden_layers == 2
  assert np.isfinite(image_logits(again)).all()


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """A T5Gemma 2 and a Gemma 3 that read images."""
  folder = tmp_path_factory.mktemp('whole')
  for case in ('t5gemma2', 'gemma3_images'):
    save(case, folder / case)
  return folder


# Changes of a donor's tensors.
DAMAGE = {
  'no projection': lambda t: {k: t[k] for k in t if START + k != PROJECTION},
  'twice': lambda t: {**t, OLD_NORM: t[NORM]},
}


@pytest.mark.parametrize(
  'kind, words',
  [
    ('no projection', 'without tensor .*two names'),
    ('twice', 'without tensor .*two names'),
    ('width', 'projects to width 48, and the encoder has width 32'),
    ('none', 'has no vision part'),
  ],
)
def test_vision_parts_that_are_refused(kind, words, whole, tmp_path):
  donor = tmp_path / 'donor'
  if kind in DAMAGE:
    shutil.copytree(whole / 'gemma3_images', donor)
    toy_models.change(donor, DAMAGE[kind])
  else:
    case = tiny_models.CASES['gemma3_images' if kind == 'width' else 'gemma3']
    settings = case.settings()
    if kind == 'width':
      settings.text_config.update({'hidden_size': 48})
    tiny_models.make(case, settings=settings).save_pretrained(donor)
  flags = [f'--checkpoint={whole}/t5gemma2', f'--vision={donor}']
  with pytest.raises(errors.UserError, match=words):
    convert_('export', *flags, f'--output={tmp_path}/out')
  assert not (tmp_path / 'out').exists()
