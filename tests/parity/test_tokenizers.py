"""Tokenizers as transformers reads the same folders."""

import shutil

import pytest

from encdec_adapt.tokenizers import vocabularies
from tests import tiny
from tests.parity import tiny_models

pytestmark = pytest.mark.parity
convert_ = tiny.convert

ROWS = 460  # Of a model's table; more than any tokenizer here has tokens.


def test_an_exported_tokenizer_is_the_one_that_was_imported(tmp_path):
  case = tiny_models.CASES['gemma2']
  settings = case.settings()
  settings.update({'vocab_size': ROWS})
  model = tmp_path / 'model'
  tiny_models.make(case, settings=settings).save_pretrained(model)
  tokenizer = tiny_models.save_tokenizer(tmp_path / 'tokenizer', 'gemma')
  shutil.copytree(tokenizer, model, dirs_exist_ok=True)
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
