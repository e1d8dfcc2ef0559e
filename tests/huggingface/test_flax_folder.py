"""The authors' Flax layout, from arrays that are made by hand.

`tests/parity/test_flax_authors.py` compares with what their own code saves.
"""

import dataclasses
import json
import shutil

from flax import traverse_util
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from encdec_adapt.base import errors
from encdec_adapt.huggingface import config_json, flax_folder
from encdec_adapt.models import layer_leaves, model_config, parameters, presets
from encdec_adapt.stored import model_on_disk
from tests import tiny, toy_models

SHAPE = dict(layers=3, width=8, mlp_width=12, head_dim=6, vocab_size=20)
DECODER = toy_models.stack(**SHAPE, query_scale=6.0)
ENCODER = dataclasses.replace(DECODER, width=4, kv_heads=4)
PAIR = model_config.encoder_decoder(ENCODER, DECODER)
ROWS = 24  # Of their tables.


def random_leaves(model):
  """Our leaves by name, tables without padding rows."""
  draws = np.random.default_rng(0)
  return {
    name: draws.normal(size=leaf.shape).astype(np.float32)
    for name, leaf in layer_leaves.leaves_of(model).items()
  }


def attention_arrays(get, start):
  query, key, value = (
    get(name).swapaxes(0, 1) for name in ('query', 'key', 'value')
  )
  arrays = {f'{start}/attn_vec_einsum/w': get('output')}
  if query.shape == key.shape and start.endswith('/attn'):
    return arrays | {f'{start}/qkv_einsum/w': np.stack([query, key, value])}
  return arrays | {
    f'{start}/q_einsum/w': query,
    f'{start}/kv_einsum/w': np.stack([key, value]),
  }


def their_arrays(model, leaves, transposed=False):
  """The arrays of the authors, by the names of their modules."""
  arrays = {}
  for name, stack in model.stacks.items():
    start = f'{name}/' if len(model.stacks) > 1 else ''
    table = leaves[f'{name}/embedder/table']
    further = np.full((ROWS - len(table), stack.width), 7.0, np.float32)
    arrays[f'{start}embedder/input_embedding'] = np.vstack([table, further])
    arrays[f'{start}final_norm/scale'] = leaves[f'{name}/final_norm/scale']
    for layer in range(stack.layers):
      ours, theirs = f'{name}/layers/{layer}/', f'{start}layer_{layer}'
      kinds = {'attention': 'attn', 'cross_attention': 'cross_attn'}
      for kind, their_kind in kinds.items():
        if f'{ours}{kind}/query' in leaves:
          arrays |= attention_arrays(
            lambda part, at=f'{ours}{kind}/': leaves[at + part],
            f'{theirs}/{their_kind}',
          )
      gate, up = (leaves[f'{ours}mlp/{part}'] for part in ('gate', 'up'))
      both = np.stack([gate.T, up.T] if transposed else [gate, up])
      arrays[f'{theirs}/mlp/gating_einsum'] = both
      arrays[f'{theirs}/mlp/linear'] = leaves[f'{ours}mlp/down']
      norms = {
        'pre_cross_norm': 'pre_cross_attention_norm',
        'post_cross_norm': 'post_cross_attention_norm',
        'pre_mlp_norm': 'pre_ffw_norm',
        'post_mlp_norm': 'post_ffw_norm',
      }
      for leaf in leaves:
        if leaf.startswith(ours) and leaf.endswith('_norm/scale'):
          norm = leaf.split('/')[-2]
          arrays[f'{theirs}/{norms.get(norm, norm)}/scale'] = leaves[leaf]
  return arrays


def open_model(arrays, model):
  info = {name: (array.shape, array.dtype) for name, array in arrays.items()}
  return flax_folder.FlaxModel(
    info, lambda names: {name: arrays[name] for name in names}, model, 'there'
  )


@pytest.mark.parametrize('transposed', [False, True])
@pytest.mark.parametrize(
  'model', [model_config.DecoderOnlyConfig(DECODER), PAIR], ids=['one', 'pair']
)
def test_every_parameter_is_found(model, transposed):
  leaves = random_leaves(model)
  opened = open_model(their_arrays(model, leaves, transposed), model)
  arrays = {path: np.asarray(array) for path, array in opened.arrays().items()}
  assert set(arrays) == set(parameters.parameter_table(model))
  values = toy_models.leaves(model, arrays)
  jax.tree.map(np.testing.assert_array_equal, values, leaves)
  assert len(opened.unused) == len(model.stacks)
  assert all('rows 20 to 23' in name for name in opened.unused)


@pytest.mark.parametrize(
  'model', [presets.decoder_only('27b'), presets.t5gemma('9b_2b')]
)
def test_released_models_are_found_by_their_shapes(model):
  info = {}
  for name, stack in model.stacks.items():
    start = f'{name}/' if len(model.stacks) > 1 else ''
    for layer in range(stack.layers):
      shape = (stack.mlp_width, stack.width)
      info[f'{start}layer_{layer}/mlp/linear'] = (shape, np.float32)
  assert flax_folder.released_model(info, 'there') == model


@pytest.mark.parametrize(
  'name, array, words',
  [
    ('layer_1/mlp/linear', None, "no array 'layer_1/mlp/linear'"),
    ('layer_1/stray', np.zeros(2), 'layer_1/stray is not an array of this'),
    ('layer_1/mlp/linear', np.zeros((12, 9)), r'has shape \[12, 9\]'),
    ('embedder/input_embedding', np.zeros((19, 8)), r'has shape \[19, 8\]'),
    ('final_norm/scale', np.full(8, np.nan), 'has the value nan'),
  ],
)
def test_arrays_of_another_model_are_refused(name, array, words):
  model = model_config.DecoderOnlyConfig(DECODER)
  arrays = their_arrays(model, random_leaves(model)) | {name: array}
  arrays = {key: value for key, value in arrays.items() if value is not None}
  with pytest.raises(errors.UserError, match=words):
    for array in open_model(arrays, model).arrays().values():
      np.asarray(array)


def save(folder, arrays):
  """Saves the arrays as a tree in the folder's `flax`, with Orbax."""
  tree = traverse_util.unflatten_dict(arrays, sep='/')
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder / 'flax', jax.tree.map(np.asarray, tree))


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """The leaves of a pair, and the folder of its arrays and config.json."""
  folder, leaves = tmp_path_factory.mktemp('saved'), random_leaves(PAIR)
  save(folder, their_arrays(PAIR, leaves))
  raw, _ = config_json.raw_from_model(PAIR)
  (folder / 'config.json').write_text(json.dumps(raw))
  return leaves, folder


def test_the_import_command(saved, tmp_path, capsys):
  leaves, folder = saved
  flags = [f'--source={folder}/flax', f'--output={tmp_path}/run']
  flags += [f'--model={folder}/config.json', '--vocab_multiple=16']
  assert tiny.convert('import', *flags) == 0
  assert 'rows 20 to 23' in capsys.readouterr().out
  opened = model_on_disk.open_model(tmp_path / 'run')
  assert opened.model == model_config.with_vocab_multiple(PAIR, 16)
  table = np.asarray(opened.arrays()['encoder/embedder/table'])
  np.testing.assert_array_equal(table[:20], leaves['encoder/embedder/table'])
  assert table.shape == (32, 4) and not table[20:].any()
  with pytest.raises(errors.UserError, match='convert import'):
    model_on_disk.open_model(folder / 'flax')


@pytest.mark.parametrize(
  'model, words',
  [
    (None, 'no released Gemma 2 or T5Gemma has'),
    ('nowhere.json', 'nowhere.json cannot be read'),
    ('damaged', 'incomplete or damaged'),
  ],
)
def test_a_refused_import_leaves_nothing_behind(model, words, saved, tmp_path):
  source = saved[1] / 'flax'
  if model == 'damaged':
    model = saved[1] / 'config.json'
    source = shutil.copytree(source, tmp_path / 'flax')
    for file in (source / 'd').iterdir():
      file.write_bytes(file.read_bytes()[:100])
  flags = [f'--source={source}', f'--output={tmp_path}/run']
  with pytest.raises(errors.UserError, match=words):
    tiny.convert('import', *flags, *([f'--model={model}'] if model else []))
  assert not (tmp_path / 'run').exists()
