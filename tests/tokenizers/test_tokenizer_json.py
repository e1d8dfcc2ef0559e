"""tokenizer.json of each family: ids by name, round trips, special tokens."""

import json

import numpy as np
import pytest
import tokenizers

from encdec_adapt.base import errors
from encdec_adapt.tokenizers import vocabulary_pair
from tests import tiny_tokenizers

SIZE = 600
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


@pytest.fixture(scope='module', params=FAMILIES)
def family(request):
  return request.param


def roles(vocabulary):
  ids = (vocabulary.pad, vocabulary.eos, vocabulary.bos)
  return tuple(vocabulary.piece(i) for i in ids)


def test_special_tokens_are_found_by_name(family, vocabulary):
  names, sentinels, modes, note = FAMILIES[family]
  assert roles(vocabulary) == names
  assert [vocabulary.piece(i) for i in vocabulary.sentinels] == sentinels
  assert [vocabulary.piece(i) for i in vocabulary.mode_ids.values()] == modes
  assert vocabulary.note == note
  assert vocabulary.ids.omits_bos == (family == 'qwen')
  described = vocabulary.describe()
  assert described['special_tokens']['bos']['token'] == names[2]
  assert described['size'] == vocabulary.size
  assert described['fingerprint'] == vocabulary.fingerprint


@pytest.mark.parametrize('config', [True, False])
def test_bert_frames_texts_at_both_ends(config, tmp_path):
  """The first released folders name no special tokens."""
  texts = tiny_tokenizers.TEXTS
  tiny_tokenizers.save(tmp_path, 'bert', texts, 300, config=config)
  opened = vocabulary_pair.open_vocabulary(tmp_path)
  assert roles(opened) == ('[PAD]', '[SEP]', '[CLS]')
  assert opened.piece(opened.mask) == '[MASK]'
  framed = opened.ids.frame(opened.encode('A fox'), 'encoder')
  pieces = [opened.piece(i) for i in framed]
  assert (pieces[0], pieces[-1]) == ('[CLS]', '[SEP]')
  assert opened.decode(framed[1:-1]) == 'a fox'
  assert ' and lowercases' in opened.note and 'NFC' not in opened.note


@pytest.mark.parametrize('model_type', ['roberta', 'llama'])
def test_edges_of_roberta_are_known_by_its_config(model_type, llama3, tmp_path):
  """A decoder may have the same tokenizer, and reads BOS alone."""
  content = json.loads((llama3 / 'tokenizer.json').read_text())
  ids = {x['content']: x['id'] for x in content['added_tokens']}
  cls, sep = '<|begin_of_text|>', '<|end_of_text|>'
  content['post_processor'] = {
    'type': 'RobertaProcessing',
    'sep': [sep, ids[sep]],
    'cls': [cls, ids[cls]],
    'trim_offsets': True,
    'add_prefix_space': False,
  }
  (tmp_path / 'tokenizer.json').write_text(json.dumps(content))
  (tmp_path / 'config.json').write_text(json.dumps({'model_type': model_type}))
  opened = vocabulary_pair.open_vocabulary(tmp_path)
  framed = opened.ids.frame(opened.encode('a fox'), 'encoder')
  assert framed[0] == ids[cls]
  assert (framed[-1] == ids[sep]) == (model_type == 'roberta')


def test_ids_that_follow_others_keep_their_space(vocabulary):
  ids, boundaries = vocabulary.encode_with_boundaries('a b')
  at = int(np.flatnonzero(boundaries == 1)[0])
  assert vocabulary.decode(ids[at:], start=False) == ' b'


def test_roles_without_a_config_are_known_by_name(family, tmp_path):
  folder = tiny_tokenizers.save(
    tmp_path, family, tiny_tokenizers.TEXTS, SIZE, config=False
  )
  bare = vocabulary_pair.open_vocabulary(folder)
  # A base model of Qwen has one token for all.
  want = ('<|endoftext|>',) * 3 if family == 'qwen' else FAMILIES[family][0]
  assert roles(bare) == want


@pytest.fixture
def llama3(tmp_path):
  """A folder of a tokenizer.json alone."""
  return tiny_tokenizers.save(
    tmp_path, 'llama3', tiny_tokenizers.TEXTS, SIZE, config=False
  )


@pytest.mark.parametrize(
  'name, content',
  [
    ('special_tokens_map.json', {'eos_token': {'content': '<|eot_id|>'}}),
    ('config.json', {'eos_token_id': ['ID', 3]}),
  ],
)
def test_other_files_name_special_tokens(llama3, name, content):
  plain = vocabulary_pair.open_vocabulary(llama3)
  eot = plain.specials['<|eot_id|>']
  text = json.dumps(content).replace('"ID"', str(eot))
  (llama3 / name).write_text(text)
  named = vocabulary_pair.open_vocabulary(llama3)
  assert named.eos == eot != plain.eos
  assert named.fingerprint != plain.fingerprint
  assert named.tokens_digest == plain.tokens_digest
  assert [file.name for file in named.files] == ['tokenizer.json', name]


def test_a_negative_id_names_none(llama3):
  """As the first Llamas' config.json says that they have no padding."""
  plain = vocabulary_pair.open_vocabulary(llama3)
  (llama3 / 'config.json').write_text('{"pad_token_id": -1}')
  assert vocabulary_pair.open_vocabulary(llama3).ids == plain.ids


@pytest.mark.parametrize(
  'name, text, message',
  [
    ('tokenizer.json', '{', 'tokenizer.json'),
    ('tokenizer.json', '{"model": {"vocab": {}}}', 'a damaged one'),
    ('tokenizer_config.json', '{"eos_token": "a"}', "has eos 'a', which"),
    ('config.json', '{"bos_token_id": 5}', 'config.json beside it has bos 5'),
    ('config.json', '{"decoder_start_token_id": 5}', 'decoder_start_token_id'),
    ('tokenizer_config.json', '{"bos_token": "<|eot_id|>"}', 'before and'),
  ],
)
def test_files_that_cannot_serve_are_refused(llama3, name, text, message):
  (llama3 / name).write_text(text)
  with pytest.raises(errors.UserError, match=message):
    vocabulary_pair.open_vocabulary(llama3)


def test_tokenizers_that_lose_text_are_refused(tmp_path):
  whole = tiny_tokenizers.make('llama3', tiny_tokenizers.TEXTS, SIZE)
  whole.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
    [
      tokenizers.pre_tokenizers.WhitespaceSplit(),
      tokenizers.pre_tokenizers.ByteLevel(),
    ]
  )
  whole.save(str(tmp_path / 'tokenizer.json'))
  with pytest.raises(errors.UserError, match='does not give back the text'):
    vocabulary_pair.open_vocabulary(tmp_path)


def test_sentencepiece_comes_first(llama3):
  model = llama3 / 'tokenizer.model'
  model.write_text('IQ== 0\nIg== 1\n')  # Llama 3's kind.
  assert vocabulary_pair.file_in(llama3).name == 'tokenizer.json'
  model.write_bytes(b'\n\x01')
  assert vocabulary_pair.file_in(llama3).name == 'tokenizer.model'
