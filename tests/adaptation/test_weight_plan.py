"""Copy maps between toy models: the weights, and the function they compute."""

import dataclasses
import functools

from flax import traverse_util
import jax
from jax import numpy as jnp
import numpy as np
import pytest

from encdec_adapt.adaptation import array_plans, weight_plan
from encdec_adapt.base import errors
from encdec_adapt.models import build, heads, model_config, parameters, presets
from tests import toy_models

STACK = toy_models.stack(
  layers=3, width=8, mlp_width=12, head_dim=4, vocab_size=11, query_scale=4.0
)
RNG = jax.random.key(7)
WIDE = dataclasses.replace(STACK, width=12, layers=2, heads=2)
PAIR = model_config.encoder_decoder(STACK, STACK)
_SMALL = dict(mlp_width=12, kv_heads=2, head_dim=4, query_scale=4.0)
LLAMA = presets.stack(
  'llama2_7b', layers=2, width=8, heads=2, vocab_size=9, **_SMALL
)
QWEN = presets.stack(
  'qwen2.5_0.5b',
  layers=3,
  width=12,
  heads=4,
  vocab_size=13,
  qk_norm=True,
  **_SMALL,
)


def _make(stack, seed=0):
  """A decoder-only model in which no two arrays are alike, norms too."""
  config = model_config.DecoderOnlyConfig(stack)
  return config, toy_models.params(config, seed, scale=0.3)


def _adapt(target, *given, **options):
  """Parameters of the target, and a report that covers each leaf once."""
  configs = [config for config, _ in given]
  coverage = weight_plan.make_plan(target, *configs, **options)
  assert coverage.filled.keys() == coverage.target.keys()
  for source, shapes in coverage.sources.items():
    named = [*coverage.used(source), *coverage.unused[source]]
    assert sorted(named) == sorted(shapes)

  @jax.jit  # Many small programs are slow to compile.
  def fill(trees, rng):
    pairs = zip(configs, trees, strict=True)
    return array_plans.fill(target, coverage, *pairs, rng=rng)

  made = fill([params for _, params in given], RNG)
  flat = traverse_util.flatten_dict(made, sep='/')
  table = parameters.parameter_table(target)
  assert {path: (x.shape, x.dtype) for path, x in flat.items()} == {
    path: (info.shape, info.dtype) for path, info in table.items()
  }
  return made, coverage


def _by_name(config, params):
  return toy_models.leaves(config, traverse_util.flatten_dict(params, sep='/'))


def _quick_parameters(config, rng):
  """In the place of `parameters.init`, which takes 15 s to compile."""
  first = jnp.sum(jax.random.key_data(rng)).astype(jnp.float32)
  flat = {}
  for i, (path, info) in enumerate(parameters.parameter_table(config).items()):
    count = jnp.arange(np.prod(info.shape), dtype=info.dtype)
    flat[path] = jnp.sin(count + 10 * i + first).reshape(info.shape)
  return traverse_util.unflatten_dict(flat, sep='/')


@pytest.fixture(autouse=True)
def _quick_init(monkeypatch):
  monkeypatch.setattr(parameters, 'init', _quick_parameters)


def _fresh(target):
  init = functools.partial(parameters.init, target)
  return jax.jit(init)(RNG)


def _tokens(length=7, vocabulary=9, seed=3):
  tokens = jax.random.randint(jax.random.key(seed), (2, length), 0, vocabulary)
  positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
  return tokens, jnp.ones_like(tokens), positions


TOKENS, TARGETS = _tokens(), _tokens(5, seed=4)


@jax.jit(static_argnames='config')
def _logits(config, params, encoder=TOKENS, decoder=TARGETS):
  model = build.build(config)
  encoded = ()
  if isinstance(config, model_config.EncoderDecoderConfig):
    encoded = model.encode(params, *encoder), encoder[1]
  return model.logits(params, model.decode(params, *decoder, *encoded))


def _assert_equal(filled, expected, prefix='decoder'):
  """The leaves of a source are those of a stack of the target."""
  for name, array in expected.items():
    name = prefix + name.removeprefix('decoder')
    np.testing.assert_array_equal(filled[name], array, err_msg=name)


EXPERTS = dict(
  experts=4, experts_per_token=2, shared_expert_width=8, dense_layers=1
)


@pytest.mark.parametrize(
  'changes, pattern',
  [({}, ('local', 'global')), ({}, ('local',) * 4), (EXPERTS, ('local',))],
  ids=['same', 'other layout', 'experts'],
)
def test_balanced_copies_everything(changes, pattern):
  stack = dataclasses.replace(STACK, **changes)
  config, params = _make(stack)
  stack = dataclasses.replace(stack, pattern=pattern)
  target = model_config.encoder_decoder(stack, stack)
  got, coverage = _adapt(target, (config, params))
  # Each norm and kernel of self-attention serves the decoder twice.
  cross = {
    'pre_attention_norm': 'pre_cross_norm',
    'attention': 'cross_attention',
    'post_attention_norm': 'post_cross_norm',
  }
  filled, own = _by_name(target, got), _by_name(config, params)
  _assert_equal(filled, own, 'encoder')
  _assert_equal(filled, own)
  twice = {
    '/'.join(cross.get(part, part) for part in name.split('/')): array
    for name, array in own.items()
  }
  _assert_equal(filled, twice)
  assert len(filled) == len(own) + len(own | twice)
  assert coverage.parameters()['fresh'] == 0
  assert not any(coverage.unused.values())
  role = "encoder.role is 'bidirectional', in encoder_source 'causal'"
  assert role in coverage.changes


@pytest.mark.parametrize(
  'encoder, decoder', [(WIDE, STACK), (LLAMA, QWEN)], ids=['gemma', 'families']
)
def test_two_sources_with_fresh_cross_attention(encoder, decoder):
  given = _make(encoder, 1), _make(decoder, 2)
  target = model_config.encoder_decoder(encoder, decoder)
  got, coverage = _adapt(target, *given)
  filled, own = _by_name(target, got), _by_name(*given[1])
  fresh = _by_name(target, _fresh(target))
  _assert_equal(filled, own)
  theirs = _by_name(*given[0])
  head = {'decoder/head/table'} & set(theirs)
  assert coverage.unused == {
    'encoder_source': dict.fromkeys(head, 'an encoder has no head'),
    'decoder_source': {},
  }
  kept = {name: array for name, array in theirs.items() if name not in head}
  _assert_equal(filled, kept, 'encoder')
  for name, array in filled.items():
    if '/cross_attention/' in name:
      np.testing.assert_allclose(array, fresh[name], rtol=1e-6)
    elif '/pre_cross_norm/' in name:
      same = own[name.replace('cross', 'attention')]
      np.testing.assert_array_equal(array, same)
    elif '/post_cross_norm/' in name:  # Gemma's, which store gain - 1.
      assert not array.any()
  counts = coverage.parameters()
  if encoder is WIDE:
    # 3 layers of query, output (8 x 4 x 4) and key, value (12 x 2 x 4).
    assert counts['fresh'] == 3 * 2 * (128 + 96)
  assert counts['constant'] == 3 * 8 * decoder.post_norms


@pytest.mark.parametrize('layer', ['', 'pooler', 'transform'])
def test_heads_of_classifiers_are_unused(layer):
  head = heads.Labels(3, 'first', layer)
  stack = dataclasses.replace(STACK, role='bidirectional', head=head)
  source = model_config.DecoderOnlyConfig(stack)
  modules = {name for name in ('head', layer) if name}

  def unused(target, *decoder):
    plan = weight_plan.make_plan(target, source, *decoder)
    (reasons,) = filter(None, plan.unused.values())
    assert {name.split('/')[1] for name in reasons} == modules
    return {*reasons.values()}

  pair = model_config.encoder_decoder(stack, STACK)
  decoder = model_config.DecoderOnlyConfig(STACK)
  assert unused(pair, decoder) == {'an encoder has no head'}
  vectors = model_config.with_head(source, heads.Embedding())
  assert unused(vectors) == {'the target has a head of embedding'}


@pytest.mark.parametrize('norm_gain', ['one_plus', 'direct'])
def test_zero_gain_leaves_the_decoders_function_unchanged(norm_gain):
  stack = dataclasses.replace(STACK, norm_gain=norm_gain)
  given = _make(WIDE, 1), _make(stack, 2)
  target = model_config.encoder_decoder(WIDE, stack)

  def logits(gain):
    return _logits(target, _adapt(target, *given, post_norm_gain=gain)[0])

  want = _logits(*given[1])
  np.testing.assert_allclose(logits('zero'), want, rtol=1e-6, atol=1e-6)
  assert np.abs(logits('one') - want).max() > 1e-2


def test_controls():
  """All weights are fresh but the embedding tables."""
  source, leaves = _make(STACK), weight_plan.all_but_embeddings(PAIR)
  got, coverage = _adapt(PAIR, source, fresh=leaves)
  fresh = _fresh(PAIR)
  for side in ('encoder', 'decoder'):
    fresh[side]['embedder'] = source[1]['decoder']['embedder']
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, fresh
  )
  copied = [n for n, f in coverage.filled.items() if f.how == 'copied']
  assert copied == ['encoder/embedder/table', 'decoder/embedder/table']
  reasons = set(coverage.unused['decoder_source'].values())
  assert 'decoder/layers/1/mlp/up is drawn fresh' in reasons


def test_padding_rows_are_added_and_dropped():
  padded = dataclasses.replace(STACK, vocab_multiple=8)  # 16 rows
  for stack, pair in ((padded, (STACK, padded)), (STACK, (padded, padded))):
    given = _make(stack)
    got, coverage = _adapt(model_config.encoder_decoder(*pair), given)
    table = given[1]['decoder']['embedder']['table']
    for side in ('encoder', 'decoder'):
      found = got[side]['embedder']['table']
      np.testing.assert_array_equal(found[:11], table[:11])
    fill = coverage.filled['encoder/embedder/table'].describe()
    assert '5 padding rows ' in fill


def test_an_untied_head_is_the_sources_or_its_extended_table():
  untied = dataclasses.replace(STACK, head=toy_models.UNTIED)
  given, target = _make(untied), model_config.encoder_decoder
  got, _ = _adapt(target(untied, untied), given)
  np.testing.assert_array_equal(
    got['decoder']['head']['table'], given[1]['decoder']['head']['table']
  )
  more = dataclasses.replace(untied, vocab_size=13)
  got, _ = _adapt(target(STACK, more), _make(STACK))
  tables = [got['decoder'][part]['table'] for part in ('head', 'embedder')]
  assert tables[0].shape == (13, 8)
  np.testing.assert_array_equal(*tables)


def test_new_tokens_are_the_mean():
  stack = dataclasses.replace(STACK, head=toy_models.UNTIED, vocab_multiple=8)
  given = _make(stack)  # 16 rows, 5 of them padding.
  more = dataclasses.replace(stack, vocab_size=18)
  target = model_config.encoder_decoder(more, more)
  params, coverage = _adapt(
    target, given, cross_attention='fresh', post_norm_gain='zero'
  )
  theirs = np.asarray(given[1]['decoder']['embedder']['table'])
  for side in ('encoder', 'decoder'):
    table = params[side]['embedder']['table']
    assert table.shape == (24, 8)
    np.testing.assert_array_equal(table[:11], theirs[:11])
    np.testing.assert_allclose(
      table[11:18], np.tile(theirs[:11].mean(0), (7, 1)), atol=1e-6
    )
    assert not np.any(table[18:])
  fill = coverage.filled['decoder/head/table'].describe()
  assert fill.endswith('(7 new tokens, the mean of the 11)')
  # The tokens that were there are predicted as before, the new ones with the
  # mean of their logits (before the soft-cap, which is far away here).
  got, want = _logits(target, params), np.asarray(_logits(*given))
  np.testing.assert_allclose(got[..., :11], want, atol=1e-5)
  uncapped = 30 * np.arctanh(want / 30)
  mean = 30 * np.tanh(uncapped.mean(-1) / 30)
  np.testing.assert_allclose(got[..., 12], mean, atol=1e-4)


def test_repeated_key_value_heads_compute_the_same():
  stack = dataclasses.replace(STACK, attention_bias='qkv')
  given = _make(stack)
  more = dataclasses.replace(stack, kv_heads=4)
  target = model_config.encoder_decoder(more, more)
  params, coverage = _adapt(target, given)
  fill = coverage.filled['encoder/layers/2/attention/value']
  assert fill.describe().endswith('(each key/value head 2 times)')
  assert 'encoder.kv_heads is 4, in encoder_source 2' in coverage.changes
  plain = model_config.encoder_decoder(stack, stack)
  want, _ = _adapt(plain, given)
  np.testing.assert_allclose(
    _logits(target, params), _logits(plain, want), atol=1e-5
  )


def test_a_shared_table_is_taken_once():
  given = _make(STACK)
  target = model_config.encoder_decoder(STACK, STACK, shared_table=True)
  params, coverage = _adapt(target, given)
  assert 'embedder' not in params['encoder']
  assert coverage.unused['encoder_source'] == {
    'decoder/embedder/table': "the encoder reads the decoder's table"
  }
  assert "the encoder reads the decoder's embedding table" in coverage.changes
  # Equal tables, shared or not, are the same function.
  want, _ = _adapt(PAIR, given)
  np.testing.assert_allclose(
    _logits(target, params), _logits(PAIR, want), atol=1e-6
  )


@pytest.mark.parametrize(
  'stack, shared', [(STACK, True), (LLAMA, False)], ids=['gemma', 'llama']
)
def test_merged_attention_is_the_decoders_own(stack, shared):
  given = _make(stack)
  target = model_config.encoder_decoder(
    stack, stack, cross_merged=True, shared_table=shared
  )
  params, coverage = _adapt(target, given)
  assert {fill.how for fill in coverage.filled.values()} == {'copied'}
  assert not any('cross' in leaf for leaf in coverage.filled)
  _assert_equal(_by_name(target, params), _by_name(*given))
  # Where there is nothing to read, it computes what its source did.
  nothing = (TOKENS[0], jnp.zeros_like(TOKENS[1]), TOKENS[2])
  want = _logits(*given)
  np.testing.assert_allclose(_logits(target, params, nothing), want, atol=1e-5)
  assert np.abs(_logits(target, params) - want).max() > 1e-2


def test_the_eoi_vector_of_t5gemma2_is_the_tokens_embedding():
  stack = dataclasses.replace(STACK, qk_norm=True)
  given = _make(stack)
  target = model_config.t5gemma2(stack, stack, eoi_token=7)
  params, coverage = _adapt(target, given)
  table = given[1]['decoder']['embedder']['table']
  np.testing.assert_allclose(
    params['decoder']['embedder']['eoi'], table[7] * np.sqrt(8), rtol=1e-6
  )
  assert coverage.filled['decoder/embedder/eoi'].describe() == (
    'copied from decoder_source decoder/embedder/table (the embedding of the'
    ' token; row 7 times 2.82843)'
  )
  changed = "encoder.window_rule is 'centered', in encoder_source 'exclusive'"
  assert changed in coverage.changes
  without = dataclasses.replace(
    target,
    encoder=dataclasses.replace(target.encoder, eoi_token=None),
    decoder=dataclasses.replace(target.decoder, eoi_token=None),
  )
  want, _ = _adapt(without, given)
  tokens = (TOKENS[0].at[:, 2].set(7), *TOKENS[1:])
  np.testing.assert_allclose(
    _logits(target, params, tokens, tokens),
    _logits(without, want, tokens, tokens),
    atol=1e-4,  # A vector that is not scaled differs by far more.
  )


def test_a_causal_encoder_computes_what_its_source_did():
  given = _make(STACK)
  target = model_config.encoder_decoder(STACK, STACK, causal_encoder=True)
  params, coverage = _adapt(target, given)
  assert not any('role' in change for change in coverage.changes)
  want = build.build(given[0]).decode(given[1], *TOKENS)
  found, both = (
    build.build(config).encode(params, *TOKENS) for config in (target, PAIR)
  )
  np.testing.assert_allclose(found, want, atol=1e-5)
  assert np.abs(both - want).max() > 1e-2


@pytest.mark.parametrize('shared', [False, True])
@pytest.mark.parametrize('role', ['causal', 'prefix', 'bidirectional'])
def test_a_single_stack_starts_from_that_of_a_pair(role, shared):
  source = model_config.encoder_decoder(STACK, STACK, shared_table=shared)
  given = source, toy_models.params(source, 1)
  stack = dataclasses.replace(STACK, role=role)
  target = model_config.DecoderOnlyConfig(stack)
  params, coverage = _adapt(target, given)
  side, left = 'decoder', 'encoder'
  if role == 'bidirectional':
    side, left = left, side
  theirs = _by_name(*given)
  table = 'decoder' if shared else side
  for name, array in _by_name(target, params).items():
    stack = table if '/embedder/' in name else side
    expected = theirs[stack + name.removeprefix('decoder')]
    np.testing.assert_array_equal(array, expected, err_msg=name)
  # All of the other stack is unused, and cross-attention with its norms.
  reasons = {f'the target has no {left}'}
  if side == 'decoder':
    reasons.add('the target has no cross-attention')
  unused = coverage.unused['decoder_source']
  assert {*unused.values()} == reasons
  assert 'decoder/embedder/table' not in unused or table == 'encoder'


def test_fewer_layers_are_every_other_one_of_each_kind():
  deep = dataclasses.replace(STACK, layers=8)
  for pattern, expected in (
    (('global',), [0, 2, 4, 6]),
    (('local', 'global'), [0, 3, 4, 7]),
    (('local', 'local', 'local', 'global'), [0, 2, 4, 7]),
  ):
    deep = dataclasses.replace(deep, pattern=pattern)
    half = dataclasses.replace(deep, layers=4)
    coverage = weight_plan.make_plan(
      model_config.encoder_decoder(half, deep),
      model_config.DecoderOnlyConfig(deep),
    )
    layers = [
      coverage.filled[f'encoder/layers/{i}/mlp/up'].leaf.split('/')[2]
      for i in range(4)
    ]
    assert layers == [str(layer) for layer in expected]
    text = ', '.join(layers)
    assert (
      f'the encoder has layers {text} of encoder_source' in coverage.changes
    )
    unused = coverage.unused['encoder_source']
    assert {*unused.values()} == {'the encoder has 4 of its 8 layers'}
    assert not coverage.unused['decoder_source']
    assert '  encoder/layers/0-3/mlp/up ' in coverage.table()


def test_fewer_layers_have_the_weights_of_their_sources():
  deep = dataclasses.replace(STACK, layers=8)
  source = _make(deep)
  target = model_config.DecoderOnlyConfig(dataclasses.replace(deep, layers=4))
  found, theirs = _by_name(target, _adapt(target, source)[0]), _by_name(*source)
  for i, layer in enumerate((0, 3, 4, 7)):
    for part in ('mlp/down', 'attention/key', 'pre_attention_norm/scale'):
      np.testing.assert_array_equal(
        found[f'decoder/layers/{i}/{part}'],
        theirs[f'decoder/layers/{layer}/{part}'],
      )


# Changes of stacks, of the pair and of the plan's options; and the error.
MISFITS = [
  ({'encoder.kv_heads': 1}, 'kv_heads is 1, no multiple of the 2'),
  ({'encoder.vocab_size': 10}, 'vocab_size is 10, .* not cut'),
  ({'encoder.qk_norm': True}, 'no .*encoder.qk_norm is True'),
  ({'encoder.post_norms': False}, 'encoder_source has no .*post_norms'),
  ({'encoder.layers': 4}, 'has 4 layers and encoder_source'),
  (
    {'encoder.layers': 2, 'encoder.pattern': ('global',)},
    'has 2 layers and encoder_source has 3: .*kind',
  ),
  ({'decoder.mlp_width': 16}, r'layers/0/mlp/\w+ has shape \['),
  ({'encoder.width': 12, 'plan.cross_attention': 'copy'}, 'are 12 and 8'),
  ({'plan.post_norm_gain': 'zero'}, "cross_attention='fresh'"),
  (
    {
      'decoder.post_norms': False,
      'plan.cross_attention': 'fresh',
      'plan.post_norm_gain': 'zero',
    },
    'needs a decoder with norms',
  ),
  (
    {'pair.cross_merged': True, 'plan.cross_attention': 'fresh'},
    'weights of its own',
  ),
  (
    {'pair.cross_merged': True, 'plan.post_norm_gain': 'zero'},
    'weights of its own',
  ),
  ({'source.head': toy_models.UNTIED}, 'head.tied to False'),
  (
    {f'all.{key}': value for key, value in toy_models.T5.items()},
    'would mean other distances',
  ),
  # Both tables have 16 rows: padding cannot hide another vocabulary.
  ({'all.vocab_multiple': 8, 'source.vocab_size': 13}, 'not cut'),
  (
    {
      'all.eoi_token': 4,
      'source.eoi_token': 3,
      'pair.cross_merged': True,
      'pair.shared_table': True,
    },
    'to another token',
  ),
]


@pytest.mark.parametrize('changes, message', MISFITS, ids=str)
def test_targets_that_the_sources_cannot_fill(changes, message):
  def of(part):
    names = ((name.split('.'), value) for name, value in changes.items())
    return {name: value for (where, name), value in names if where == part}

  source, encoder, decoder = (
    dataclasses.replace(STACK, **(of('all') | of(part)))
    for part in ('source', 'encoder', 'decoder')
  )
  target = model_config.encoder_decoder(encoder, decoder, **of('pair'))
  with pytest.raises(errors.UserError, match=message):
    weight_plan.make_plan(
      target, model_config.DecoderOnlyConfig(source), **of('plan')
    )
