"""Parameter counts of released shapes, computed without allocating."""

import pytest

from encdec_adapt.base import errors
from encdec_adapt.huggingface import config_json
from encdec_adapt.models import parameters, presets


def assert_exported_as(config, name):
  raw, _ = config_json.raw_from_model(config)
  assert raw['architectures'] == [name]


@pytest.mark.parametrize(
  'name, non_embedding, total, class_name',
  [
    ('2b', 2_024_517_888, 2_614_341_888, 'Gemma2ForCausalLM'),
    ('9b', 8_324_201_984, 9_241_705_984, 'Gemma2ForCausalLM'),
    ('27b', 26_047_480_320, 27_227_128_320, 'Gemma2ForCausalLM'),
    ('gemma3_270m', 100_326_016, 268_098_176, 'Gemma3ForCausalLM'),
    ('gemma3_1b', 697_896_064, 999_885_952, 'Gemma3ForCausalLM'),
    ('gemma3_4b', 3_209_010_688, 3_880_263_168, 'Gemma3ForCausalLM'),
    ('gemma3_12b', 10_759_155_456, 11_766_034_176, 'Gemma3ForCausalLM'),
    ('gemma4_e2b', 1_877_105_920, 4_628_569_344, 'Gemma4ForCausalLM'),
    ('gemma4_e4b', 3_973_352_448, 7_463_013_376, 'Gemma4ForCausalLM'),
    ('gemma4_26b_a4b', 24_494_944_256, 25_233_141_760, 'Gemma4ForCausalLM'),
    ('gemma4_31b', 29_288_059_136, 30_697_345_280, 'Gemma4ForCausalLM'),
    ('llama2_7b', 6_476_271_616, 6_738_415_616, 'LlamaForCausalLM'),
    ('llama2_70b', 68_452_360_192, 68_976_648_192, 'LlamaForCausalLM'),
    ('llama3.2_1b', 973_146_112, 1_235_814_400, 'LlamaForCausalLM'),
    ('llama3.2_3b', 2_818_747_392, 3_212_749_824, 'LlamaForCausalLM'),
    ('llama3.1_8b', 6_979_588_096, 8_030_261_248, 'LlamaForCausalLM'),
    ('qwen2.5_0.5b', 357_898_112, 494_032_768, 'Qwen2ForCausalLM'),
    ('qwen2.5_1.5b', 1_310_340_608, 1_543_714_304, 'Qwen2ForCausalLM'),
    ('qwen2.5_3b', 2_774_773_760, 3_085_938_688, 'Qwen2ForCausalLM'),
    ('qwen2.5_7b', 6_525_621_760, 7_615_616_512, 'Qwen2ForCausalLM'),
    ('qwen3_0.6b', 440_467_456, 596_049_920, 'Qwen3ForCausalLM'),
    ('qwen3_1.7b', 1_409_410_048, 1_720_574_976, 'Qwen3ForCausalLM'),
    ('qwen3_4b', 3_633_511_936, 4_022_468_096, 'Qwen3ForCausalLM'),
    ('qwen3_8b', 6_946_075_648, 8_190_735_360, 'Qwen3ForCausalLM'),
  ],
)
def test_decoders(name, non_embedding, total, class_name):
  config = presets.decoder_only(name)
  assert parameters.count_by_stack(config)['decoder'].other == non_embedding
  assert parameters.count(config) == total
  assert_exported_as(config, class_name)


@pytest.mark.parametrize(
  'make, pair, encoder, decoder, cross, total',
  [
    (presets.t5gemma, *row)
    for row in (
      ('s_s', 20988416, 29385216, 8396800, 312517632),
      ('ml_ml', 743889024, 866632320, 122743296, 2200345344),
      ('xl_xl', 1157826560, 1560578048, 402751488, 3766980608),
      ('2b_2b', 2024517888, 2392687872, 368169984, 5596853760),
      ('9b_2b', 8324201984, 2460845312, 436327424, 12292375296),
      ('9b_9b', 8324201984, 10174191104, 1849989120, 20333401088),
    )
  ]
  + [
    (presets.t5gemma2, pair, stack, stack, 0, total)
    for pair, stack, total in (
      ('270m_270m', 100_326_016, 368_424_832),
      ('1b_1b', 697_896_064, 1_697_783_168),
      ('4b_4b', 3_209_010_688, 7_089_112_576),
    )
  ],
)
def test_pairs(make, pair, encoder, decoder, cross, total):
  config = make(pair)
  parts = parameters.count_by_stack(config)
  assert (parts['encoder'].cross, parts['encoder'].other) == (0, encoder)
  assert parts['decoder'].cross + parts['decoder'].other == decoder
  assert parts['decoder'].cross == cross
  assert parameters.count(config) == total
  family = 'T5Gemma' if make is presets.t5gemma else 'T5Gemma2'
  assert_exported_as(config, f'{family}ForConditionalGeneration')


def test_padding_rows_are_not_counted():
  config = presets.decoder_only('toy', vocab_size=100, vocab_multiple=64)
  padded = parameters.parameter_table(config)['decoder/embedder/table']
  assert padded.shape == (128, 128)
  assert parameters.count_by_stack(config)['decoder'].embeddings == 100 * 128


def test_pairs_of_sizes_with_underscores():
  config = presets.t5gemma('toy_large_toy_small', vocab_size=64)
  assert (config.encoder.layers, config.decoder.layers) == (6, 2)
  assert config.decoder.cross_width == config.encoder.width == 256
  assert config.encoder.role == 'bidirectional'
  assert config.encoder.vocab_size == config.decoder.vocab_size == 64


@pytest.mark.parametrize(
  'make, name, message',
  [
    *((presets.t5gemma, n, 'not a pair') for n in ('2b', '2b_3b', '2b_2b_2b')),
    (presets.t5gemma2, '_2b', '270m, 1b, 4b'),
    (presets.decoder_only, '3b', "no model size '3b'.*2b"),
  ],
)
def test_unknown_sizes(make, name, message):
  with pytest.raises(errors.UserError, match=message):
    make(name)
