"""config.json of T5 and its kin, and back; refusals."""

import pytest

from encdec_adapt.base import errors
from encdec_adapt.huggingface import config_json
from encdec_adapt.models import model_config, presets

SIZES = dict(
  vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4
)


def read(kind, **fields):
  raw = {'model_type': kind, **SIZES, **fields}
  return config_json.model_from_raw(raw, 'here')[0]


@pytest.mark.parametrize('scaled', [None, False, True])
@pytest.mark.parametrize('tied', [False, True])
def test_scaling_and_tying_are_told_apart(tied, scaled):
  fields = {} if scaled is None else {'scale_decoder_outputs': scaled}
  model = read('t5', tie_word_embeddings=tied, **fields)
  assert model.decoder.head.tied == tied
  assert model.decoder.head.scaled == (tied if scaled is None else scaled)
  raw, _ = config_json.raw_from_model(model)
  assert raw['tie_word_embeddings'] == tied
  assert config_json.model_from_raw(raw)[0] == model


@pytest.mark.parametrize('kind', ['t5', 'mt5', 'umt5'])
@pytest.mark.parametrize('role', ['ForConditionalGeneration', 'EncoderModel'])
def test_exports_keep_the_class_of_the_source(kind, role):
  prefix = {'t5': 'T5', 'mt5': 'MT5', 'umt5': 'UMT5'}[kind]
  source = {'architectures': [prefix + role], 'pad_token_id': 7}
  source |= {'tie_word_embeddings': False, 'feed_forward_proj': 'gated-silu'}
  source = {'model_type': kind, **SIZES, **source}
  model = config_json.model_from_raw(source)[0]
  raw = config_json.with_fields(
    config_json.raw_from_model(model)[0], config_json.carried_fields(source)
  )
  assert (raw['model_type'], raw['architectures']) == (kind, [prefix + role])
  pair = role != 'EncoderModel'
  assert raw.get('decoder_start_token_id') == (7 if pair else None)
  assert config_json.model_from_raw(raw)[0] == model


def test_a_decoder_starts_with_the_bos_of_its_vocabulary():
  raw, _ = config_json.raw_from_model(presets.t5('t5_small'))
  for ids, start in (({'pad_token_id': 6}, 6), ({'bos_token_id': 8}, 8)):
    found = config_json.with_fields(raw, {'decoder': ids})
    assert found['decoder_start_token_id'] == start


@pytest.mark.parametrize(
  'kind, fields, message',
  [
    ('longt5', {}, "'longt5'.* LongT5 and mLongT5 attend"),
    ('switch_transformers', {}, "'switch_transformers'.* drop tokens"),
    ('t5', {'d_kv': None}, 'here has d_kv = None'),
    ('t5', {'feed_forward_proj': 'gated-tanh'}, 'feed_forward_proj'),
    ('t5', {'relative_attention_num_buckets': 7}, 'positions.buckets is 7'),
  ],
)
def test_refusals(kind, fields, message):
  with pytest.raises(errors.UserError, match=message):
    read(kind, **fields)


def test_a_window_that_no_layer_uses():
  model = presets.t5('t5_small', window=64)
  raw, _ = config_json.raw_from_model(model)
  assert config_json.model_from_raw(raw)[0] == presets.t5('t5_small')


def test_models_of_no_class():
  stack = presets.t5('t5_small').decoder
  other = dict(norm_gain='one_plus')
  pair = presets.t5('t5_small', **other)
  causal = model_config.without_cross_attention(stack)
  for model, words in (
    (pair, 'norm_gain is .direct'),
    (causal, 'role is .bidirectional'),
  ):
    with pytest.raises(errors.UserError, match=words):
      config_json.raw_from_model(model)
    raw = config_json.native_from_model(model)
    assert config_json.model_from_raw(raw)[0] == model
    assert 'auto_map' not in raw  # Torch code has no relative positions.
