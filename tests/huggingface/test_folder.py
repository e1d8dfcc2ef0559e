"""Tensors stored twice, elsewhere, in several dtypes, or as integers.

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
  't5gemma2': model_config.t5gemma2(GEMMA3, GEMMA3, eoi_token=11),
}
TABLE = {
  'gemma2': 'model.embed_tokens.weight',
  't5gemma2': 'model.encoder.embed_tokens.weight',
}
HEAD = {'gemma2': 'lm_head.weight', 't5gemma2': 'lm_head.out_proj.weight'}
NORM = 'model.norm.weight'


@pytest.fixture(scope='module')
def exported(tmp_path_factory):
  """Kind of a model -> its tensors and its folder."""
  made = {}
  for name, model in MODELS.items():
    path = tmp_path_factory.mktemp('exported') / name
    params = parameters.init(model, jax.random.key(0))
    export.write(path, model, traverse_util.flatten_dict(params, sep='/'))
    made[name] = (safetensors.load_file(path / 'model.safetensors'), path)
  return made


@pytest.fixture
def make(exported, tmp_path):
  """A function: kind of a model, change of its tensors -> a new folder."""

  def make(name, change):
    tensors, path = exported[name]
    tensors = dict(tensors)
    change(tensors)
    (tmp_path / 'config.json').write_bytes((path / 'config.json').read_bytes())
    safetensors.save_file(
      tensors, tmp_path / 'model.safetensors', {'format': 'pt'}
    )
    return tmp_path

  return make


def read(path):
  opened = folder.ModelFolder(path)
  return {path: np.asarray(array) for path, array in opened.arrays().items()}


def twice(name):
  """Stores a tied head too."""
  return lambda t: t.update({HEAD[name]: t[TABLE[name]].copy()})


def alone(name):
  """Stores a tied head only."""
  return lambda t: t.update({HEAD[name]: t.pop(TABLE[name])})


def in_memory(tensors):
  """Gives a T5Gemma 2 the names of a state_dict, with its copies."""
  start = 'model.encoder.'
  for name in [name for name in tensors if name.startswith(start)]:
    rest = name.removeprefix(start)
    tensors[f'{start}text_model.{rest}'] = tensors.pop(name)
  start = 'model.encoder.text_model.embed_tokens.'
  for name in ('weight', 'eoi_embedding'):
    tensors[f'model.decoder.embed_tokens.{name}'] = tensors[start + name].copy()


@pytest.mark.parametrize(
  'name, change, copies',
  [
    ('gemma2', twice('gemma2'), 1),
    ('gemma2', alone('gemma2'), 0),
    ('t5gemma2', twice('t5gemma2'), 1),
    ('t5gemma2', in_memory, 2),
    (
      'gemma2',
      lambda t: t.update({f'language_model.{NORM}': t[NORM].copy()}),
      1,
    ),
  ],
)
def test_tensors_under_other_names(name, change, copies, make, exported):
  path = make(name, change)
  expected, found = read(exported[name][1]), read(path)
  assert expected.keys() == found.keys()
  for key, array in expected.items():
    np.testing.assert_array_equal(array, found[key])
  unused = folder.ModelFolder(path).unused
  assert len(unused) == copies
  assert all(reason.startswith('a copy of') for reason in unused.values())


def with_other_copy(name, key):
  def change(tensors):
    (in_memory if 'eoi' in key else twice(name))(tensors)
    tensors[key] = tensors[key].copy()
    tensors[key][-1] += 1

  return change


@pytest.mark.parametrize(
  'name, change, message',
  [
    (
      'gemma2',
      with_other_copy('gemma2', HEAD['gemma2']),
      f"'{HEAD['gemma2']}' differs from '{TABLE['gemma2']}' in .*safetensors",
    ),
    (
      't5gemma2',
      with_other_copy('t5gemma2', 'model.decoder.embed_tokens.eoi_embedding'),
      'eoi_embedding. differs from',
    ),
    (
      'gemma2',
      lambda t: t.update({f'language_model.{NORM}': t[NORM] + 1}),
      'they are the same weight',
    ),
    (
      'gemma2',
      lambda t: t.update({f'language_model.{NORM}': t[NORM][:3]}),
      rf'{NORM} in .* has shape \[3\]',
    ),
    (
      'gemma2',
      lambda t: t.update({NORM: t[NORM].astype(np.int8)}),
      f'{NORM} in .* has dtype int8',
    ),
  ],
)
def test_tensors_that_are_refused(name, change, message, make):
  with pytest.raises(errors.UserError, match=message):
    read(make(name, change))


@pytest.mark.parametrize('other', [np.float16, np.float32])
def test_layers_of_two_dtypes_come_in_one_that_holds_both(
  other, make, tmp_path
):
  expected = {}

  def change(tensors):
    for name in tensors:
      kind = other if '.layers.1.' in name else ml_dtypes.bfloat16
      tensors[name] = tensors[name].astype(kind)
    expected.update(tensors)

  opened = folder.ModelFolder(make('gemma2', change))
  arrays = opened.arrays()
  again = tmp_path / 'again'
  export.write(again, opened.config, arrays)
  for name, tensor in safetensors.load_file(
    again / 'model.safetensors'
  ).items():
    np.testing.assert_array_equal(
      tensor.astype(np.float32), expected[name].astype(np.float32)
    )
  for path, array in arrays.items():
    assert np.asarray(array).dtype == array.dtype
    if '/blocks/' in path:
      assert array.dtype == np.float32 == array[0].dtype
  raw = json.loads((again / 'config.json').read_text())
  assert raw['dtype'] == 'float32'
