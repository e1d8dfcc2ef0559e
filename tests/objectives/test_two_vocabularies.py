"""PrefixLM over two vocabularies: the same text, each side in its own."""

import hypothesis
from hypothesis import strategies
import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.objectives import framing, objective_names
from encdec_adapt.tokenizers import vocabulary_pair
from tests import tiny_tokenizers

TEXTS = ['the quick brown fox jumps over a lazy dog, caf\u00e9 \U0001f600.'] * 5


@pytest.fixture(scope='module')
def opened(tmp_path_factory):
  """A Qwen-like decoder and bytes as the encoder's."""
  folder = tmp_path_factory.mktemp('qwen')
  tiny_tokenizers.save(folder, 'qwen', TEXTS, 300)
  return vocabulary_pair.Choice(str(folder), 'bytes').open()


def _split(opened, lengths=(64, 24), name='prefix_lm'):
  return objective_names.parse_one(name).make(
    framing.Lengths(*lengths),
    opened.decoder,
    encoder_vocabulary=opened.encoder,
  )


def _pairs(split, text, seed=0):
  def generator(i):
    return np.random.default_rng([seed, i])

  return list(split.pairs(text, generator))


def test_a_window_is_split_in_the_decoders_tokens(opened):
  text = 'the quick brown fox'
  ids, boundaries = opened.decoder.encode_with_boundaries(text)
  (pair,) = _pairs(_split(opened), text)
  middle = len(ids) // 2
  np.testing.assert_array_equal(pair.prefix, ids[:middle])
  np.testing.assert_array_equal(
    pair.targets, [*ids[middle:], opened.decoder.eos]
  )
  assert bytes(pair.inputs.tolist()).decode() == text[: boundaries[middle]]


def test_short_last_windows_are_dropped_and_counted(opened):
  text = 'the quick brown fox jumps over the lazy dog ' * 20
  every = _pairs(_split(opened), text)
  # In the decoder's tokens, without EOS.
  last = len(every[-1].prefix) + len(every[-1].targets) - 1
  for shortest, dropped in ((last, 0), (last + 1, 1)):
    split = _split(opened, name=f'prefix_lm:shortest={shortest}')
    assert len(_pairs(split, text)) == len(every) - dropped
    assert split.counts['short_windows'] == dropped


def test_a_split_inside_a_character_moves_before_it():
  # Bytes on both sides: a cut in half of 6 bytes is inside of the second.
  same = vocabulary_pair.open_vocabulary('bytes')
  other = vocabulary_pair.open_vocabulary('bytes', added_sentinels=1)
  split = _split(vocabulary_pair.Opened(same, other))
  (pair,) = _pairs(split, '\u00e9\u20acx')
  assert bytes(pair.inputs.tolist()).decode() == '\u00e9'
  assert pair.prefix.tolist() == pair.inputs.tolist()
  assert pair.targets.tolist() == [*'\u20acx'.encode(), same.eos]


@hypothesis.settings(
  deadline=None,
  max_examples=80,
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(
  text=strategies.lists(
    strategies.text(max_size=6)
    | strategies.sampled_from(['the quick ', 'brown fox', '\U0001f600', ' ']),
    min_size=1,
    max_size=25,
  )
  .map(''.join)
  .filter(bool),
  lengths=strategies.tuples(
    strategies.integers(4, 40), strategies.integers(3, 30)
  ),
  name=strategies.sampled_from(
    ['prefix_lm', 'prefix_lm_uniform', 'reverse_prefix_lm']
  ),
  turned=strategies.booleans(),
)
def test_any_document(opened, text, lengths, name, turned):
  if turned:
    opened = vocabulary_pair.Opened(opened.encoder, opened.decoder)
  split = _split(opened, lengths, name)
  pairs = _pairs(split, text)
  tokens = []
  for i, pair in enumerate(pairs):
    ends = i == len(pairs) - 1
    assert pair.positions(split.lengths)[0] <= lengths[0]
    row = framing.frame_row([pair], split.lengths, opened.framing, teacher=True)
    framing.check_framing(framing.stack_rows([row]), opened.framing)
    assert (pair.targets[-1] == opened.decoder.eos) == ends
    targets = pair.targets[: len(pair.targets) - ends]
    parts = [*pair.prefix], [*targets]
    tokens += sum(parts[::-1] if name == 'reverse_prefix_lm' else parts, [])
    # Both prefixes are one text; a tokenizer that normalises may change it.
    inputs = opened.encoder.decode(pair.inputs)
    prefix = opened.decoder.decode(pair.prefix)
    np.testing.assert_array_equal(
      opened.decoder.encode(inputs), opened.decoder.encode(prefix)
    )
  assert tokens == opened.decoder.encode(text).tolist()


@pytest.mark.parametrize(
  'name, reason',
  [
    ('prefix_lm:concatenate', 'concatenated documents are cut in the tokens'),
    ('ul2', 'a sentinel stands for the same span on both sides'),
    ('iid_denoising', 'a sentinel stands for the same span'),
    ('bart', 'both sides read the tokens of one window'),
    ('pairs:meap=separate', 'a masked copy repeats inputs and targets'),
    ('chat:meap=concat', 'a masked copy repeats inputs and targets'),
    ('bert', 'it has no decoder'),
    ('causal_lm', 'it has no inputs for an encoder'),
  ],
)
def test_objectives_that_need_one_vocabulary_say_why(name, reason):
  with pytest.raises(errors.UserError, match=f'needs one vocabulary.*{reason}'):
    objective_names.parse_one(name).check_vocabularies()
