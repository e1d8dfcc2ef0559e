"""Adapters equal a dense W + alpha / r A B; quantised kernels; refusals."""

import dataclasses
import functools

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import encdec_adapt
from encdec_adapt.base import errors
from encdec_adapt.data.sources import text_sources
from encdec_adapt.models import adapters as adapters_lib
from encdec_adapt.models import (
  build,
  execution,
  model_config,
  parameters,
  presets,
)
from encdec_adapt.ops import kernel_forms, partition
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import rules as rules_lib
from encdec_adapt.training import state as state_lib
from encdec_adapt.training.losses import cross_entropy, loss
from tests import tiny, toy_models

STACK = toy_models.stack(
  layers=3, pattern=('local', 'global'), vocab_multiple=8
)
EXPERTS = dataclasses.replace(
  STACK,
  layers=2,
  pattern=('global',),
  dense_layers=1,
  experts=2,
  experts_per_token=1,
  expert_mlp_width=16,
  shared_expert_width=8,
)
T5 = toy_models.stack(**toy_models.T5)
PAIR = model_config.encoder_decoder(STACK, STACK)
PARTS, NORMS = ('attention', 'cross_attention', 'mlp'), ('norms',)
MODELS = {
  # A scanned repeat and a tail, biases, tables.
  'pair': model_config.encoder_decoder(
    dataclasses.replace(STACK, attention_bias='qkv'), STACK
  ),
  'merged': model_config.encoder_decoder(
    STACK, dataclasses.replace(STACK, cross_merged=True)
  ),
  'experts': model_config.DecoderOnlyConfig(
    dataclasses.replace(EXPERTS, role='causal')
  ),
  't5': model_config.encoder_decoder(T5, T5, shared_table=True),
  'gpt2': model_config.DecoderOnlyConfig(toy_models.stack(**toy_models.GPT2)),
  'bert': model_config.DecoderOnlyConfig(toy_models.stack(**toy_models.BERT)),
}
LOSS = cross_entropy.CrossEntropy(z_loss=1e-2, chunk=8)
ROWS, LENGTHS = 4, {'encoder': 16, 'decoder': 8}


def make(model=PAIR, **lora):
  return adapters_lib.make(model, adapters_lib.Options(**lora))


def make_batch(model):
  rng = np.random.default_rng(0)
  batch = {}
  for side in model.architecture.sides('encoder' in model.stacks).values():
    shape = ROWS, LENGTHS[side]
    segments = 1 + (np.arange(shape[1]) >= rng.integers(1, 6, (ROWS, 1)))
    batch[f'{side}_tokens'] = rng.integers(1, STACK.vocab_size, shape)
    batch[f'{side}_segments'] = segments
    batch[f'{side}_positions'] = np.broadcast_to(np.arange(shape[1]), shape)
  batch['targets'] = np.roll(batch[f'{side}_tokens'], -1, axis=1)
  batch = {name: value.astype(np.int32) for name, value in batch.items()}
  return batch | {'weights': rng.random(batch['targets'].shape, np.float32)}


def make_trees(adapters, seed=0):
  """The model's parameters, its frozen base, and random trained ones."""
  params = toy_models.params(adapters.model, seed=seed, scale=0.3)
  flat = traverse_util.flatten_dict(params, sep='/')
  base = {p: adapters.freeze(p, flat[p], 'float32') for p in adapters.frozen}
  rng = np.random.default_rng(seed + 1)
  trained = {
    path: jnp.asarray(0.2 * rng.normal(size=info.shape), jnp.float32)
    for path, info in adapters.table.items()
  }
  nest = functools.partial(traverse_util.unflatten_dict, sep='/')
  return nest(base), nest(trained)


def densify(adapters, base, trained):
  """Parameters with W + alpha / r A B, by einsum over matrices."""
  flat = traverse_util.flatten_dict(base, sep='/')
  new = traverse_util.flatten_dict(trained, sep='/')
  flat |= {path: new[path] for path in adapters.full}
  params = {}
  for path, info in parameters.parameter_table(adapters.model).items():
    value = flat[path]
    if isinstance(value, kernel_forms.Quantized):
      value = value.dequantize(jnp.float32)
    if path in adapters.kernels:
      rank = adapters.options.rank
      lead = info.shape[:1] if 'layers' in info.axes else ()
      a, b = new[f'{path}/lora_a'], new[f'{path}/lora_b']
      a, b = a.reshape(*lead, -1, rank), b.reshape(*lead, rank, -1)
      update = jnp.einsum('...ir,...rj->...ij', a, b).reshape(info.shape)
      value = value + adapters.options.alpha / rank * update
    params[path] = value
  return traverse_util.unflatten_dict(params, sep='/')


def run(model, merge, base, trained, batch):
  """Loss and gradients of what trains."""
  return jax.value_and_grad(
    lambda trained: loss.sums(LOSS, model, merge(base, trained), batch, {})[
      'loss'
    ]
  )(trained)


@pytest.mark.long
@pytest.mark.parametrize(
  'name, lora',
  [
    ('pair', dict(rank=2, alpha=3.0, targets=(*PARTS, 'embeddings'))),
    (
      'merged',
      dict(rank=3, alpha=6.0, targets=('decoder',), full=NORMS, base='nf4'),
    ),
    (
      'experts',
      dict(rank=2, alpha=1.0, base='int8', full=('experts/router',)),
    ),
    ('t5', dict(rank=2, alpha=1.0, full=('relative_bias',))),
    ('gpt2', dict(rank=2, alpha=1.0, full=('positions',))),
    ('bert', dict(rank=2, alpha=1.0, full=('types',), base='int8')),
  ],
)
def test_loss_and_gradients_equal_a_dense_sum(name, lora):
  adapters = make(MODELS[name], **lora)
  base, trained = make_trees(adapters)
  batch = make_batch(adapters.model)
  # Rematerialised layers, of which the reference has none.
  compute = execution.ComputeConfig('float32', 'full', attention_chunk=8)
  step = jax.jit(run, static_argnums=(0, 1))
  result = step(
    build.build(adapters.model, compute), adapters.attach, base, trained, batch
  )
  dense = functools.partial(densify, adapters)
  expected = step(build.build(adapters.model), dense, base, trained, batch)
  assert float(result[0]) == pytest.approx(float(expected[0]), rel=1e-5)
  flat, wanted = (state_lib.flatten(x[1]) for x in (result, expected))
  assert flat.keys() == adapters.table.keys()
  for path, value in wanted.items():
    largest = np.abs(value).max()
    assert largest > 0, path
    np.testing.assert_allclose(
      flat[path], value, atol=2e-5 * largest, err_msg=path
    )


@pytest.mark.long
@pytest.mark.sharded
@pytest.mark.parametrize(
  'mesh, rules',
  [
    (mesh_lib.MeshConfig(fsdp=2, sequence=2, tensor=2), 'fsdp'),
    (mesh_lib.MeshConfig(replica=2, fsdp=2, tensor=2), 'whole_slice'),
  ],
  ids=['fsdp-sequence-tensor', 'whole_slice'],
)
def test_meshes_equal_one_device(mesh, rules):
  adapters = make(rank=2, targets=PARTS, base='nf4', full=NORMS)
  base, trained = make_trees(adapters)
  batch, model = make_batch(adapters.model), build.build(adapters.model)
  step = jax.jit(run, static_argnums=(0, 1))
  expected = step(model, adapters.attach, base, trained, batch)
  mesh, rules = mesh_lib.make_mesh(mesh), rules_lib.RULES[rules]
  where = state_lib.Placement(model, mesh, rules, adapters=adapters)
  shardings = jax.tree.map(lambda x: x.sharding, where.abstract_base())
  base = jax.device_put(base, shardings)
  trained = jax.device_put(trained, where.shardings(trained))
  query = base['decoder']['tail']['layer_0']['attention']['query']
  # Blocks are not divided: those of a head lie together.
  assert query.values.sharding.shard_shape(query.values.shape)[1] == 2
  b = trained['decoder']['tail']['layer_0']['attention']['query']['lora_b']
  rank = 1 if mesh.shape['replica'] == 1 else 2  # 4 devices do not divide 2.
  assert b.sharding.shard_shape(b.shape)[0] == rank

  @jax.jit
  def sharded(base, trained, batch):
    with partition.use(mesh, rules.as_dict()):
      return run(model, adapters.attach, base, trained, batch)

  result = sharded(base, trained, batch)
  assert float(result[0]) == pytest.approx(float(expected[0]), rel=1e-5)
  flat, wanted = (state_lib.flatten(x[1]) for x in (result, expected))
  for path, value in wanted.items():
    largest = np.abs(value).max()
    np.testing.assert_allclose(
      flat[path], value, atol=3e-5 * largest, err_msg=path
    )


def test_layer_scalars_never_train_and_values_may_have_no_kernel():
  model = presets.decoder_only('gemma4_31b')
  full = adapters_lib.Adapters(model, adapters_lib.Options(8, full=('scale',)))
  assert full.full and not any('layer_scalar' in path for path in full.full)
  values = [path for path in full.kernels if path.endswith('attention/value')]
  assert len(values) == 5  # Of the local layers of the pattern.
  small = presets.decoder_only('gemma4_e2b')
  options = adapters_lib.Options(8, full=('embeddings',), base='nf4')
  found = adapters_lib.Adapters(small, options)
  tables = 'decoder/embedder/table', 'decoder/layer_inputs/table'
  assert found.full == tables
  assert any(path.endswith('layer_input/gate') for path in found.quantized)
  options = adapters_lib.Options(8, full=('layer_scalar',))
  with pytest.raises(errors.UserError, match="'layer_scalar', which matches"):
    adapters_lib.Adapters(model, options)


def test_new_adapters_change_nothing_and_are_drawn_as_in_peft():
  adapters = make(rank=4, targets=('decoder/attention/output', 'embeddings'))
  base, _ = make_trees(adapters)
  trained = adapters.init(jax.random.key(0))
  flat = state_lib.flatten(trained)
  a = flat['decoder/tail/layer_0/attention/output/lora_a']
  # nn.Linear's kaiming_uniform_(a=sqrt(5)) over N * H = 32 inputs.
  assert a.shape == (4, 8, 4)
  assert np.abs(a).max() == pytest.approx(32**-0.5, rel=0.05)
  assert float(np.std(a)) == pytest.approx((3 * 32) ** -0.5, rel=0.1)
  assert not np.any(flat['decoder/blocks/layer_1/attention/output/lora_b'])
  assert not np.any(flat['encoder/embedder/table/lora_a'])
  dense = state_lib.flatten(densify(adapters, base, trained))
  for path, value in state_lib.flatten(base).items():
    np.testing.assert_array_equal(dense[path], value, err_msg=path)


def test_dropout_drops_inputs_of_a_and_nothing_else():
  x = jnp.ones((1, 500, 2))
  node = kernel_forms.Adapted(
    jnp.eye(2), jnp.ones((2, 1)), jnp.ones((1, 2)), jax.random.key(0), 1.0, 0.25
  )
  dropped = np.asarray(node.drop(x))
  assert set(np.unique(dropped.round(4))) == {0, np.float32(1.3333)}
  assert (dropped == 0).mean() == pytest.approx(0.25, abs=0.05)


def test_quantised_kernels_have_the_published_codes_and_block_scales():
  kernel = np.zeros((3, 1, 128), np.float32)  # Two blocks of 64.
  kernel[0, 0, :4] = 2.0, -2.0, 0.33, -0.2
  kernel[0, 0, 64:66] = 0.5, 0.25
  node = kernel_forms.quantize_nf4(jnp.asarray(kernel), -1, 64)
  assert (node.values.dtype, node.values.shape) == (jnp.uint8, (3, 1, 64))
  np.testing.assert_allclose(node.scale[0, 0], [2.0, 0.5])
  found = node.dequantize(jnp.float32)[0, 0]
  # 0.33 / 2 is nearest to 0.1609, -0.2 / 2 to -0.0911, 0.25 / 0.5 to 0.4407.
  wanted = [2.0, -2.0, 2 * 0.16093020141124725, 2 * -0.09105003625154495]
  np.testing.assert_allclose(found[:4], wanted, rtol=1e-6)
  np.testing.assert_allclose(found[64:66], [0.5, 0.5 * 0.44070982933044434])
  assert not np.any(found[4:64])
  node = kernel_forms.quantize_int8(
    jnp.asarray([[1.0, 0.0], [-0.5, 0.0]]), (0,)
  )
  np.testing.assert_array_equal(node.values, [[127, 0], [-64, 0]])


@pytest.mark.long
@pytest.mark.parametrize(
  'pair, base, error',
  [
    ('small', '', 0.0329),
    ('small', 'int8', 0.0569),
    ('small', 'nf4', 0.575),
    pytest.param('large', '', 0.0180, marks=pytest.mark.slow),
    pytest.param('large', 'int8', 0.0301, marks=pytest.mark.slow),
    pytest.param('large', 'nf4', 0.388, marks=pytest.mark.slow),
  ],
)
def test_logits_of_a_random_pair_move_by_a_measured_error(pair, base, error):
  """In bfloat16, relative to float32 by their norms; small models err more."""
  if pair == 'large':  # 121M parameters, as they are drawn for training.
    stack = dataclasses.replace(
      STACK,
      layers=8,
      width=640,
      mlp_width=2560,
      heads=10,
      kv_heads=10,
      head_dim=64,
      query_scale=64.0,
      vocab_size=2048,
    )
    config = model_config.encoder_decoder(stack, stack)
    flat = state_lib.flatten(build.build(config).init(jax.random.key(0)))
  else:
    config, flat = PAIR, state_lib.flatten(toy_models.params(PAIR, scale=0.3))
  batch = jax.tree.map(jnp.asarray, make_batch(config))
  rows = [
    [batch[f'{side}_{field}'] for field in ('tokens', 'segments', 'positions')]
    for side in ('encoder', 'decoder')
  ]

  def logits(base, dtype):
    model = build.build(config, execution.ComputeConfig(dtype, 'none'))
    adapters = make(config, rank=1, base=base)
    frozen = {p: adapters.freeze(p, flat[p], dtype) for p in adapters.frozen}
    params = state_lib.unflatten(frozen)
    memory = model.encode(params, *rows[0]), rows[0][1]
    hidden = model.decode(params, *rows[1], *memory)
    return np.asarray(model.logits(params, hidden), np.float32)

  expected = logits('', 'float32')
  difference = logits(base, 'bfloat16') - expected
  measured = np.linalg.norm(difference) / np.linalg.norm(expected)
  assert 0.5 * error < measured < 1.1 * error


@pytest.mark.parametrize(
  'lora, words',
  [
    ({'targets': ('atention',)}, "targets has .*did you mean 'attention'"),
    ({'targets': ('encoder/cross_attention',)}, 'matches nothing'),
    ({'rank': 20}, 'lora.rank is 20, .* at most 16'),
    ({'full': ('encoder', 'decoder'), 'base': 'int8'}, 'nothing is adapted'),
    ({'base': 'fp4'}, 'int8, nf4'),
  ],
)
def test_refusals(lora, words):
  with pytest.raises(errors.UserError, match=words):
    assert make(**{'rank': 2} | lora).table


@pytest.mark.long
@pytest.mark.parametrize('name', tiny.slow_except(['small'], ['base', 'small']))
def test_a_quantised_base_costs_little_loss(name):
  """Of the shipped decoders, on the documents that they were not trained on."""
  decoders = tiny.ROOT / 'configs' / 'decoders'
  loaded = encdec_adapt.load(decoders / name)
  source = text_sources.open_source(f'python:{decoders}/held_out.txt')
  encoded = (
    loaded.tokenizer.encode(document.text)[:128]
    for document in source.documents()
    if source.in_split(document.id, 'eval', 0, 0)
  )
  tokens = np.array([x for x in encoded if len(x) == 128])
  assert len(tokens) > 30
  losses = {}
  for base in ('', 'int8', 'nf4'):
    adapters = make(loaded.config, rank=1, base=base)
    params = state_lib.flatten(loaded.params)
    params = state_lib.unflatten(
      {p: adapters.freeze(p, params[p], 'bfloat16') for p in adapters.frozen}
    )
    logits = dataclasses.replace(loaded, params=params).logits(tokens)
    log_probs = jax.nn.log_softmax(logits[:, :-1])
    targets = tokens[:, 1:, None]
    losses[base] = -float(jnp.take_along_axis(log_probs, targets, 2).mean())
  assert losses['int8'] == pytest.approx(losses[''], abs=0.01), losses
  assert losses['nf4'] == pytest.approx(losses[''], abs=0.05), losses
