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


@pytest.fixture(autouse=True)
def _quick_init(monkeypatch):
  """Real initialisation takes 15 s to compile; these maps do not need it."""
  monkeypatch.setattr(parameters, 'init', sources.quick_init)


def _fresh(target):
  return jax.jit(functools.partial(parameters.init, target))(RNG)


def _initialise(target, *sources, **options):
  """`initialise` under jit (many small programs are slow to compile)."""
  configs = [config for config, _ in sources]
  coverage = weight_plan.make_plan(target, *configs, **options)

  @jax.jit
  def traced(trees, rng):
    pairs = zip(configs, trees, strict=True)
    return initialise.initialise(target, *pairs, rng=rng, **options)[0]

  return traced([params for _, params in sources], RNG), coverage


def _check_shapes(config, params):
  flat = traverse_util.flatten_dict(params, sep='/')
  table = parameters.parameter_table(config)
  assert {p: (a.shape, a.dtype) for p, a in flat.items()} == {
    p: (info.shape, info.dtype) for p, info in table.items()
  }


def test_names_do_not_depend_on_the_layout():
  config = model_config.DecoderOnlyConfig(STACK)
  names = layer_leaves.leaves_of(config)
  assert names['decoder/layers/0/mlp/gate'] == layer_leaves.Leaf(
    (8, 12), 'decoder/blocks/layer_0/mlp/gate', 0
  )
  assert names['decoder/layers/1/mlp/gate'] == layer_leaves.Leaf(
    (8, 12), 'decoder/blocks/layer_1/mlp/gate', 0
  )
  assert names['decoder/layers/2/mlp/gate'] == layer_leaves.Leaf(
    (8, 12), 'decoder/tail/layer_0/mlp/gate', None
  )
  assert names['decoder/embedder/table'] == layer_leaves.Leaf(
    (11, 8), 'decoder/embedder/table', None
  )
  other = dataclasses.replace(STACK, pattern=('global',))
  assert set(
    layer_leaves.leaves_of(model_config.DecoderOnlyConfig(other))
  ) == set(names)
  # 11 leaves per layer (4 norms, 4 + 3 kernels), a table and a norm.
  assert len(names) == 3 * 11 + 2


@pytest.mark.parametrize(
  'pattern', [('local', 'global'), ('global',), ('local',) * 4]
)
def test_balanced_copies_everything(pattern):
  config, params = sources.make(STACK)
  stack = dataclasses.replace(STACK, pattern=pattern)
  target = model_config.encoder_decoder(stack, stack)
  got, coverage = _initialise(target, (config, params))
  _check_shapes(target, got)
  source = sources.by_name(config, params)
  filled = sources.by_name(target, got)
  # Each norm and kernel of self-attention serves the decoder twice.
  cross = {
    'pre_attention_norm': 'pre_cross_norm',
    'attention': 'cross_attention',
    'post_attention_norm': 'post_cross_norm',
  }
  expected = {}
  for name, array in source.items():
    expected[name] = array
    expected['encoder' + name.removeprefix('decoder')] = array
    for _ in set(name.split('/')) & set(cross):
      renamed = [cross.get(p, p) for p in name.split('/')]
      expected['/'.join(renamed)] = array
  assert set(filled) == set(expected)
  for name, array in expected.items():
    np.testing.assert_array_equal(filled[name], array, err_msg=name)
  coverage.check()
  assert coverage.parameters()['fresh'] == 0
  assert not coverage.unused['encoder_source']
  assert not coverage.unused['decoder_source']
  assert coverage.filled['decoder/layers/2/cross_attention/key'].describe() == (
    'copied from decoder_source decoder/layers/2/attention/key'
  )
  assert (
    "encoder.role is 'bidirectional', in encoder_source 'causal'"
    in coverage.changes
  )


def test_two_sources():
  encoder, decoder = sources.make(WIDE, 1), sources.make(STACK, 2)
  target = model_config.encoder_decoder(WIDE, STACK)
  got, coverage = _initialise(target, encoder, decoder)
  _check_shapes(target, got)
  filled = sources.by_name(target, got)
  for name, array in sources.by_name(*encoder).items():
    name = 'encoder' + name.removeprefix('decoder')
    np.testing.assert_array_equal(filled[name], array, err_msg=name)
  decoder = sources.by_name(*decoder)
  for name, array in decoder.items():
    np.testing.assert_array_equal(filled[name], array, err_msg=name)
  fresh = sources.by_name(target, _fresh(target))
  for layer in range(3):
    block = f'decoder/layers/{layer}'
    for part in ('query', 'key', 'value', 'output'):
      name = f'{block}/cross_attention/{part}'
      np.testing.assert_array_equal(filled[name], fresh[name])
      assert coverage.filled[name].how == 'fresh'
    np.testing.assert_array_equal(
      filled[f'{block}/pre_cross_norm/scale'],
      decoder[f'{block}/pre_attention_norm/scale'],
    )
    np.testing.assert_array_equal(
      filled[f'{block}/post_cross_norm/scale'], np.zeros(8)
    )
  # 3 layers of query, output (8 x 4 x 4) and key, value (12 x 2 x 4).
  assert coverage.parameters()['fresh'] == 3 * 2 * (128 + 96)
  assert coverage.parameters()['constant'] == 3 * 8


@pytest.mark.parametrize('encoder', [WIDE, STACK])
def test_zero_gain_leaves_the_decoders_function_unchanged(encoder):
  config, params = sources.make(STACK, 2)
  target = model_config.encoder_decoder(encoder, STACK)
  tokens = jax.random.randint(jax.random.key(3), (2, 7), 0, 11)
  ones = jnp.ones_like(tokens)
  positions = jnp.broadcast_to(jnp.arange(7), (2, 7))
  source = build.build(config)
  model = build.build(target)

  @jax.jit
  def of_source(params):
    return source.logits(params, source.decode(params, tokens, ones, positions))

  @jax.jit
  def of_target(params):
    encoded = model.encode(params, tokens, ones, positions)
    hidden = model.decode(params, tokens, ones, positions, encoded, ones)
    return model.logits(params, hidden)

  def logits(gain):
    adapted, _ = _initialise(
      target,
      sources.make(encoder, 1),
      (config, params),
      cross_attention='fresh',
      post_norm_gain=gain,
    )
    return of_target(adapted)

  want = of_source(params)
  np.testing.assert_allclose(logits('zero'), want, rtol=1e-6, atol=1e-6)
  assert np.abs(logits('one') - want).max() > 1e-2


def test_traces_and_plans_without_arrays():
  encoder, decoder = sources.make(WIDE, 1), sources.make(STACK, 2)
  target = model_config.encoder_decoder(WIDE, STACK)
  eager, coverage = initialise.initialise(target, encoder, decoder, rng=RNG)
  jitted, planned = _initialise(target, encoder, decoder)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-6), eager, jitted
  )
  shapes = [
    (config, jax.eval_shape(lambda params=params: params))
    for config, params in (encoder, decoder)
  ]
  abstract, same = initialise.initialise(target, *shapes, rng=RNG)
  assert all(
    isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(abstract)
  )
  _check_shapes(target, abstract)
  assert same == coverage
  assert planned == coverage


def test_padding_rows_are_added_and_dropped():
  padded = dataclasses.replace(STACK, vocab_multiple=8)  # 16 rows
  config, params = sources.make(padded)
  target = model_config.encoder_decoder(STACK, padded)
  got, coverage = _initialise(target, (config, params))
  table = params['decoder']['embedder']['table']
  assert got['encoder']['embedder']['table'].shape == (11, 8)
  np.testing.assert_array_equal(got['encoder']['embedder']['table'], table[:11])
  np.testing.assert_array_equal(got['decoder']['embedder']['table'], table)
  fill = coverage.filled['encoder/embedder/table']
  assert '5 padding rows dropped' in fill.describe()

  config, params = sources.make(STACK)
  target = model_config.encoder_decoder(padded, padded)
  got, coverage = _initialise(target, (config, params))
  table = params['decoder']['embedder']['table']
  np.testing.assert_array_equal(
    got['encoder']['embedder']['table'],
    np.concatenate([table, np.zeros((5, 8))]),
  )
  fill = coverage.filled['decoder/embedder/table']
  assert '5 padding rows added' in fill.describe()


def test_heads():
  untied = dataclasses.replace(STACK, tied_head=False)
  config, params = sources.make(untied)
  target = model_config.encoder_decoder(untied, untied)
  got, coverage = _initialise(target, (config, params))
  np.testing.assert_array_equal(
    got['decoder']['head']['table'], params['decoder']['head']['table']
  )
  assert coverage.unused['encoder_source'] == {
    'decoder/head/table': 'an encoder has no head'
  }
  assert not coverage.unused['decoder_source']

  # A tied source fills an untied head, which keeps the function.
  tied = sources.make(STACK)
  got, coverage = _initialise(target, tied)
  np.testing.assert_array_equal(
    got['decoder']['head']['table'], tied[1]['decoder']['embedder']['table']
  )
  assert 'ties' in coverage.filled['decoder/head/table'].note

  # An untied head has no place in a tied target.
  target = model_config.encoder_decoder(STACK, STACK)
  with pytest.raises(errors.UserError, match='decoder.tied_head to False'):
    weight_plan.make_plan(target, config)


def test_fresh_patterns():
  source = sources.make(STACK)
  target = model_config.encoder_decoder(STACK, STACK)
  got, coverage = _initialise(
    target, source, fresh=('encoder/*', 'decoder/layers/1/mlp/up')
  )
  fresh = sources.by_name(target, _fresh(target))
  copied = sources.by_name(*source)
  for name, array in sources.by_name(target, got).items():
    if name.startswith('encoder/') or name == 'decoder/layers/1/mlp/up':
      np.testing.assert_array_equal(array, fresh[name], err_msg=name)
    elif 'cross' not in name:
      np.testing.assert_array_equal(array, copied[name], err_msg=name)
  assert coverage.unused['decoder_source'] == {
    'decoder/layers/1/mlp/up': 'decoder/layers/1/mlp/up is drawn fresh'
  }
  assert len(coverage.unused['encoder_source']) == len(copied)


def test_controls():
  source = sources.make(STACK)
  target = model_config.encoder_decoder(STACK, STACK)
  fresh = _fresh(target)
  scratch, coverage = initialise.from_scratch(target, RNG)
  jax.tree.map(np.testing.assert_array_equal, scratch, fresh)
  assert {fill.how for fill in coverage.filled.values()} == {'fresh'}

  fresh_leaves = weight_plan.all_but_embeddings(target)
  got, coverage = initialise.initialise(
    target, source, rng=RNG, fresh=fresh_leaves
  )
  for stack in ('encoder', 'decoder'):
    np.testing.assert_array_equal(
      got[stack]['embedder']['table'], source[1]['decoder']['embedder']['table']
    )
    got[stack]['embedder'] = fresh[stack]['embedder']
  jax.tree.map(np.testing.assert_array_equal, got, fresh)
  copied = [n for n, f in coverage.filled.items() if f.how == 'copied']
  assert copied == ['encoder/embedder/table', 'decoder/embedder/table']


@pytest.mark.parametrize(
  'encoder, decoder, options, message',
  [
    (WIDE, STACK, {'cross_attention': 'copy'}, r'widths are 12 and 8.*key is'),
    (STACK, STACK, {'cross_attention': 'no'}, "cross_attention is 'no'"),
    (STACK, STACK, {'post_norm_gain': 'two'}, "post_norm_gain is 'two'"),
    (STACK, STACK, {'post_norm_gain': 'zero'}, "cross_attention='fresh'"),
    (STACK, STACK, {'fresh': ('enc/*',)}, "'enc/.' matches no parameter"),
    (STACK, STACK, {'fresh': 'encoder/*'}, 'sequence of patterns'),
    (
      dataclasses.replace(STACK, layers=4),
      STACK,
      {},
      'encoder has 4 layers and encoder_source has 3',
    ),
    (
      STACK,
      dataclasses.replace(STACK, mlp_width=16),
      {},
      r'decoder/layers/0/mlp/\w+ has shape \[',
    ),
    (
      STACK,
      dataclasses.replace(STACK, vocab_size=9),
      {},
      'decoder.vocab_size is 9, and decoder_source has 11 tokens',
    ),
  ],
)
def test_what_does_not_fit_is_named(encoder, decoder, options, message):
  target = model_config.encoder_decoder(encoder, decoder)
  given = [sources.make(STACK)]
  if encoder is WIDE:
    given.insert(0, sources.make(WIDE))
  with pytest.raises(errors.UserError, match=message):
    initialise.initialise(target, *given, rng=RNG, **options)


def test_padding_cannot_hide_another_vocabulary():
  # Both tables have 16 rows.
  of_13 = dataclasses.replace(STACK, vocab_multiple=8, vocab_size=13)
  of_11 = dataclasses.replace(of_13, vocab_size=11)
  with pytest.raises(errors.UserError, match='extended, not cut'):
    weight_plan.make_plan(
      model_config.encoder_decoder(of_11, of_11),
      model_config.DecoderOnlyConfig(of_13),
    )


def test_parameters_of_another_model_are_named():
  target = model_config.encoder_decoder(STACK, STACK)
  config, params = sources.make(STACK)
  other = sources.make(dataclasses.replace(STACK, mlp_width=16))[1]
  with pytest.raises(errors.UserError, match='encoder_source has shape'):
    initialise.initialise(target, (config, other), rng=RNG)
  without = {'decoder': {**params['decoder']}}
  del without['decoder']['final_norm']
  with pytest.raises(errors.UserError, match="no 'decoder/final_norm/scale'"):
    initialise.initialise(target, (config, without), rng=RNG)


def test_a_gain_is_stored_as_the_norm_reads_it():
  stack = dataclasses.replace(STACK, norm_gain='direct')
  source = model_config.DecoderOnlyConfig(stack)
  target = model_config.encoder_decoder(stack, stack)
  leaf = 'decoder/layers/0/post_cross_norm/scale'
  for gain, scale in (('one', 1.0), ('zero', 0.0)):
    account = weight_plan.make_plan(
      target, source, cross_attention='fresh', post_norm_gain=gain
    )
    assert account.filled[leaf].value == scale


def test_cross_attention_of_global_layers_only():
  stack = dataclasses.replace(STACK, pattern=('local', 'global'))
  account = weight_plan.make_plan(
    model_config.encoder_decoder(stack, stack, cross_layers='global'),
    model_config.DecoderOnlyConfig(stack),
  )
  cross = {leaf.split('/')[2] for leaf in account.filled if 'cross' in leaf}
  assert cross == {'1'}
  with pytest.raises(errors.UserError, match='no layer of the decoder reads'):
    local = dataclasses.replace(STACK, pattern=('local',))
    model_config.encoder_decoder(local, local, cross_layers='global')
