"""Folders and arguments that `convert` and `train` refuse."""

import json
import os
import shutil

import numpy as np
import pytest
from safetensors import numpy as safetensors

from encdec_adapt.base import errors
from tests import tiny

pytestmark = pytest.mark.e2e
convert_ = tiny.convert


def _damage(folder, tensors=None, config=None):
  """Changes a folder's tensors and config in place."""
  file = folder / 'model.safetensors'
  found = dict(safetensors.load_file(file))
  if tensors:
    tensors(found)
    safetensors.save_file(found, file, {'format': 'pt'})
  if config:
    raw = json.loads((folder / 'config.json').read_text())
    raw.update(config)
    (folder / 'config.json').write_text(json.dumps(raw))


NORM = 'model.layers.1.input_layernorm.weight'


def _zeros(size, value=0.0):
  return lambda folder: _damage(
    folder, lambda t: t.update({NORM: np.full(size, value, np.float32)})
  )


def _truncate(folder):
  file = folder / 'model.safetensors'
  file.write_bytes(file.read_bytes()[:-100])


def _pickle(folder):
  (folder / 'model.safetensors').rename(folder / 'pytorch_model.bin')


@pytest.mark.parametrize(
  'damage, words',
  [
    (lambda f: _damage(f, lambda t: t.pop(NORM)), f'no tensor .{NORM}'),
    (_zeros(17), rf'{NORM} in .* has shape \[17\]'),
    (_zeros(16, np.nan), f'{NORM}.* has the value nan at .0'),
    (lambda f: _damage(f, config={'hidden_size': 32}), 'config.json requires'),
    (lambda f: _damage(f, config={'model_type': 'mamba'}), "'mamba'.* gemma2"),
    (_truncate, 'model.safetensors'),
    (_pickle, r'pickled weights \(pytorch_model.bin\)'),
  ],
)
def test_a_damaged_folder_leaves_nothing_behind(damage, words, gemma, tmp_path):
  source = shutil.copytree(gemma, tmp_path / 'source')
  damage(source)
  for name, flag in (('import', '--source'), ('adapt', '--encoder')):
    with pytest.raises(errors.UserError, match=words):
      convert_(name, f'{flag}={source}', f'--output={tmp_path}/out')
  assert os.listdir(tmp_path) == ['source']


METADATA = [
  ('generation_config.json', '{"eos_', 'it is not valid JSON'),
  ('tokenizer.json', '{"model": {', 'it is not valid JSON'),
  ('tokenizer_config.json', '[]', 'its JSON is a list, not an object'),
  ('tokenizer.model', '\n\x01', 'not a SentencePiece model, or a damaged'),
  ('tokenizer.model', '', 'is empty, or a'),
  ('tokenizer.model', 'version https://git-lfs.github.com/spec/v1\n',
   'or a pointer of Git LFS'),
]  # fmt: skip


@pytest.mark.parametrize('name, text, words', METADATA)
def test_damaged_metadata_leaves_nothing_behind(
  name, text, words, gemma, tmp_path
):
  source = shutil.copytree(gemma, tmp_path / 'source')
  (source / name).write_text(text)
  flags = {'import': 'source', 'adapt': 'encoder', 'export': 'checkpoint'}
  for command, flag in flags.items():
    with pytest.raises(errors.UserError, match=f'{source}/{name}.*{words}'):
      convert_(command, f'--{flag}={source}', f'--output={tmp_path}/out')
  assert os.listdir(tmp_path) == ['source']


def test_tensors_that_are_no_weights_are_named(gemma, tmp_path, capsys):
  source = shutil.copytree(gemma, tmp_path / 'source')
  names = [f'model.layers.{i}.self_attn.rotary_emb.inv_freq' for i in range(2)]
  buffers = dict.fromkeys(names, np.ones(4, np.float32))
  _damage(source, tensors=lambda t: t.update(buffers))
  assert convert_('import', f'--source={source}', f'--output={tmp_path}/o') == 0
  assert f'unused: {names[0]} and 1 more' in capsys.readouterr().out
  summary = json.loads((tmp_path / 'o' / 'summary.json').read_text())
  assert list(summary['made_by']['unused']) == names


@pytest.mark.parametrize(
  'argv, words',
  [
    (['import'], '--source is missing'),
    (['import', '--source=nowhere', '--output={tmp}/x'], 'nowhere holds no'),
    (['import', '--source={imported}', '--output={tmp}/x'], 'work directory'),
    (['import', '--source={gemma}', '--output={gemma}'], 'exists already'),
    (['import', '--source={gemma}', '--output={tmp}/x', '--model=2b'],
     'has a config.json of its own'),
    (['export', '--checkpoint={adapted}', '--output={tmp}/x',
      '--vision={gemma}'], 'has no part that reads images'),
    (['export', '--checkpoint={imported}', '--output={gemma}'],
     'exists already'),
    (['adapt', '--encoder={gemma}', '--output={gemma}'], 'exists already'),
    (['adapt', '--encoder={adapted}', '--output={tmp}/x'],
     'of kind encoder_decoder'),
    (['adapt', '--encoder={wide}', '--decoder={gemma}', '--output={tmp}/x',
      '--cross_attention=copy'], 'as wide as the decoder'),
    (['merge', '{gemma}', '{wide}', '--output={tmp}/x'],
     'width is 16 and 24'),
    (['merge', '{gemma}', '--output={tmp}/x'], 'gemma alone; give another'),
    (['merge', '{gemma}', '{gemma}', '--weights=1,1', '--output={tmp}/x'],
     'must be 2 numbers'),
    (['merge', '{gemma}', '{gemma}', '--weights=a,b', '--output={tmp}/x'],
     "'a' at column 1 must be a number"),
    (['verify', '{gemma}', '{llama}'], 'no tokens in common'),
    (['verify', '{gemma}', '{gemma}', '--rows=0'], 'rows=0'),
  ]
  + [
    (['adapt', '--output={tmp}/x', *flags], words)
    for flags, words in (
      (['--encoder={gemma}', '--target=t5gemma2'],
       'made of gemma3_text stacks: attention_softcap is 50.0'),
      (['--encoder={llama}', '--target=t5gemma'], 'made of gemma2 stacks: '),
      (['--encoder={gemma}', '--target=t5gemma', '--model.cross_merged'],
       'has no class for this model. t5gemma: the class has other'),
      (['--encoder={gemma}', '--model.encoder.kv_head=2'],
       "'encoder.kv_head' .did you mean 'kv_heads'"),
      (['--encoder={gemma}', '--model.encoder.width=8'],
       'config.model.encoder is the shape of the source'),
      (['--encoder={wide}', '--decoder={gemma}', '--model.cross_merged'],
       "the encoder's width"),
      (['--encoder={gemma}', '--model.cross_layers=global'],
       'no layer of the decoder reads'),
    )
  ],
)  # fmt: skip
def test_bad_arguments(argv, words, request, tmp_path):
  fixtures = ('gemma', 'wide', 'llama', 'imported', 'adapted')
  names = {name: request.getfixturevalue(name) for name in fixtures}
  with pytest.raises(errors.UserError, match=words):
    convert_(*(argument.format(**names, tmp=tmp_path) for argument in argv))
  assert not list(tmp_path.iterdir())
