"""Options of adaptation: what each does to the weights and to the function."""

import dataclasses

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from encdec_adapt.adaptation import initialise, recipes, weight_plan
from encdec_adapt.cli import errors
from encdec_adapt.models import build, layer_leaves, model_config, parameters
from tests.adaptation import sources

STACK, RNG = sources.STACK, sources.RNG
LLAMA = model_config.StackConfig(
  layers=2,
  width=8,
  mlp_width=12,
  heads=2,
  kv_heads=2,
  head_dim=4,
  vocab_size=9,
  pattern=('global',),
  query_scale=4.0,
  norm_gain='direct',
  post_norms=False,
  scale_embeddings=False,
  attention_softcap=None,
  final_softcap=None,
  activation='silu',
  tied_head=False,
)
QWEN = dataclasses.replace(
  LLAMA,
  layers=3,
  width=12,
  heads=4,
  vocab_size=13,
  attention_bias='qkv',
  tied_head=True,
  qk_norm=True,
)


@pytest.fixture(autouse=True)
def _quick_init(monkeypatch):
  monkeypatch.setattr(parameters, 'init', sources.quick_init)


def _tokens(length=7, vocabulary=11, seed=3):
  tokens = jax.random.randint(jax.random.key(seed), (2, length), 0, vocabulary)
  positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
  return tokens, jnp.ones_like(tokens), positions


@jax.jit(static_argnames='config')
def _encoded(config, params, tokens):
  return build.build(config).encode(params, *tokens)


@jax.jit(static_argnames='config')
def _logits(config, params, encoder, decoder):
  model = build.build(config)
  encoded = model.encode(params, *encoder)
  hidden = model.decode(params, *decoder, encoded, encoder[1])
  return model.logits(params, hidden)


@jax.jit(static_argnames='config')
def _source_logits(config, params, tokens):
  model = build.build(config)
  return model.logits(params, model.decode(params, *tokens))


def _adapted(target, *given, **options):
  """Parameters of the target and the coverage report."""
  return initialise.initialise(target, *given, rng=RNG, **options)


def test_more_key_value_heads():
  """Repeated heads compute the same function, biases included."""
  stack = dataclasses.replace(STACK, attention_bias='qkv')
  given = sources.make(stack)
  more = dataclasses.replace(stack, kv_heads=4)
  target = model_config.encoder_decoder(more, more)
  params, coverage = _adapted(target, given)
  assert coverage.parameters()['fresh'] == 0
  key = params['encoder']['blocks']['layer_0']['attention']['key']
  theirs = given[1]['decoder']['blocks']['layer_0']['attention']['key']
  assert key.shape == (1, 8, 4, 4)
  for head in range(4):
    np.testing.assert_array_equal(key[:, :, head], theirs[:, :, head // 2])
  fill = coverage.filled['encoder/layers/2/attention/value']
  assert fill.describe().endswith('(each key/value head 2 times)')
  assert 'encoder.kv_heads is 4, in encoder_source 2' in coverage.changes

  plain = model_config.encoder_decoder(stack, stack)
  want, _ = _adapted(plain, given)
  np.testing.assert_allclose(
    _logits(target, params, _tokens(), _tokens(5, seed=4)),
    _logits(plain, want, _tokens(), _tokens(5, seed=4)),
    atol=1e-5,
  )


def test_a_shared_table_is_taken_once():
  given = sources.make(STACK)
  target = model_config.encoder_decoder(STACK, STACK, shared_table=True)
  params, coverage = _adapted(target, given)
  assert 'embedder' not in params['encoder']
  assert coverage.unused == {
    'encoder_source': {
      'decoder/embedder/table': "the encoder reads the decoder's table"
    },
    'decoder_source': {},
  }
  assert "the encoder reads the decoder's embedding table" in coverage.changes
  # Equal tables, shared or not, are the same function.
  plain = model_config.encoder_decoder(STACK, STACK)
  want, _ = _adapted(plain, given)
  np.testing.assert_allclose(
    _logits(target, params, _tokens(), _tokens(5, seed=4)),
    _logits(plain, want, _tokens(), _tokens(5, seed=4)),
    atol=1e-6,
  )


@pytest.mark.parametrize(
  'stack, shared', [(STACK, True), (LLAMA, False)], ids=['gemma', 'llama']
)
def test_merged_attention_is_the_decoders_own(stack, shared):
  given = sources.make(stack)
  target = model_config.encoder_decoder(
    stack, stack, cross_merged=True, shared_table=shared
  )
  params, coverage = _adapted(target, given)
  assert (
    coverage.parameters()['fresh'] == coverage.parameters()['constant'] == 0
  )
  assert not any('cross' in leaf for leaf in coverage.filled)
  decoder = sources.by_name(target, params)
  for name, array in sources.by_name(*given).items():
    np.testing.assert_array_equal(decoder[name], array, err_msg=name)
  # Where there is nothing to read, it computes what its source did.
  encoder, tokens = _tokens(vocabulary=9), _tokens(5, vocabulary=9, seed=4)
  nothing = (encoder[0], jnp.zeros_like(encoder[1]), encoder[2])
  want = _source_logits(*given, tokens)
  np.testing.assert_allclose(
    _logits(target, params, nothing, tokens), want, atol=1e-5
  )
  read = _logits(target, params, encoder, tokens)
  assert np.abs(read - want).max() > 1e-2


def test_the_eoi_vector_of_t5gemma2_is_the_tokens_embedding():
  stack = dataclasses.replace(STACK, qk_norm=True)
  given = sources.make(stack)
  target = model_config.t5gemma2(stack, stack, eoi_token=7)
  params, coverage = _adapted(target, given)
  table = given[1]['decoder']['embedder']['table']
  np.testing.assert_allclose(
    params['decoder']['embedder']['eoi'], table[7] * np.sqrt(8), rtol=1e-6
  )
  fill = coverage.filled['decoder/embedder/eoi'].describe()
  assert fill == (
    'copied from decoder_source decoder/embedder/table (the embedding of the'
    ' token; row 7 times 2.82843)'
  )
  assert "encoder.window_rule is 'centered', in encoder_source 'exclusive'" in (
    coverage.changes
  )
  tokens = _tokens()
  tokens = (tokens[0].at[:, 2].set(7), *tokens[1:])
  without = dataclasses.replace(
    target,
    encoder=dataclasses.replace(target.encoder, eoi_token=None),
    decoder=dataclasses.replace(target.decoder, eoi_token=None),
  )
  want, _ = _adapted(without, given)
  np.testing.assert_allclose(
    _logits(target, params, tokens, tokens),
    _logits(without, want, tokens, tokens),
    atol=1e-4,  # A vector that is not scaled differs by far more.
  )


def test_new_tokens_are_the_mean():
  stack = dataclasses.replace(STACK, tied_head=False, vocab_multiple=8)
  given = sources.make(stack)  # 16 rows, 5 of them padding.
  more = dataclasses.replace(stack, vocab_size=18)
  target = model_config.encoder_decoder(more, more)
  params, coverage = _adapted(
    target, given, cross_attention='fresh', post_norm_gain='zero'
  )
  theirs = np.asarray(given[1]['decoder']['embedder']['table'])
  for stack_name in ('encoder', 'decoder'):
    table = params[stack_name]['embedder']['table']
    assert table.shape == (24, 8)
    np.testing.assert_array_equal(table[:11], theirs[:11])
    np.testing.assert_allclose(
      table[11:18], np.tile(theirs[:11].mean(0), (7, 1)), atol=1e-6
    )
    assert not np.any(table[18:])
  for leaf in ('encoder/embedder/table', 'decoder/head/table'):
    fill = coverage.filled[leaf].describe()
    assert fill.endswith('(7 new tokens, the mean of the 11)')
  # The tokens that were there are predicted as before, the new ones with the
  # mean of their logits (before the soft-cap, which is far away here).
  got = _logits(target, params, _tokens(), _tokens(5, seed=4))
  want = np.asarray(_source_logits(*given, _tokens(5, seed=4)))
  assert got.shape == (2, 5, 18)
  np.testing.assert_allclose(got[..., :11], want, atol=1e-5)
  uncapped = 30 * np.arctanh(want / 30)
  mean = 30 * np.tanh(uncapped.mean(-1) / 30)
  np.testing.assert_allclose(got[..., 12], mean, atol=1e-4)


def test_an_untied_head_starts_as_the_extended_table():
  given = sources.make(STACK)
  more = dataclasses.replace(STACK, vocab_size=13, tied_head=False)
  target = model_config.encoder_decoder(STACK, more)
  decoder = _adapted(target, given)[0]['decoder']
  assert decoder['head']['table'].shape == (13, 8)
  np.testing.assert_array_equal(
    decoder['head']['table'], decoder['embedder']['table']
  )


def test_a_causal_encoder_computes_what_its_source_did():
  given = sources.make(STACK)
  target = model_config.encoder_decoder(STACK, STACK, causal_encoder=True)
  params, coverage = _adapted(target, given)
  assert not any('role' in change for change in coverage.changes)
  tokens = _tokens()
  encoded = _encoded(target, params, tokens)
  source = build.build(given[0])
  want = jax.jit(lambda params: source.decode(params, *tokens))(given[1])
  np.testing.assert_allclose(encoded, want, atol=1e-5)
  both = model_config.encoder_decoder(STACK, STACK)
  assert np.abs(_encoded(both, params, tokens) - want).max() > 1e-2


def test_two_families_in_one_pair():
  """Other widths, norms, activations, biases and vocabularies."""
  given = sources.make(LLAMA, 1), sources.make(QWEN, 2)
  target = model_config.encoder_decoder(LLAMA, QWEN)
  params, coverage = _adapted(target, *given)
  filled = sources.by_name(target, params)
  decoder = sources.by_name(*given[1])
  for name, array in decoder.items():
    np.testing.assert_array_equal(filled[name], array, err_msg=name)
  for name, array in sources.by_name(*given[0]).items():
    if name != 'decoder/head/table':
      own = 'encoder' + name.removeprefix('decoder')
      np.testing.assert_array_equal(filled[own], array, err_msg=name)
  assert coverage.unused == {
    'encoder_source': {'decoder/head/table': 'an encoder has no head'},
    'decoder_source': {},
  }
  # Cross-attention is fresh; its norm before is the decoder's, and Qwen has
  # none after.
  for layer in range(3):
    block = f'decoder/layers/{layer}'
    for part in ('query', 'key', 'value', 'output', 'query_bias', 'key_norm'):
      assert coverage.filled[f'{block}/cross_attention/{part}'].how == 'fresh'
    norm = coverage.filled[f'{block}/pre_cross_norm/scale']
    assert norm.leaf == f'{block}/pre_attention_norm/scale'
    assert f'{block}/post_cross_norm/scale' not in coverage.filled


@pytest.mark.parametrize(
  'target',
  [
    model_config.encoder_decoder(LLAMA, LLAMA, cross_merged=True),
    model_config.encoder_decoder(
      dataclasses.replace(LLAMA, vocab_size=12),
      dataclasses.replace(LLAMA, vocab_size=10, vocab_multiple=4),
      cross_layers='global',
    ),
  ],
  ids=['merged', 'extended'],
)
def test_recipes_are_the_same_in_numpy(target):
  """As `conversion` carries them out, array by array."""
  given = sources.make(LLAMA)
  want, coverage = _adapted(target, given)
  configs = dict.fromkeys(('encoder_source', 'decoder_source'), given[0])
  flat = {
    path: np.asarray(leaf)
    for path, leaf in layer_leaves.flatten_checked('source', *given).items()
  }
  trees = dict.fromkeys(configs, flat)
  made = recipes.make_recipes(target, coverage, configs)
  want = layer_leaves.flatten_checked('target', target, want)
  for path, recipe in made.items():
    array = recipe.make(trees, np)
    assert isinstance(array, np.ndarray)
    np.testing.assert_allclose(array, want[path], atol=1e-6, err_msg=path)


@pytest.mark.parametrize(
  'encoder, decoder, pair, options, message',
  [
    ({'kv_heads': 1}, {}, {}, {}, r'kv_heads is 1, no multiple of the 2'),
    ({'vocab_size': 10}, {}, {}, {}, r'vocab_size is 10, .* extended, not cut'),
    ({'qk_norm': True}, {}, {}, {}, 'no .*encoder.qk_norm is True'),
    ({'post_norms': False}, {}, {}, {}, 'encoder_source has no .*post_norms'),
    ({'layers': 4}, {}, {}, {}, 'encoder has 4 layers and encoder_source'),
    ({}, {'mlp_width': 16}, {}, {}, r'decoder/layers/0/mlp/\w+ has shape \['),
    ({'width': 12}, {}, {}, {'cross_attention': 'copy'}, 'widths are 12 and 8'),
    ({}, {}, {}, {'post_norm_gain': 'zero'}, "cross_attention='fresh'"),
    (
      {},
      {'post_norms': False},
      {},
      {'cross_attention': 'fresh', 'post_norm_gain': 'zero'},
      'needs a decoder with norms',
    ),
    *(
      ({}, {}, {'cross_merged': True}, option, 'weights of its own')
      for option in ({'cross_attention': 'fresh'}, {'post_norm_gain': 'zero'})
    ),
  ],
)
def test_targets_that_the_sources_cannot_fill(
  encoder, decoder, pair, options, message
):
  target = model_config.encoder_decoder(
    dataclasses.replace(STACK, **encoder),
    dataclasses.replace(STACK, **decoder),
    **pair,
  )
  with pytest.raises(errors.UserError, match=message):
    weight_plan.make_plan(
      target, model_config.DecoderOnlyConfig(STACK), **options
    )


def test_sources_that_the_target_has_no_place_for():
  untied = dataclasses.replace(STACK, tied_head=False)
  # Both tables have 16 rows: padding cannot hide another vocabulary.
  padded = dataclasses.replace(STACK, vocab_multiple=8)
  larger = dataclasses.replace(padded, vocab_size=13)
  eoi = dataclasses.replace(STACK, eoi_token=3)
  for source, target, message in (
    (untied, model_config.encoder_decoder(STACK, STACK), 'tied_head to False'),
    (larger, model_config.encoder_decoder(padded, padded), 'not cut'),
    (
      eoi,
      model_config.t5gemma2(eoi, eoi, eoi_token=4),
      'to another token',
    ),
  ):
    with pytest.raises(errors.UserError, match=message):
      weight_plan.make_plan(target, model_config.DecoderOnlyConfig(source))
