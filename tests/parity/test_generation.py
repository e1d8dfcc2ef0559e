"""Greedy generation, token for token, from padded prompts."""

import pytest

import encdec_adapt
from tests.parity import tiny_models

pytestmark = pytest.mark.parity


@pytest.mark.parametrize('name', tiny_models.CASES)
def test_greedy_text(name, tmp_path):
  case = tiny_models.CASES[name]
  theirs = tiny_models.make(case)
  theirs.save_pretrained(tmp_path / 'model')
  ours = encdec_adapt.load(
    tmp_path / 'model', encoder_window=case.encoder_window
  )
  tiny_models.assert_same_text(ours, theirs, tiny_models.batch(case))


@pytest.mark.parametrize('name', ['llama3', 't5gemma_unbalanced'])
def test_each_of_several_tokens_ends_a_text(name, tmp_path):
  """As a generation config lists them: EOS, and the end of a turn."""
  case = tiny_models.CASES[name]
  theirs, rows = tiny_models.make(case), tiny_models.batch(case)
  theirs.generation_config.eos_token_id = [1]
  free = tiny_models.their_text(theirs, rows)
  # A token that ends a row, not its first.
  end = next(int(t) for row in free for t in row if t not in (row[0], 0))
  theirs.generation_config.eos_token_id = [1, end]
  theirs.save_pretrained(tmp_path / 'model')
  ours = encdec_adapt.load(
    tmp_path / 'model', encoder_window=case.encoder_window
  )
  assert ours.special_ids == {'bos': 2, 'pad': 0, 'eos': (1, end)}
  tiny_models.assert_same_text(ours, theirs, rows)
