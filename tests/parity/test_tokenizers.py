"""Tokenizers and chat templates as transformers reads the same folders."""

import json
import shutil

import pytest

from encdec_adapt.tokenizers import chat_format, export_files, vocabularies
from tests import tiny, tiny_tokenizers
from tests.parity import tiny_models

pytestmark = pytest.mark.parity
convert_ = tiny.convert

TEXTS = tiny.text(30)
ROWS = 460  # Of a model's table; more than any tokenizer here has tokens.
# In the manner of the families' own.
TEMPLATES = {
  'gemma': (
    '{{ bos_token }}'
    "{%- if messages[0]['role'] == 'system' -%}"
    "{%- set head = messages[0]['content'] + '\n\n' -%}"
    '{%- set turns = messages[1:] -%}'
    "{%- else -%}{%- set head = '' -%}{%- set turns = messages -%}{%- endif -%}"
    '{%- for turn in turns -%}'
    "{%- set name = 'model' if turn['role'] == 'assistant' else turn['role']"
    ' -%}'
    "{{ '<start_of_turn>' + name + '\n' + (head if loop.first else '') }}"
    "{{ turn['content'] | trim }}{{ '<end_of_turn>\n' }}"
    '{%- endfor -%}'
    "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}"
    '{%- endif -%}'
  ),
  'llama3': (
    '{{ bos_token }}'
    '{%- for turn in messages -%}'
    "{{ '<|start_header_id|>' + turn['role'] + '<|end_header_id|>\n\n' }}"
    "{{ turn['content'] | trim }}{{ '<|eot_id|>' }}"
    '{%- endfor -%}'
    '{%- if add_generation_prompt -%}'
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    '{%- endif -%}'
  ),
  'qwen': (
    '{%- for turn in messages -%}'
    "{{ '<|im_start|>' + turn['role'] + '\n' + turn['content'] }}"
    "{{ '<|im_end|>\n' }}"
    '{%- endfor -%}'
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}"
    '{%- endif -%}'
  ),
}
CLASS = 'PreTrainedTokenizerFast'
TURNS = (
  {'role': 'system', 'content': 'Be brief.'},
  {'role': 'user', 'content': ' the quick brown\n\nfox? '},
  {'role': 'assistant', 'content': 'A lazy dog.'},
  {'role': 'user', 'content': 'two  cats'},
)


def _save(folder, family):
  """A tokenizer's folder that names the class that reads it."""
  tiny_tokenizers.save(folder, family, TEXTS, 400)
  file = folder / 'tokenizer_config.json'
  config = json.loads(file.read_text())
  file.write_text(json.dumps({**config, 'tokenizer_class': CLASS}))
  return folder


@pytest.mark.parametrize('family', TEMPLATES)
@pytest.mark.parametrize('turns', [TURNS, TURNS[1:], TURNS[:3]], ids=len)
def test_conversations_are_those_of_the_template(family, turns, tmp_path):
  folder = _save(tmp_path / family, family)
  theirs = tiny_models.transformers.AutoTokenizer.from_pretrained(folder)
  own = vocabularies.open_vocabulary(folder)
  is_asked = turns[-1]['role'] == 'user'
  want = theirs.apply_chat_template(
    list(turns),
    chat_template=TEMPLATES[family],
    add_generation_prompt=is_asked,
    return_dict=False,
  )
  if family != 'qwen':  # BOS is framing.
    assert want.pop(0) == own.bos
  got = chat_format.encode(turns, own, open_turn=is_asked)
  assert got.ids.tolist() == want


def test_an_exported_tokenizer_is_the_one_that_was_imported(tmp_path):
  case = tiny_models.CASES['gemma2']
  settings = case.settings()
  settings.update({'vocab_size': ROWS})
  model = tmp_path / 'model'
  tiny_models.make(case, settings=settings).save_pretrained(model)
  for file in _save(tmp_path / 'tokenizer', 'gemma').iterdir():
    shutil.copy(file, model)
  pair, output = tmp_path / 'pair', tmp_path / 'exported'
  assert convert_('adapt', f'--encoder={model}', f'--output={pair}') == 0
  assert convert_('export', f'--checkpoint={pair}', f'--output={output}') == 0
  before, after = (
    tiny_models.transformers.AutoTokenizer.from_pretrained(folder)
    for folder in (model, output)
  )
  assert type(after) is type(before)
  assert after.get_vocab() == before.get_vocab()
  assert after.special_tokens_map == before.special_tokens_map
  own = vocabularies.open_vocabulary(output)
  text = 'the quick brown\n fox, Caf\u00e9'
  ids = after(text, add_special_tokens=False).input_ids
  assert ids == before(text, add_special_tokens=False).input_ids
  assert ids == own.encode(text).tolist()
  assert after.bos_token_id == own.bos and after.eos_token_id == own.eos


def test_added_sentinels_have_their_ids_in_transformers(tmp_path):
  folder, names = _save(tmp_path / 'qwen', 'qwen'), ['<sentinel_1>', '<mode_X>']
  own = vocabularies.open_vocabulary(folder, added_sentinels=2)
  export_files.write(folder, own)
  theirs = tiny_models.transformers.AutoTokenizer.from_pretrained(folder)
  ids = [own.specials[name] for name in names]
  assert theirs.convert_tokens_to_ids(names) == ids
  text = f'the fox{names[0]}jumps {names[1]}'
  found = theirs(text, add_special_tokens=False).input_ids
  assert [i for i in found if i in own.added] == ids
  assert theirs.decode(found) == text
  assert theirs.decode(found, skip_special_tokens=True) == 'the foxjumps '
