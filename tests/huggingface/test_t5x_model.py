"""Checkpoints of t5x, from arrays that are made by hand in its two layouts."""

import dataclasses
import json
import shutil

from flax import serialization, traverse_util
from jax import numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

import encdec_adapt
from encdec_adapt.base import errors
from encdec_adapt.conversion import model_in_memory, model_on_disk
from encdec_adapt.huggingface import config_json
from encdec_adapt.models import build, model_config, parameters
from tests import tiny, toy_models


def pair(*, tied, **changes):
  stack = toy_models.stack(
    **toy_models.T5 | dict(layers=3, window=4096) | changes
  )
  decoder = dict(layers=2, tied_head=tied, scaled_head=tied)
  decoder = dataclasses.replace(stack, **decoder)
  return model_config.encoder_decoder(stack, decoder, shared_table=True)


T5 = pair(tied=True)
GATED = dict(mlp_gated=True, activation='gelu_tanh')
UMT5 = pair(tied=False, positions='relative_each:8,10', **GATED)
BIAS = 'relpos_bias/rel_embedding'
HEAD = 'decoder/logits_dense/kernel'
# Our name in a layer -> theirs; {} stands for the name of a projection.
ENCODER = {
  'pre_attention_norm/scale': 'pre_attention_layer_norm/scale',
  'attention/{}': 'attention/{}/kernel',
  'attention/relative_bias': BIAS,
  'pre_mlp_norm/scale': 'pre_mlp_layer_norm/scale',
  'mlp/gate': 'mlp/wi_0/kernel',
  'mlp/up': 'mlp/wi_1/kernel',
  'mlp/down': 'mlp/wo/kernel',
}
DECODER = ENCODER | {
  'pre_attention_norm/scale': 'pre_self_attention_layer_norm/scale',
  'attention/{}': 'self_attention/{}/kernel',
  'pre_cross_norm/scale': 'pre_cross_attention_layer_norm/scale',
  'cross_attention/{}': 'encoder_decoder_attention/{}/kernel',
}


def layer_arrays(leaves, side, layer):
  """Our arrays of a layer by their names."""
  arrays, start = {}, f'{side}/layers/{layer}/'
  for ours, theirs in (ENCODER if side == 'encoder' else DECODER).items():
    for kernel in ('query', 'key', 'value', 'output'):
      name = theirs.format(kernel).replace('output', 'out')
      if (leaf := start + ours.format(kernel)) in leaves:
        arrays[name] = leaves[leaf]
  if 'mlp/wi_0/kernel' not in arrays:
    arrays['mlp/wi/kernel'] = arrays.pop('mlp/wi_1/kernel')
  return arrays


def their_arrays(model, leaves, *, scalable):
  """The arrays of t5x by their names."""
  arrays = {'token_embedder/embedding': leaves['decoder/embedder/table']}
  if 'decoder/head/table' in leaves:
    arrays[HEAD] = leaves['decoder/head/table'].T
  for side, stack in model.stacks.items():
    arrays[f'{side}/{side}_norm/scale'] = leaves[f'{side}/final_norm/scale']
    shared = leaves.get(f'{side}/relative_bias')
    layers = [layer_arrays(leaves, side, i) for i in range(stack.layers)]
    if scalable:
      for name in {BIAS, *layers[0]}:
        stacked = [layer.get(name, shared) for layer in layers]
        arrays[f'{side}/{side}/{name}'] = np.stack(stacked, axis=1)
      continue
    if shared is not None:
      arrays[f'{side}/{BIAS}'] = shared
    for i, layer in enumerate(layers):
      for name, array in layer.items():
        if array.ndim == 3:  # A kernel [in, out].
          rows = 32 if name.endswith('out/kernel') else 16
          array = array.reshape(rows, -1)
        arrays[f'{side}/layers_{i}/{name}'] = array
  return arrays


def stored(driver, **fields):
  metadata = {'chunks': [1], 'compressor': None, 'shape': [1]}
  spec = {'driver': 'zarr', 'metadata': metadata}
  return lambda path: (
    spec
    | {
      key: {'driver': driver, 'path': path} | value
      if key == 'kvstore'
      else path
      for key, value in fields.items()
    }
  )


# Version, and how a tree refers to an array in a path of the folder.
TREES = {
  'uint16': (2, stored('gfile', kvstore={}, path=True)),
  'bucket': (3, stored('gcs', kvstore={'bucket': 't5x-dummy-bucket'})),
  'placeholders': (3, lambda path: f'PLACEHOLDER://{path}'),
}


def save_tree(folder, arrays, version, reference):
  """Saves kernels by TensorStore, and other arrays in msgpack."""
  folder.mkdir(parents=True)
  leaves = {f'state/v/{name}': np.zeros(3, np.float32) for name in arrays}
  for name, array in arrays.items():
    leaves[f'target/{name}'] = array
    if name.endswith('kernel'):
      path = name.replace('/', '.')
      array = array.view(np.uint16) if version == 2 else array
      kvstore = {'driver': 'file', 'path': f'{folder / path}/'}
      spec = {'driver': 'zarr', 'kvstore': kvstore, 'dtype': array.dtype.name}
      store = ts.open(spec, create=True, shape=array.shape).result()
      store.write(array).result()
      leaves[f'target/{name}'] = reference(path)
  tree = traverse_util.unflatten_dict(leaves, sep='/')
  tree = {'version': version, 'optimizer': tree}
  (folder / 'checkpoint').write_bytes(serialization.to_bytes(tree))


def save(folder, arrays, storage):
  if storage in TREES:
    within = folder / 'state' if storage == 'placeholders' else folder
    save_tree(within, arrays, *TREES[storage])
    return
  leaves = {f'target/{name}': array for name, array in arrays.items()}
  leaves['state/step'] = np.asarray(7)
  tree = {'optimizer': traverse_util.unflatten_dict(leaves, sep='/')}
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder / 'state', tree | {'version': np.asarray(3)})


def run_import(folder, raw, *flags):
  """Runs the command with a config.json."""
  file = folder.with_suffix('.json')
  file.write_text(json.dumps(raw))
  flags = [f'--model={file}', f'--output={folder}_run', *flags]
  return tiny.convert('import', f'--source={folder}', *flags)


def random_model(model):
  """A model of bfloat16 values, and its leaves."""
  flat = traverse_util.flatten_dict(toy_models.params(model), sep='/')
  flat = {path: array.astype(jnp.bfloat16) for path, array in flat.items()}
  params = {path: jnp.float32(array) for path, array in flat.items()}
  params = traverse_util.unflatten_dict(params, sep='/')
  loaded = model_in_memory.LoadedModel(build.build(model), params, None)
  return loaded, toy_models.leaves(model, flat)


@pytest.mark.parametrize('storage', [*TREES, 'orbax'])
@pytest.mark.parametrize('scalable', [False, True])
@pytest.mark.parametrize('model', [T5, UMT5], ids=['t5', 'umt5'])
def test_every_parameter_moves(model, scalable, storage, tmp_path, capsys):
  expected, leaves = random_model(model)
  folder = tmp_path / 'checkpoint_7'
  save(folder, their_arrays(model, leaves, scalable=scalable), storage)
  raw = config_json.native_from_model(model)
  if storage == 'bucket':
    # It says neither which positions nor which head the arrays have.
    raw, _ = config_json.raw_from_model(T5)
    raw['feed_forward_proj'] = 'relu' if model is T5 else 'gated-gelu'
  assert run_import(folder, raw, '--vocab_multiple=16') == 0
  assert '(optimizer state)' in capsys.readouterr().out
  opened = model_on_disk.open_model(f'{folder}_run')
  assert not model_config.differences(opened.model, model)
  arrays = {path: np.asarray(x) for path, x in opened.arrays().items()}
  assert set(arrays) == set(parameters.parameter_table(model))
  for name, array in toy_models.leaves(opened.model, arrays).items():
    leaf, rows = leaves[name], len(leaves[name])
    assert array.dtype == leaf.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(array[:rows], leaf)
    assert not array[rows:].any()
  if storage == 'bucket':
    tokens = np.random.default_rng(0).integers(3, 60, (2, 2, 6))
    loaded = encdec_adapt.load(f'{folder}_run')
    logits = [np.asarray(x.logits(*tokens)) for x in (loaded, expected)]
    np.testing.assert_allclose(*(x[..., :60] for x in logits), atol=1e-5)


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """A minimal checkpoint, its arrays and its config.json."""
  folder = tmp_path_factory.mktemp('saved') / 'checkpoint_7'
  arrays = their_arrays(UMT5, random_model(UMT5)[1], scalable=True)
  save(folder, arrays, 'bucket')
  return folder, arrays, config_json.raw_from_model(UMT5)[0]


@pytest.mark.parametrize(
  'changes, words',
  [
    ({'relative_attention_num_buckets': 16}, r'\[4, 3, 8\],.* \[4, 16\]'),
    ({'num_layers': 4}, 'has 3 layers on axis 1, and the encoder of --model 4'),
    ({'feed_forward_proj': 'relu'}, 'wi_0/kernel is not an array of this'),
    ({'model_type': 'longt5'}, "'longt5'"),
    ({'architectures': ['UMT5EncoderModel']}, 'describes no encoder-decoder'),
  ],
)
def test_configs_of_other_models(changes, words, saved):
  with pytest.raises(errors.UserError, match=words):
    run_import(saved[0], saved[2] | changes)


@pytest.mark.parametrize(
  'name, array, words',
  [
    (HEAD, np.ones((16, 70), np.float32), r'\[16, 70\],.* \[60, 16\]'),
    ('encoder/encoder_norm/scale', None, "'encoder/encoder_norm/scale'"),
    ('encoder/side_relpos_bias/x', np.ones(2), 'not an array of this model'),
  ],
)
def test_arrays_of_other_models(name, array, words, saved, tmp_path):
  arrays = {
    k: v for k, v in (saved[1] | {name: array}).items() if v is not None
  }
  save(tmp_path / 'checkpoint', arrays, 'bucket')
  with pytest.raises(errors.UserError, match=words):
    run_import(tmp_path / 'checkpoint', saved[2])


def test_folders_that_cannot_be_read(saved, tmp_path):
  source, _, raw = saved
  flags = f'--source={source}', f'--output={tmp_path}/run'
  with pytest.raises(errors.UserError, match='config.json,.* --model=FILE'):
    tiny.convert('import', *flags)
  folder = shutil.copytree(source, tmp_path / 'checkpoint')
  shutil.rmtree(folder / HEAD.replace('/', '.'))
  with pytest.raises(errors.UserError, match=f'{HEAD} .*incomplete or damaged'):
    run_import(folder, raw)
  file = folder / 'checkpoint'
  file.write_bytes(file.read_bytes()[:1000])
  with pytest.raises(errors.UserError, match=f'{file} .*incomplete or damaged'):
    run_import(folder, raw)
  assert not (tmp_path / 'run').exists()
