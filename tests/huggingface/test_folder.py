"""Tensors that are stored twice, elsewhere, in several dtypes, or as integers.

Folders are made by our own exporter and then changed.
"""

import json

from flax import traverse_util
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import numpy as safetensors

from encdec_adapt.cli import errors
from encdec_adapt.huggingface import export, folder
from encdec_adapt.models import model_config, parameters

SIZES = dict(
  layers=2,
  width=8,
  mlp_width=12,
  heads=2,
  kv_heads=1,
  head_dim=4,
  vocab_size=20,
  window=4,
  pattern=('local',),
)
GEMMA2 = model_config.StackConfig(**SIZES)
GEMMA3 = model_config.StackConfig(
  **SIZES,
  qk_norm=True,
  attention_softcap=None,
  final_softcap=None,
  rope_theta=1e6,
  local_rope_theta=1e4,
)
MODELS = {
  'gemma2': model_config.DecoderOnlyConfig(GEMMA2),
  't5gemma': model_config.encoder_decoder(GEMMA2, GEMMA2),
  't5gemma2': model_config.t5gemma2(GEMMA3, GEMMA3, eoi_token=11),
}
TABLES = {
  'gemma2': 'model.embed_tokens.weight',
  't5gemma': 'model.decoder.embed_tokens.weight',
  't5gemma2': 'model.encoder.embed_tokens.weight',
}
HEADS = {
  'gemma2': 'lm_head.weight',
  't5gemma': 'lm_head.out_proj.weight',
  't5gemma2': 'lm_head.out_proj.weight',
}
NORM = 'model.norm.weight'


@pytest.fixture
def make(tmp_path):
  """A function: a kind of model and a change of its tensors -> its folder."""

  def make(name, change=None):
    path = tmp_path / name
    params = traverse_util.flatten_dict(
      parameters.init(MODELS[name], jax.random.key(0)), sep='/'
    )
    export.write(path, MODELS[name], params)
    if change:
      file = path / 'model.safetensors'
      tensors = dict(safetensors.load_file(file))
      change(tensors)
      safetensors.save_file(tensors, file, {'format': 'pt'})
    return path

  return make


def read(path):
  opened = folder.ModelFolder.open(path)
  return {array.path: np.asarray(array) for array in opened.arrays()}


def assert_same(one, other):
  assert one.keys() == other.keys()
  for path, array in one.items():
    np.testing.assert_array_equal(array, other[path])


@pytest.mark.parametrize(
  'name',
  [
    'gemma2',
    pytest.param('t5gemma', marks=pytest.mark.long),
    pytest.param('t5gemma2', marks=pytest.mark.long),
  ],
)
def test_a_tied_head_may_be_stored_too_or_alone(name, make, tmp_path):
  expected = read(make(name))
  table, head = TABLES[name], HEADS[name]
  (tmp_path / name).rename(tmp_path / 'plain')

  path = make(name, lambda t: t.update({head: t[table].copy()}))
  assert_same(read(path), expected)
  assert folder.ModelFolder.open(path).unused == {head: f'a copy of {table}'}
  path.rename(tmp_path / 'both')

  path = make(name, lambda t: t.update({head: t.pop(table)}))
  assert_same(read(path), expected)
  assert not folder.ModelFolder.open(path).unused


@pytest.mark.parametrize('name', MODELS)
def test_a_tied_head_that_differs_is_refused(name, make):
  table, head = TABLES[name], HEADS[name]

  def change(tensors):
    tensors[head] = tensors[table].copy()
    tensors[head][-1, -1] += 1

  words = f"'{head}' differs from '{table}' in .*model.safetensors"
  with pytest.raises(errors.UserError, match=words):
    read(make(name, change))


def test_two_spellings_of_a_tensor_have_to_be_equal(make, tmp_path):
  other = f'language_model.{NORM}'
  path = make('gemma2', lambda t: t.update({other: t[NORM].copy()}))
  copies = (f'a copy of {NORM}', f'a copy of {other}')
  (reason,) = folder.ModelFolder.open(path).unused.values()
  assert reason in copies
  read(path)
  path.rename(tmp_path / 'equal')
  path = make('gemma2', lambda t: t.update({other: t[NORM] + 1}))
  with pytest.raises(errors.UserError, match='they are the same weight'):
    read(path)
  (tmp_path / 'gemma2').rename(tmp_path / 'differ')
  path = make('gemma2', lambda t: t.update({other: np.zeros(3, np.float32)}))
  with pytest.raises(errors.UserError, match=rf'{other} in .* shape \[3\]'):
    folder.ModelFolder.open(path)


def in_memory(tensors):
  """A T5Gemma 2's names as its class has them, without copies."""
  start = 'model.encoder.'
  for name in [name for name in tensors if name.startswith(start)]:
    rest = name.removeprefix(start)
    tensors[f'{start}text_model.{rest}'] = tensors.pop(name)


def with_all_copies(tensors):
  """The same as a whole state_dict has it."""
  in_memory(tensors)
  start = 'model.encoder.text_model.embed_tokens.'
  for name in ('weight', 'eoi_embedding'):
    tensors[f'model.decoder.embed_tokens.{name}'] = tensors[start + name].copy()
  tensors[HEADS['t5gemma2']] = tensors[f'{start}weight'].copy()


@pytest.mark.parametrize('change', [in_memory, with_all_copies])
def test_t5gemma2_in_the_names_of_its_class(change, make, tmp_path):
  expected = read(make('t5gemma2'))
  (tmp_path / 't5gemma2').rename(tmp_path / 'saved')
  path = make('t5gemma2', change)
  assert_same(read(path), expected)


def test_a_vector_of_t5gemma2_that_differs_is_refused(make):
  def change(tensors):
    with_all_copies(tensors)
    tensors['model.decoder.embed_tokens.eoi_embedding'] += 1

  with pytest.raises(errors.UserError, match='eoi_embedding. differs from'):
    read(make('t5gemma2', change))


def test_integers_are_no_weights(make):
  path = make('gemma2', lambda t: t.update({NORM: t[NORM].astype(np.int8)}))
  with pytest.raises(errors.UserError, match=f'{NORM} in .* has dtype int8'):
    folder.ModelFolder.open(path)


@pytest.mark.parametrize(
  'first, other, both',
  [
    (np.float16, ml_dtypes.bfloat16, np.float32),
    (ml_dtypes.bfloat16, np.float32, np.float32),
  ],
)
def test_layers_of_two_dtypes_come_in_one_that_holds_both(
  first, other, both, make
):
  expected = {}

  def change(tensors):
    for name in tensors:
      kind = other if '.layers.1.' in name else first
      tensors[name] = tensors[name].astype(kind)
    expected.update(tensors)

  path = make('gemma2', change)
  opened = folder.ModelFolder.open(path)
  arrays = {array.path: array for array in opened.arrays()}
  made = path.with_name('again')
  export.write(made, opened.config, arrays)
  for name, tensor in safetensors.load_file(made / 'model.safetensors').items():
    np.testing.assert_array_equal(
      tensor.astype(np.float32), expected[name].astype(np.float32)
    )
  for path, array in arrays.items():
    whole = np.asarray(array)
    assert whole.dtype == array.dtype
    if '/blocks/' in path:
      assert array.dtype == both, path
      assert array[0].dtype == both
  raw = json.loads((made / 'config.json').read_text())
  assert raw['dtype'] == 'float32'
