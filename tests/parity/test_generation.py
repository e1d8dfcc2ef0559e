"""Greedy generation, token for token, from padded prompts."""

import pytest

import encdec_adapt
from tests.parity import tiny_models

pytestmark = pytest.mark.parity


@pytest.mark.parametrize(
  'name',
  ['gemma2', 'gemma3', 'llama3', 'qwen3', 't5gemma_unbalanced', 't5gemma2'],
)
def test_greedy_text(name, tmp_path):
  case = tiny_models.CASES[name]
  theirs = tiny_models.make(case)
  theirs.save_pretrained(tmp_path / 'model')
  ours = encdec_adapt.load(
    tmp_path / 'model', encoder_window=case.encoder_window
  )
  tiny_models.assert_same_text(ours, theirs, tiny_models.batch(case))
