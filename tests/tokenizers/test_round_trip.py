"""Every vocabulary gives back every text, and reads no special id in one."""

import unicodedata

import hypothesis
from hypothesis import strategies
import numpy as np
import pytest

from encdec_adapt.tokenizers import vocabulary_pair
from tests import tiny_tokenizers

SPELLED_OUT = (
  '<pad><eos> <bos><unk>\n<mask><unused3> <s></s><|im_start|><|endoftext|> '
  '<|begin_of_text|><|eot_id|><|reserved_special_token_3|><start_of_turn>'
  '[R][S][X] <0x41> <2mass> \u2581 \u2585 \u2047'
)


@pytest.fixture(
  scope='module',
  params=['bytes', 'unigram', 'bpe', 'llama3', 'qwen', 'gemma', 'llama2'],
)
def vocabulary(request, tiny_folder, tmp_path_factory):
  path = request.param
  if path in ('unigram', 'bpe'):
    file = tmp_path_factory.mktemp('vocabulary') / 'a.model'
    path = tiny_tokenizers.train(file, 512, model_type=path)
  elif path != 'bytes':
    path = tiny_folder(path)
  return vocabulary_pair.open_vocabulary(path)


@hypothesis.settings(
  deadline=None,
  max_examples=80,
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.example(SPELLED_OUT)
@hypothesis.given(
  strategies.lists(
    strategies.text(max_size=12)
    | strategies.sampled_from(
      ['\0', '\t', '\n', '\r\n', ' ', '   ', '\u2581', '\u2585', '\ufeff']
      + ['\u3000', '\ufb01', 'A\u030a', '\ufffd', '\U0010ffff', '\x1c']
      + ['<eos>', '<unused0>', '[S]', '<0x0A>', '<s>', '<|im_end|>']
      + ['<tool_call>', '12345', 'def f(self):']
    ),
    max_size=8,
  ).map(''.join)
)
def test_any_text_comes_back(vocabulary, text):
  want, composes = text, 'NFC' in vocabulary.note
  if composes:
    want = unicodedata.normalize('NFC', text)
  if 'U+2581' in vocabulary.note:
    want = text.replace('\u2581', ' ')
  ids, boundaries = vocabulary.encode_with_boundaries(text)
  np.testing.assert_array_equal(ids, vocabulary.encode(text))
  assert ids.dtype == np.int32 and vocabulary.decode(ids) == want
  data = b''.join(map(vocabulary.bytes_of, ids.tolist()))
  # Llama 2's tokenizer prepends a space.
  assert data.decode() in (want, f' {want}')
  assert not np.isin(ids, list(vocabulary.specials.values())).any()
  shown = vocabulary.decode([vocabulary.bos, *ids], show_special=True)
  assert shown == vocabulary.piece(vocabulary.bos) + want
  # Boundaries: in order, and the text before each is that of the ids before.
  assert len(boundaries) == len(ids) + 1
  assert boundaries[-1] == len(text)
  at_characters = np.flatnonzero(boundaries >= 0)
  assert (np.diff(boundaries[at_characters]) >= 0).all()
  for i in at_characters[: 0 if composes else 4]:
    assert vocabulary.decode(ids[:i]) == want[: boundaries[i]]
