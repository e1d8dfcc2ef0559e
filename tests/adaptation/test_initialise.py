"""Copy maps between toy models of differing layouts."""

import dataclasses
import functools

from flax import traverse_util
import jax
from jax import numpy as jnp
import numpy as np
import pytest

from encdec_adapt.adaptation import initialise, weight_plan
from encdec_adapt.cli import errors
from encdec_adapt.models import build, layer_leaves, model_config, parameters
from tests.adaptation import sources

STACK, RNG = sources.STACK, sources.RNG
WIDE = dataclasses.replace(STACK, width=12, layers=2, heads=2)
PAIR = model_config.encoder_decoder(STACK, STACK)


@pytest.fixture(autouse=True)
def _quick_init(monkeypatch):
  monkeypatch.setattr(parameters, 'init', sources.quick_init)


def _fresh(target):
  return jax.jit(functools.partial(parameters.init, target))(RNG)


def _initialise(target, *given, **options):
  """`initialise` under jit (many small programs are slow to compile)."""
  configs = [config for config, _ in given]
  coverage = weight_plan.make_plan(target, *configs, **options)

  @jax.jit
  def traced(trees, rng):
    pairs = zip(configs, trees, strict=True)
    return initialise.initialise(target, *pairs, rng=rng, **options)[0]

  return traced([params for _, params in given], RNG), coverage


def _check_shapes(config, params):
  flat = traverse_util.flatten_dict(params, sep='/')
  table = parameters.parameter_table(config)
  assert {p: (a.shape, a.dtype) for p, a in flat.items()} == {
    p: (info.shape, info.dtype) for p, info in table.items()
  }


def _assert_equal(filled, expected):
  for name, array in expected.items():
    np.testing.assert_array_equal(filled[name], array, err_msg=name)


def test_names_do_not_depend_on_the_layout():
  names = layer_leaves.leaves_of(model_config.DecoderOnlyConfig(STACK))
  for name, path, index in (
    ('layers/0/mlp/gate', 'blocks/layer_0/mlp/gate', 0),
    ('layers/1/mlp/gate', 'blocks/layer_1/mlp/gate', 0),
    ('layers/2/mlp/gate', 'tail/layer_0/mlp/gate', None),
  ):
    leaf = layer_leaves.Leaf((8, 12), f'decoder/{path}', index)
    assert names[f'decoder/{name}'] == leaf
  other = dataclasses.replace(STACK, pattern=('global',))
  other = layer_leaves.leaves_of(model_config.DecoderOnlyConfig(other))
  assert set(other) == set(names)
  # 11 leaves per layer (4 norms, 4 + 3 kernels), a table and a norm.
  assert len(names) == 3 * 11 + 2


@pytest.mark.parametrize('pattern', [('local', 'global'), ('local',) * 4])
def test_balanced_copies_everything(pattern):
  config, params = sources.make(STACK)
  stack = dataclasses.replace(STACK, pattern=pattern)
  target = model_config.encoder_decoder(stack, stack)
  got, coverage = _initialise(target, (config, params))
  _check_shapes(target, got)
  # Each norm and kernel of self-attention serves the decoder twice.
  cross = {
    'pre_attention_norm': 'pre_cross_norm',
    'attention': 'cross_attention',
    'post_attention_norm': 'post_cross_norm',
  }
  expected = {}
  for name, array in sources.by_name(config, params).items():
    expected[name] = array
    expected['encoder' + name.removeprefix('decoder')] = array
    if set(name.split('/')) & set(cross):
      expected['/'.join(cross.get(p, p) for p in name.split('/'))] = array
  filled = sources.by_name(target, got)
  assert set(filled) == set(expected)
  _assert_equal(filled, expected)
  assert coverage.parameters()['fresh'] == 0
  assert not any(coverage.unused.values())
  role = "encoder.role is 'bidirectional', in encoder_source 'causal'"
  assert role in coverage.changes


def test_two_sources():
  encoder, decoder = sources.make(WIDE, 1), sources.make(STACK, 2)
  target = model_config.encoder_decoder(WIDE, STACK)
  got, coverage = _initialise(target, encoder, decoder)
  _check_shapes(target, got)
  filled, own = sources.by_name(target, got), sources.by_name(*decoder)
  _assert_equal(filled, own)
  for name, array in sources.by_name(*encoder).items():
    _assert_equal(filled, {'encoder' + name.removeprefix('decoder'): array})
  fresh = sources.by_name(target, _fresh(target))
  for layer in range(3):
    block = f'decoder/layers/{layer}'
    for part in ('query', 'key', 'value', 'output'):
      name = f'{block}/cross_attention/{part}'
      np.testing.assert_array_equal(filled[name], fresh[name])
    np.testing.assert_array_equal(
      filled[f'{block}/pre_cross_norm/scale'],
      own[f'{block}/pre_attention_norm/scale'],
    )
    assert not filled[f'{block}/post_cross_norm/scale'].any()
  # 3 layers of query, output (8 x 4 x 4) and key, value (12 x 2 x 4).
  assert coverage.parameters()['fresh'] == 3 * 2 * (128 + 96)
  assert coverage.parameters()['constant'] == 3 * 8


def test_zero_gain_leaves_the_decoders_function_unchanged():
  config, params = sources.make(STACK, 2)
  target = model_config.encoder_decoder(WIDE, STACK)
  tokens = jax.random.randint(jax.random.key(3), (2, 7), 0, 11)
  ones = jnp.ones_like(tokens)
  positions = jnp.broadcast_to(jnp.arange(7), (2, 7))
  source, model = build.build(config), build.build(target)

  @jax.jit
  def of_source(params):
    return source.logits(params, source.decode(params, tokens, ones, positions))

  @jax.jit
  def of_target(params):
    encoded = model.encode(params, tokens, ones, positions)
    hidden = model.decode(params, tokens, ones, positions, encoded, ones)
    return model.logits(params, hidden)

  def logits(gain):
    given = sources.make(WIDE, 1), (config, params)
    return of_target(_initialise(target, *given, post_norm_gain=gain)[0])

  want = of_source(params)
  np.testing.assert_allclose(logits('zero'), want, rtol=1e-6, atol=1e-6)
  assert np.abs(logits('one') - want).max() > 1e-2


def test_traces_and_plans_without_arrays():
  given = sources.make(WIDE, 1), sources.make(STACK, 2)
  target = model_config.encoder_decoder(WIDE, STACK)
  eager, coverage = initialise.initialise(target, *given, rng=RNG)
  jitted, planned = _initialise(target, *given)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-6), eager, jitted
  )
  shapes = [
    (config, jax.eval_shape(lambda params=params: params))
    for config, params in given
  ]
  abstract, same = initialise.initialise(target, *shapes, rng=RNG)
  leaves = jax.tree.leaves(abstract)
  assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
  _check_shapes(target, abstract)
  assert same == planned == coverage


def test_padding_rows_are_added_and_dropped():
  padded = dataclasses.replace(STACK, vocab_multiple=8)  # 16 rows
  for stack, pair in ((padded, (STACK, padded)), (STACK, (padded, padded))):
    given = sources.make(stack)
    target = model_config.encoder_decoder(*pair)
    got, coverage = _initialise(target, given)
    table = given[1]['decoder']['embedder']['table']
    for side, rows in target.stacks.items():
      found = got[side]['embedder']['table']
      assert found.shape == (rows.table_rows, 8)
      np.testing.assert_array_equal(found[:11], table[:11])
    fill = coverage.filled['encoder/embedder/table'].describe()
    assert '5 padding rows ' in fill


def test_heads():
  untied = dataclasses.replace(STACK, tied_head=False)
  config, params = sources.make(untied)
  target = model_config.encoder_decoder(untied, untied)
  got, coverage = _initialise(target, (config, params))
  np.testing.assert_array_equal(
    got['decoder']['head']['table'], params['decoder']['head']['table']
  )
  assert coverage.unused == {
    'encoder_source': {'decoder/head/table': 'an encoder has no head'},
    'decoder_source': {},
  }
  # A tied source fills an untied head, which keeps the function.
  tied = sources.make(STACK)
  got, coverage = _initialise(target, tied)
  np.testing.assert_array_equal(
    got['decoder']['head']['table'], tied[1]['decoder']['embedder']['table']
  )


def test_controls():
  """Fresh weights throughout, and all but the embedding tables."""
  source, fresh = sources.make(STACK), _fresh(PAIR)
  coverage = initialise.coverage_from_scratch(PAIR)
  assert {fill.how for fill in coverage.filled.values()} == {'fresh'}

  leaves = weight_plan.all_but_embeddings(PAIR)
  got, coverage = initialise.initialise(PAIR, source, rng=RNG, fresh=leaves)
  for stack in ('encoder', 'decoder'):
    np.testing.assert_array_equal(
      got[stack]['embedder']['table'], source[1]['decoder']['embedder']['table']
    )
    got[stack]['embedder'] = fresh[stack]['embedder']
  jax.tree.map(np.testing.assert_array_equal, got, fresh)
  copied = [n for n, f in coverage.filled.items() if f.how == 'copied']
  assert copied == ['encoder/embedder/table', 'decoder/embedder/table']
  reasons = set(coverage.unused['decoder_source'].values())
  assert 'decoder/layers/1/mlp/up is drawn fresh' in reasons


def test_a_gain_is_stored_as_the_norm_reads_it():
  stack = dataclasses.replace(STACK, norm_gain='direct')
  source = model_config.DecoderOnlyConfig(stack)
  target = model_config.encoder_decoder(stack, stack)
  leaf = 'decoder/layers/0/post_cross_norm/scale'
  for gain, scale in (('one', 1.0), ('zero', 0.0)):
    coverage = weight_plan.make_plan(
      target, source, cross_attention='fresh', post_norm_gain=gain
    )
    assert coverage.filled[leaf].value == scale


def test_cross_attention_of_global_layers_only():
  stack = dataclasses.replace(STACK, pattern=('local', 'global'))
  coverage = weight_plan.make_plan(
    model_config.encoder_decoder(stack, stack, cross_layers='global'),
    model_config.DecoderOnlyConfig(stack),
  )
  cross = {leaf.split('/')[2] for leaf in coverage.filled if 'cross' in leaf}
  assert cross == {'1'}


def test_parameters_of_another_model_are_named():
  config, params = sources.make(STACK)
  other = sources.make(dataclasses.replace(STACK, mlp_width=16))[1]
  with pytest.raises(errors.UserError, match='encoder_source has shape'):
    initialise.initialise(PAIR, (config, other), rng=RNG)
  without = {'decoder': {**params['decoder']}}
  del without['decoder']['final_norm']
  with pytest.raises(errors.UserError, match="no 'decoder/final_norm/scale'"):
    initialise.initialise(PAIR, (config, without), rng=RNG)
