"""tokenizer.json of each family: ids by name, round trips, special tokens."""

import json
import pathlib
import pydoc_data.topics
import shutil
import unicodedata

import hypothesis
from hypothesis import strategies
import numpy as np
import pytest
import tokenizers

from encdec_adapt.cli import errors
from encdec_adapt.tokenizers import vocabularies
from tests import tiny_tokenizers

SIZE = 600
TEXTS = list(pydoc_data.topics.topics.values())[:20]
NFC = 'composes accents (Unicode NFC)'
SPACE = 'turns the character U+2581 into a space'
# Family -> (pad, eos, bos), sentinels, modes, and what encoding changes. The
# reserved tokens of Llama 3 are in the order of their numbers, not their ids.
FAMILIES = {
  'llama3': (
    ('<|finetune_right_pad_id|>', '<|end_of_text|>', '<|begin_of_text|>'),
    [f'<|reserved_special_token_{i}|>' for i in range(9)],
    [f'<|reserved_special_token_{i}|>' for i in (9, 10, 11)],
    '',
  ),
  'qwen': (('<|endoftext|>', '<|im_end|>', '<|endoftext|>'), [], [], NFC),
  'gemma': (
    ('<pad>', '<eos>', '<bos>'),
    [f'<unused{i}>' for i in range(96)],
    [f'<unused{i}>' for i in (96, 97, 98)],
    SPACE,
  ),
  'llama2': (('</s>', '</s>', '<s>'), [], [], SPACE),
}
SPELLED_OUT = (
  '<pad><eos> <bos><unk>\n<mask><unused3> <s></s><|im_start|><|endoftext|> '
  '<|begin_of_text|><|eot_id|><|reserved_special_token_3|><start_of_turn>'
)


@pytest.fixture(scope='module', params=FAMILIES)
def family(request):
  return request.param


@pytest.fixture(scope='module')
def folder(family, tmp_path_factory):
  path = tmp_path_factory.mktemp(family) / 'model'
  return tiny_tokenizers.save(path, family, TEXTS, SIZE)


@pytest.fixture(scope='module')
def vocabulary(folder):
  return vocabularies.open_vocabulary(folder)


def roles(vocabulary):
  ids = (vocabulary.pad, vocabulary.eos, vocabulary.bos)
  return tuple(vocabulary.piece(i) for i in ids)


def test_special_tokens_are_found_by_name(family, vocabulary):
  names, sentinels, modes, note = FAMILIES[family]
  assert roles(vocabulary) == names
  assert [vocabulary.piece(i) for i in vocabulary.sentinels] == sentinels
  assert [vocabulary.piece(i) for i in vocabulary.mode_ids.values()] == modes
  assert vocabulary.note == note
  described = vocabulary.describe()
  assert described['special_tokens']['bos']['token'] == names[2]
  assert described['size'] == vocabulary.size
  assert described['fingerprint'] == vocabulary.fingerprint


@hypothesis.settings(
  deadline=None,
  max_examples=80,
  suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(
  strategies.lists(
    strategies.text(max_size=10)
    | strategies.sampled_from(
      ['\0', '\t', '\n', '\r\n', ' ', '   ', 'A\u030a', '\ufb01', '12345']
      + ['<eos>', '<|im_end|>', '<tool_call>', '<s>', '\U0010ffff', 'def f():']
    ),
    max_size=8,
  ).map(''.join)
)
def test_any_text_comes_back(vocabulary, family, text):
  want = text
  if family == 'qwen':
    want = unicodedata.normalize('NFC', text)
  if vocabulary.note.startswith('turns'):
    want = text.replace('\u2581', ' ')
  ids, boundaries = vocabulary.encode_with_boundaries(text)
  np.testing.assert_array_equal(ids, vocabulary.encode(text))
  assert ids.dtype == np.int32 and vocabulary.decode(ids) == want
  assert not np.isin(ids, list(vocabulary.specials.values())).any()
  assert len(boundaries) == len(ids) + 1
  assert boundaries[-1] == len(text)
  places = boundaries[boundaries >= 0]
  assert (np.diff(places) >= 0).all()
  for i in np.flatnonzero(boundaries >= 0)[: 4 if family != 'qwen' else 0]:
    assert vocabulary.decode(ids[:i]) == want[: boundaries[i]]


def test_special_tokens_in_text_stay_text(vocabulary):
  ids = vocabulary.encode(SPELLED_OUT)
  assert not np.isin(ids, list(vocabulary.specials.values())).any()
  assert vocabulary.decode(ids) == SPELLED_OUT
  shown = vocabulary.decode([vocabulary.bos, *ids], show_special=True)
  assert shown == vocabulary.piece(vocabulary.bos) + SPELLED_OUT


def test_ids_that_follow_others_keep_their_space(vocabulary):
  ids, boundaries = vocabulary.encode_with_boundaries('a b')
  at = int(np.flatnonzero(boundaries == 1)[0])
  assert vocabulary.decode(ids[at:], start=False) == ' b'


def test_roles_without_a_config_are_known_by_name(family, tmp_path):
  folder = tiny_tokenizers.save(tmp_path, family, TEXTS, SIZE, config=False)
  bare = vocabularies.open_vocabulary(folder)
  # A base model of Qwen has one token for all.
  want = ('<|endoftext|>',) * 3 if family == 'qwen' else FAMILIES[family][0]
  assert roles(bare) == want


@pytest.fixture
def llama3(tmp_path):
  """A folder of a tokenizer.json alone."""
  return tiny_tokenizers.save(tmp_path, 'llama3', TEXTS, SIZE, config=False)


@pytest.mark.parametrize(
  'name, content',
  [
    ('special_tokens_map.json', {'eos_token': {'content': '<|eot_id|>'}}),
    ('config.json', {'eos_token_id': ['ID', 3]}),
  ],
)
def test_other_files_name_special_tokens(llama3, name, content):
  plain = vocabularies.open_vocabulary(llama3)
  eot = plain.specials['<|eot_id|>']
  text = json.dumps(content).replace('"ID"', str(eot))
  (llama3 / name).write_text(text)
  named = vocabularies.open_vocabulary(llama3)
  assert named.eos == eot != plain.eos
  assert named.fingerprint != plain.fingerprint
  assert named.tokens_digest == plain.tokens_digest
  assert [file.name for file in named.files] == ['tokenizer.json', name]


def test_a_negative_id_names_none(llama3):
  """As the first Llamas' config.json says that they have no padding."""
  plain = vocabularies.open_vocabulary(llama3)
  (llama3 / 'config.json').write_text('{"pad_token_id": -1}')
  assert vocabularies.open_vocabulary(llama3).ids == plain.ids


@pytest.mark.parametrize(
  'name, text, message',
  [
    ('tokenizer.json', '{', 'tokenizer.json'),
    ('tokenizer.json', '{"model": {"vocab": {}}}', 'a damaged one'),
    ('tokenizer_config.json', '{"eos_token": "a"}', "has eos 'a', which"),
    ('config.json', '{"bos_token_id": 5}', 'config.json beside it has bos 5'),
  ],
)
def test_files_that_cannot_serve_are_refused(llama3, name, text, message):
  (llama3 / name).write_text(text)
  with pytest.raises(errors.UserError, match=message):
    vocabularies.open_vocabulary(llama3)


def test_tokenizers_that_lose_text_are_refused(tmp_path):
  whole = tiny_tokenizers.make('llama3', TEXTS, SIZE)
  whole.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
    [
      tokenizers.pre_tokenizers.WhitespaceSplit(),
      tokenizers.pre_tokenizers.ByteLevel(),
    ]
  )
  whole.save(str(tmp_path / 'tokenizer.json'))
  with pytest.raises(errors.UserError, match='does not give back the text'):
    vocabularies.open_vocabulary(tmp_path)


def test_sentencepiece_comes_first(tmp_path, family, folder):
  both = pathlib.Path(shutil.copytree(folder, tmp_path / 'both'))
  (both / 'tokenizer.model').write_text('IQ== 0\nIg== 1\n')  # Llama 3's kind.
  assert vocabularies.file_in(both).name == 'tokenizer.json'
  (both / 'tokenizer.model').write_bytes(b'\n\x01')
  assert vocabularies.file_in(both).name == 'tokenizer.model'
