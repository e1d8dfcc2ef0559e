"""Checkpoints of t5x, from arrays that are made by hand in its two layouts."""

import json

from flax import serialization, traverse_util
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

import encdec_adapt
from encdec_adapt.base import errors
from encdec_adapt.conversion import model_on_disk
from encdec_adapt.huggingface import config_json
from encdec_adapt.models import model_config
from tests import tiny, toy_models
from tests.tokenizers import t5_files


def pair(*, tied, **changes):
  changes = toy_models.T5 | dict(layers=3, window=4096) | changes
  encoder = toy_models.stack(**changes)
  changes |= dict(layers=2, tied_head=tied, scaled_head=tied)
  decoder = toy_models.stack(**changes)
  return model_config.encoder_decoder(encoder, decoder, shared_table=True)


T5 = pair(tied=True)
UMT5 = pair(tied=False, mlp_gated=True, positions='relative_each:8,10')
BIAS = 'relpos_bias/rel_embedding'
HEAD, NORM = 'decoder/logits_dense/kernel', 'encoder/encoder_norm/scale'
# Our name in a decoder's layer -> theirs; {} stands for a projection.
NAMES = {
  'pre_attention_norm/scale': 'pre_self_attention_layer_norm/scale',
  'attention/{}': 'self_attention/{}/kernel',
  'attention/relative_bias': BIAS,
  'pre_cross_norm/scale': 'pre_cross_attention_layer_norm/scale',
  'cross_attention/{}': 'encoder_decoder_attention/{}/kernel',
  'pre_mlp_norm/scale': 'pre_mlp_layer_norm/scale',
  'mlp/gate': 'mlp/wi_0/kernel',
  'mlp/up': 'mlp/wi_1/kernel',
  'mlp/down': 'mlp/wo/kernel',
}


def layer_arrays(leaves, side, layer):
  """Our arrays of a layer by their names."""
  arrays = {}
  for ours, name in NAMES.items():
    name = name if side == 'decoder' else name.replace('self_', '')
    for kernel in ('query', 'key', 'value', 'output'):
      leaf = f'{side}/layers/{layer}/{ours.format(kernel)}'
      if leaf in leaves:
        arrays[name.format(kernel).replace('output', 'out')] = leaves[leaf]
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
    bias = leaves.get(f'{side}/relative_bias')
    layers = [layer_arrays(leaves, side, i) for i in range(stack.layers)]
    if scalable:
      for name in {BIAS, *layers[0]}:
        stacked = np.stack([layer.get(name, bias) for layer in layers], axis=1)
        arrays[f'{side}/{side}/{name}'] = stacked
      continue
    if bias is not None:
      arrays[f'{side}/{BIAS}'] = bias
    for i, layer in enumerate(layers):
      for name, array in layer.items():
        shape = (32, 16) if 'out/' in name else (len(array), -1)[: array.ndim]
        arrays[f'{side}/layers_{i}/{name}'] = array.reshape(shape)
  return arrays


def reference(path, storage):
  """What stands for an array in a tree, as versions of t5x write it."""
  if storage == 'string':
    return f'PLACEHOLDER://{path}'
  if storage == 'uint16':
    return {'driver': 'zarr', 'path': path, 'kvstore': {'driver': 'gfile'}}
  bucket = {'driver': 'gcs', 'bucket': 't5x-dummy-bucket', 'path': path}
  return {'driver': 'zarr', 'metadata': {'chunks': [1]}, 'kvstore': bucket}


def save(folder, arrays, storage):
  """Saves kernels by TensorStore and other arrays in msgpack, or by Orbax."""
  leaves = {f'optimizer/target/{name}': x for name, x in arrays.items()}
  leaves['optimizer/state/step'] = np.asarray(7)
  leaves['version'] = np.asarray(2 if storage == 'uint16' else 3)
  folder = folder if storage in ('uint16', 'bucket') else folder / 'state'
  for name, array in arrays.items() if storage != 'orbax' else ():
    if name.endswith('kernel'):
      array = array.view(np.uint16) if storage == 'uint16' else array
      kvstore = {'driver': 'file', 'path': f'{folder / name}/'}
      spec = {'driver': 'zarr', 'kvstore': kvstore, 'dtype': array.dtype.name}
      ts.open(spec, create=True, shape=array.shape).result()[...] = array
      leaves[f'optimizer/target/{name}'] = reference(name, storage)
  tree = traverse_util.unflatten_dict(leaves, sep='/')
  if storage == 'orbax':
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(folder, tree)
  else:
    (folder / 'checkpoint').write_bytes(serialization.to_bytes(tree))


def run_import(folder, raw):
  """Runs the command with a config.json."""
  file = folder.with_suffix('.json')
  file.write_text(json.dumps(raw))
  flags = f'--source={folder}', f'--model={file}', '--vocab_multiple=16'
  return tiny.convert('import', f'--output={folder}_run', *flags)


def random_leaves(model):
  params = traverse_util.flatten_dict(toy_models.params(model), sep='/')
  return toy_models.leaves(model, params)


@pytest.mark.parametrize('storage', ['uint16', 'bucket', 'string', 'orbax'])
@pytest.mark.parametrize('scalable', [False, True])
@pytest.mark.parametrize('model', [T5, UMT5], ids=['t5', 'umt5'])
def test_every_parameter_moves(model, scalable, storage, tmp_path, capsys):
  dtype = np.float32 if storage == 'bucket' else ml_dtypes.bfloat16
  leaves = {k: v.astype(dtype) for k, v in random_leaves(model).items()}
  folder = tmp_path / 'checkpoint_7'
  save(folder, their_arrays(model, leaves, scalable=scalable), storage)
  raw = config_json.native_from_model(model)
  if storage == 'bucket':
    # It says neither which positions nor which head the arrays have.
    raw, _ = config_json.raw_from_model(T5)
    raw['feed_forward_proj'] = 'relu' if model is T5 else 'gated-relu'
  assert run_import(folder, raw) == 0
  assert '(optimizer state)' in capsys.readouterr().out
  opened = model_on_disk.open_model(f'{folder}_run')
  assert not model_config.differences(opened.model, model)
  for name, array in toy_models.leaves(opened.model, opened.arrays()).items():
    leaf, rows = leaves[name], len(leaves[name])
    assert array.dtype == dtype and not array[rows:].any()
    np.testing.assert_array_equal(array[:rows], leaf)
  if storage == 'bucket':
    models = encdec_adapt.load(f'{folder}_run'), toy_models.load(model)
    tokens = np.random.default_rng(0).integers(3, 60, (2, 2, 6))
    logits = [np.asarray(x.logits(*tokens))[..., :60] for x in models]
    np.testing.assert_allclose(*logits, rtol=0, atol=1e-5)


def test_files_beside_the_config_are_carried(tmp_path):
  folder, files = tmp_path / 'checkpoint', tmp_path / 'mt5'
  model = pair(tied=False, vocab_size=512)
  arrays = their_arrays(model, random_leaves(model), scalable=False)
  save(folder, arrays, 'bucket')
  tokens = t5_files.train(files / 'spiece.model').read_bytes()
  raw = config_json.raw_from_model(model)[0] | {'model_type': 'mt5'}
  (files / 'config.json').write_text(json.dumps(raw))
  run, out = f'{folder}_run', tmp_path / 'out'
  flags = f'--source={folder}', f'--model={files / "config.json"}'
  assert tiny.convert('import', f'--output={run}', *flags) == 0
  assert model_on_disk.open_model(run).vocabularies
  assert tiny.convert('export', f'--checkpoint={run}', f'--output={out}') == 0
  raw = json.loads((out / 'config.json').read_text())
  assert (raw['model_type'], raw['decoder_start_token_id']) == ('mt5', 0)
  assert (out / 'spiece.model').read_bytes() == tokens


RAW, _ = config_json.raw_from_model(UMT5)


@pytest.mark.parametrize(
  'config, arrays, words',
  [
    ({'relative_attention_num_buckets': 16}, {}, r'\[4, 3, 8\],.* \[4, 16\]'),
    ({'num_layers': 4}, {}, 'has 3 layers on axis 1, and the encoder .* 4'),
    ({'feed_forward_proj': 'relu'}, {}, 'wi_0/kernel is not an array of this'),
    ({'architectures': ['UMT5EncoderModel']}, {}, 'no encoder-decoder with'),
    ({}, {HEAD: np.ones((16, 70))}, r'shape \[16, 70\],.* \[60, 16\]'),
    ({}, {NORM: None}, f"no array '{NORM}'"),
  ],
)
def test_other_models(config, arrays, words, tmp_path):
  arrays = their_arrays(UMT5, random_leaves(UMT5), scalable=True) | arrays
  arrays = {name: x for name, x in arrays.items() if x is not None}
  save(tmp_path / 'checkpoint', arrays, 'bucket')
  with pytest.raises(errors.UserError, match=words):
    run_import(tmp_path / 'checkpoint', RAW | config)


def test_folders_that_cannot_be_read(tmp_path):
  folder = tmp_path / 'checkpoint'
  arrays = their_arrays(UMT5, random_leaves(UMT5), scalable=False)
  save(folder, arrays, 'bucket')
  with pytest.raises(errors.UserError, match='config.json,.* --model=FILE'):
    tiny.convert('import', f'--source={folder}', f'--output={folder}_run')
  other = tmp_path / 'mesh_tensorflow'
  other.mkdir()
  (other / 'checkpoint').write_text('model_checkpoint_path: "model.ckpt-7"\n')
  with pytest.raises(errors.UserError, match='Mesh TensorFlow, .* not support'):
    run_import(other, RAW)
  (folder / HEAD).rename(folder / 'lost')
  with pytest.raises(errors.UserError, match=f'{HEAD} .*incomplete or damaged'):
    run_import(folder, RAW)
