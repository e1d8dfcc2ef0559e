"""Tensors stored twice, elsewhere, in several dtypes, or as integers.

Folders are made by our own exporter and then changed.
"""

import dataclasses
import json
import shutil

from flax import traverse_util
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import numpy as safetensors

from encdec_adapt.base import errors
from encdec_adapt.huggingface import export, folder
from encdec_adapt.models import model_config, parameters
from tests import toy_models

GEMMA2 = toy_models.stack(pattern=('local',))
GEMMA3 = dataclasses.replace(
  GEMMA2,
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
TABLE = 'model.embed_tokens.weight'
HEAD = 'lm_head.weight'
NORM = 'model.norm.weight'


@pytest.fixture(scope='module')
def exported(tmp_path_factory):
  """Kind of a model -> its folder."""
  made = {}
  for name, model in MODELS.items():
    path = tmp_path_factory.mktemp('exported') / name
    params = parameters.init(model, jax.random.key(0))
    export.write(path, model, traverse_util.flatten_dict(params, sep='/'))
    made[name] = path
  return made


@pytest.fixture
def make(exported, tmp_path):
  """A function: kind of a model, change of its tensors -> a new folder."""

  def make(name, change):
    shutil.copytree(exported[name], tmp_path, dirs_exist_ok=True)
    toy_models.change(tmp_path, change)
    return tmp_path

  return make


def read(path):
  opened = folder.ModelFolder(path)
  return {path: np.asarray(array) for path, array in opened.arrays().items()}


def in_memory(tensors):
  """Gives a T5Gemma 2 the names of a state_dict, with its copies."""
  start, table = 'model.encoder.', 'embed_tokens.'
  names = {
    name: f'{start}text_model.{name.removeprefix(start)}'
    if name.startswith(start)
    else name
    for name in tensors
  }
  renamed = {names[name]: tensors[name] for name in tensors}
  for name in (f'{table}weight', f'{table}eoi_embedding'):
    renamed[f'model.decoder.{name}'] = tensors[start + name].copy()
  return renamed


@pytest.mark.parametrize(
  'name, change, copies',
  [
    # A tied head beside the table, or in its place.
    ('gemma2', lambda t: {**t, HEAD: t[TABLE].copy()}, 1),
    ('gemma2', lambda t: {HEAD if k == TABLE else k: t[k] for k in t}, 0),
    ('gemma2', lambda t: {**t, f'language_model.{NORM}': t[NORM].copy()}, 1),
    ('t5gemma2', in_memory, 2),
  ],
)
def test_tensors_under_other_names(name, change, copies, make, exported):
  path = make(name, change)
  expected, found = read(exported[name]), read(path)
  assert expected.keys() == found.keys()
  for key, array in expected.items():
    np.testing.assert_array_equal(array, found[key])
  unused = folder.ModelFolder(path).unused
  assert len(unused) == copies
  assert all(reason.startswith('a copy of') for reason in unused.values())


@pytest.mark.parametrize(
  'change, message',
  [
    (
      lambda t: {HEAD: t[TABLE] + 1},
      f"'{HEAD}' differs from '{TABLE}' in .*safetensors",
    ),
    (lambda t: {f'language_model.{NORM}': t[NORM] + 1}, 'the same weight'),
    (
      lambda t: {f'language_model.{NORM}': t[NORM][:3]},
      rf'{NORM} in .* has shape \[3\]',
    ),
    (lambda t: {NORM: t[NORM].astype(np.int8)}, f'{NORM} in .* has dtype int8'),
  ],
)
def test_tensors_that_are_refused(change, message, make):
  with pytest.raises(errors.UserError, match=message):
    read(make('gemma2', lambda tensors: {**tensors, **change(tensors)}))


@pytest.mark.parametrize(
  'other, both',
  [
    (np.float16, np.float32),
    (np.float32, np.float32),
    (np.float64, np.float64),
  ],
)
def test_layers_of_two_dtypes_are_read_in_one_that_holds_both(
  other, both, make, tmp_path
):
  expected = {}

  def change(tensors):
    """Gives one layer another dtype than the rest."""
    for name in tensors:
      kind = other if '.layers.1.' in name else ml_dtypes.bfloat16
      expected[name] = tensors[name].astype(kind)
    return expected

  opened = folder.ModelFolder(make('gemma2', change))
  arrays, again = opened.arrays(), tmp_path / 'again'
  export.write(again, opened.config, arrays)
  found = safetensors.load_file(again / 'model.safetensors')
  for name, tensor in found.items():
    np.testing.assert_array_equal(
      tensor.astype(both), expected[name].astype(both)
    )
  for path, array in arrays.items():
    assert np.asarray(array).dtype == array.dtype
    if '/blocks/' in path:
      assert array.dtype == both == array[0].dtype
  raw = json.loads((again / 'config.json').read_text())
  assert raw['dtype'] == both.__name__
