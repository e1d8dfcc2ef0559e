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
# (pad, eos, bos) by name, with tokenizer_config.json and without it.
ROLES = {
  'llama3': ('<|finetune_right_pad_id|>', '<|end_of_text|>',
             '<|begin_of_text|>'),
  'qwen': ('<|endoftext|>', '<|im_end|>', '<|endoftext|>'),
  'gemma': ('<pad>', '<eos>', '<bos>'),
  'llama2': ('</s>', '</s>', '<s>'),
}  # fmt: skip
NO_MODEL = {
  'model': {'vocab': {'a': 0}},
  'added_tokens': [
    {'content': '<s>', 'id': 1, 'special': True},
    {'content': '</s>', 'id': 2, 'special': True},
  ],
}
SPELLED_OUT = (
  '<pad><eos> <bos><unk>\n<mask><unused3> <s></s><|im_start|><|endoftext|> '
  '<|begin_of_text|><|eot_id|><|reserved_special_token_3|><start_of_turn>'
)


@pytest.fixture(scope='module', params=ROLES)
def family(request):
  return request.param


@pytest.fixture(scope='module')
def folder(family, tmp_path_factory):
  path = tmp_path_factory.mktemp(family) / 'model'
  return tiny_tokenizers.save(path, family, TEXTS, SIZE)


@pytest.fixture(scope='module')
def vocabulary(folder):
  return vocabularies.open_vocabulary(folder)


def test_special_ids_are_found_by_name(family, vocabulary):
  names = [vocabulary.piece(getattr(vocabulary, r)) for r in ('pad', 'eos')]
  assert (*names, vocabulary.piece(vocabulary.bos)) == ROLES[family]
  described = vocabulary.describe()
  assert described['special_tokens']['bos']['token'] == ROLES[family][2]
  assert described['size'] == vocabulary.size
  assert described['fingerprint'] == vocabulary.fingerprint


def test_sentinels_and_modes(family, vocabulary):
  found = [vocabulary.piece(i) for i in vocabulary.sentinels]
  modes = [vocabulary.piece(i) for i in vocabulary.mode_ids.values()]
  if family == 'gemma':
    assert found == [f'<unused{i}>' for i in range(96)]
    assert modes == [f'<unused{i}>' for i in (96, 97, 98)]
  elif family == 'llama3':
    # In the order of their numbers, which is not that of their ids.
    assert found == [f'<|reserved_special_token_{i}|>' for i in range(9)]
    assert modes == [f'<|reserved_special_token_{i}|>' for i in (9, 10, 11)]
  else:
    assert not found and not modes


def test_what_is_lost_is_said(family, vocabulary):
  note = {
    'llama3': '',
    'qwen': 'composes accents (Unicode NFC)',
    'gemma': 'turns the character U+2581 into a space',
    'llama2': 'turns the character U+2581 into a space',
  }[family]
  assert vocabulary.note == note


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


def test_what_goes_on_keeps_its_space(vocabulary):
  ids, boundaries = vocabulary.encode_with_boundaries('a b')
  at = int(np.flatnonzero(boundaries == 1)[0])
  assert vocabulary.decode(ids[at:], start=False) == ' b'


def test_roles_without_a_config_are_known_by_name(family, tmp_path):
  folder = tiny_tokenizers.save(tmp_path, family, TEXTS, SIZE, config=False)
  bare = vocabularies.open_vocabulary(folder)
  found = [bare.piece(i) for i in (bare.pad, bare.eos, bare.bos)]
  want = list(ROLES[family])
  if family == 'qwen':  # Of a base model, which has one for all.
    want = ['<|endoftext|>'] * 3
  assert found == want


@pytest.mark.parametrize(
  'name, content',
  [
    ('special_tokens_map.json', {'eos_token': {'content': '<|eot_id|>'}}),
    ('config.json', {'eos_token_id': ['ID', 3]}),
  ],
)
def test_other_files_name_special_tokens(tmp_path, name, content):
  folder = tiny_tokenizers.save(
    tmp_path / 'a', 'llama3', TEXTS, SIZE, config=False
  )
  plain = vocabularies.open_vocabulary(folder)
  eot = plain.specials['<|eot_id|>']
  text = json.dumps(content).replace('"ID"', str(eot))
  (folder / name).write_text(text)
  named = vocabularies.open_vocabulary(folder)
  assert named.eos == eot != plain.eos
  assert named.fingerprint != plain.fingerprint
  assert named.tokens_digest == plain.tokens_digest
  assert [file.name for file in named.files] == ['tokenizer.json', name]


def test_a_negative_id_names_none(tmp_path):
  """As the first Llamas' config.json says that they have no padding."""
  folder = tiny_tokenizers.save(
    tmp_path / 'a', 'llama2', TEXTS, SIZE, config=False
  )
  plain = vocabularies.open_vocabulary(folder)
  (folder / 'config.json').write_text('{"pad_token_id": -1}')
  assert vocabularies.open_vocabulary(folder).ids == plain.ids


@pytest.mark.parametrize(
  'files, message',
  [
    ({'tokenizer.json': '{'}, 'tokenizer.json'),
    ({'tokenizer.json': '{"of": "x"}'}, 'a damaged one .*model'),
    ({'tokenizer.json': json.dumps(NO_MODEL)}, 'a damaged one'),
    ({'tokenizer_config.json': '{'}, 'tokenizer_config.json'),
    ({'tokenizer_config.json': '{"eos_token": "a"}'}, "has eos 'a', which"),
    ({'config.json': '{"bos_token_id": 5}'}, 'config.json beside it has bos 5'),
  ],
)
def test_files_that_cannot_serve_are_refused(tmp_path, files, message):
  folder = tiny_tokenizers.save(
    tmp_path / 'a', 'llama3', TEXTS, SIZE, config=False
  )
  for name, text in files.items():
    (folder / name).write_text(text)
  with pytest.raises(errors.UserError, match=message):
    vocabularies.open_vocabulary(folder)


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
