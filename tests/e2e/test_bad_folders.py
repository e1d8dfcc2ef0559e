"""Folders and arguments that the exchange commands refuse."""

import json
import os
import shutil

import numpy as np
import pytest
from safetensors import numpy as safetensors

from encdec_adapt import train
from encdec_adapt.cli import errors
from encdec_adapt.huggingface import export
from encdec_adapt.models import model_config, parameters
from tests import tiny
from tests.e2e import folders

pytestmark = [
  pytest.mark.e2e,
  pytest.mark.usefixtures('in_the_repository'),
]
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
DAMAGES = {
  'missing': (dict(tensors=lambda t: t.pop(NORM)), f'no tensor .{NORM}'),
  'extra': (
    dict(tensors=lambda t: t.update(stray=np.zeros(2, np.float32))),
    'stray in .*no tensor of the model',
  ),
  'shape': (
    dict(tensors=lambda t: t.update({NORM: np.zeros(17, np.float32)})),
    rf'{NORM} in .* has shape \[17\]',
  ),
  'nan': (
    dict(tensors=lambda t: t.update({NORM: np.full(16, np.nan, np.float32)})),
    f'{NORM}.* has the value nan at .0',
  ),
  'infinite': (
    dict(tensors=lambda t: t.update({NORM: np.full(16, np.inf, np.float32)})),
    f'{NORM}.* has the value inf',
  ),
  'contradiction': (dict(config={'hidden_size': 32}), r'config.json .*says'),
  'layers': (
    dict(config={'num_hidden_layers': 1, 'layer_types': None}),
    r'model.layers.1\S+ in .* no tensor of the model',
  ),
  'family': (dict(config={'model_type': 'mamba'}), "'mamba'.* gemma2"),
  'activation': (dict(config={'hidden_activation': 'relu'}), "'relu'; supp"),
  'own layout': (
    dict(config={'model_type': 'encdec_adapt', 'format_version': 9}),
    'format_version = 9',
  ),
}  # fmt: skip


@pytest.mark.parametrize('damage', DAMAGES)
def test_a_damaged_folder_leaves_nothing_behind(damage, gemma, tmp_path):
  source = shutil.copytree(gemma, tmp_path / 'source')
  changes, words = DAMAGES[damage]
  _damage(source, **changes)
  for name in ('import', 'adapt'):
    flag = '--source' if name == 'import' else '--encoder'
    with pytest.raises(errors.UserError, match=words):
      convert_(name, f'{flag}={source}', f'--output={tmp_path}/out')
  assert os.listdir(tmp_path) == ['source']


def _truncate(folder):
  file = folder / 'model.safetensors'
  file.write_bytes(file.read_bytes()[:-100])


def _pickle(folder):
  (folder / 'model.safetensors').rename(folder / 'pytorch_model.bin')


def _break_config(folder):
  (folder / 'config.json').write_text('{"model_type": "gemma2", ')


@pytest.mark.parametrize(
  'damage, words',
  [
    (_truncate, 'model.safetensors is no complete safetensors file'),
    (_pickle, r'pickled weights \(pytorch_model.bin\)'),
    (_break_config, 'config.json: it is not valid JSON'),
  ],
)
def test_damaged_files_leave_nothing_behind(damage, words, gemma, tmp_path):
  source = shutil.copytree(gemma, tmp_path / 'source')
  damage(source)
  for name in ('import', 'adapt'):
    flag = '--source' if name == 'import' else '--encoder'
    with pytest.raises(errors.UserError, match=words):
      convert_(name, f'{flag}={source}', f'--output={tmp_path}/out')
  assert os.listdir(tmp_path) == ['source']


METADATA = [
  ('generation_config.json', '{"eos_', 'it is not valid JSON'),
  ('generation_config.json', '{"eos_token_id": "x"}',
   "has eos_token_id = 'x', and an id is a number. Correct it"),
  ('generation_config.json', '{"bos_token_id": [2]}', r'bos_token_id = \[2\]'),
  ('tokenizer.json', '{"model": {', 'it is not valid JSON'),
  ('tokenizer_config.json', '[]', 'its JSON is a list, not an object'),
  ('tokenizer.model', '\n\x01', 'not a SentencePiece model, or a damaged'),
  ('tokenizer.model', '', 'is empty; copy the file'),
  ('tokenizer.model', 'version https://git-lfs.github.com/spec/v1\n',
   'is a pointer of Git LFS; copy the file'),
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


def test_a_special_id_that_is_none_is_named_by_its_file(gemma, pairs, tmp_path):
  source = shutil.copytree(gemma, tmp_path / 'source')
  _damage(source, config={'eos_token_id': [1, 'x']})
  words = r"config.json has eos_token_id = \[1, 'x'\], and an id is a number"
  with pytest.raises(errors.UserError, match=words):
    convert_('import', f'--source={source}', f'--output={tmp_path}/out')
  flags = ['--config.init.mode=adapt', f'--config.init.encoder={source}']
  with pytest.raises(errors.UserError, match=words):
    tiny.call(train, *pairs, *flags, f'--workdir={tmp_path}/run')
  assert not list((tmp_path / 'run').glob('hugging_face*'))


def test_the_command_says_it_once(gemma, tmp_path):
  """Orbax, which reads the tensors, has tracebacks of its own."""
  source = shutil.copytree(gemma, tmp_path / 'source')
  _damage(source, **DAMAGES['nan'][0])
  done = tiny.run(
    'convert', 'import', f'--source={source}', f'--output={tmp_path}/out'
  )
  assert done.returncode == 2
  assert 'Traceback' not in done.stderr and 'Warning' not in done.stderr
  assert len(done.stderr.splitlines()) < 4, done.stderr
  assert done.stderr.splitlines()[-1].startswith('Error: ')
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


def test_parameters_that_are_not_finite_are_not_exported(imported, tmp_path):
  output = tmp_path / 'out'
  shape = model_config.DecoderOnlyConfig(
    model_config.StackConfig(**folders.GEMMA)
  )
  params = {
    path: np.full(info.shape, 1e5, np.float32)
    for path, info in parameters.parameter_table(shape).items()
  }
  with pytest.raises(errors.UserError, match='float16 form.*has the value inf'):
    export.write(output, shape, params, dtype=np.dtype(np.float16))
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  'argv, words',
  [
    ([], 'a command is missing'),
    (['exprot'], "'exprot'.*Did you mean export"),
    (['import'], '--source is missing'),
    (['import', '--surce=x'], 'surce'),
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
     'is an encoder-decoder'),
    (['adapt', '--encoder={wide}', '--decoder={gemma}', '--output={tmp}/x',
      '--cross_attention=copy'], 'as wide as the decoder'),
    (['inspect'], 'inspect takes PATH, not nothing'),
    (['inspect', '{gemma}', '{gemma}'], 'inspect takes PATH'),
    (['diff', '{gemma}'], 'diff takes A B'),
    (['merge', '{gemma}', '{wide}', '--output={tmp}/x'], 'width is 16 and 24'),
    (['merge', '{gemma}', '{gemma}', '--weights=1,1', '--output={tmp}/x'],
     'sum to 2'),
    (['merge', '{gemma}', '{gemma}', '--weights=1', '--output={tmp}/x'],
     '1 weights are given for 2'),
    (['merge', '{gemma}', '{gemma}', '--weights=a,b', '--output={tmp}/x'],
     'must be numbers'),
    (['verify', '{gemma}', '{llama}'], 'no tokens in common'),
    (['verify', '{gemma}', '{gemma}', '--rows=0'], 'rows is 0'),
    (['verify', '{gemma}', '{gemma}', '--tokens=nowhere'], 'cannot be read'),
  ],
)  # fmt: skip
def test_bad_arguments(
  argv, words, gemma, wide, llama, imported, adapted, tmp_path
):
  names = dict(
    gemma=gemma,
    wide=wide,
    llama=llama,
    imported=imported,
    adapted=adapted,
    tmp=tmp_path,
  )
  with pytest.raises(errors.UserError, match=words):
    convert_(*(argument.format(**names) for argument in argv))
  assert not list(tmp_path.iterdir())
