"""An exported run in transformers: the same text for the same prompts."""

import json

import pytest

from encdec_adapt import generate, train
from tests import tiny
from tests.e2e import folders

pytestmark = [pytest.mark.e2e, pytest.mark.parity]
PROMPTS = (
  'the quick brown fox jumps over a lazy dog while two cats sleep',
  '  two\n\ncats  42',
  'Caf\u00e9 \U0001f600 <eos> <unused3>',
)


def test_an_exported_run_generates_the_same_text(folder, pairs, tmp_path):
  transformers = pytest.importorskip('transformers')
  import torch

  run = tmp_path / 'run'
  # The window of transformers' eager attention.
  flags = ['--config.model.window_rule=inclusive', '--config.train.steps=2']
  assert tiny.call(train, *pairs, *flags, f'--workdir={run}') == 0
  exported = folders.export(run, tmp_path / 'exported')

  output = tmp_path / 'out.json'
  flags = [f'--checkpoint={run}', '--max_tokens=12', f'--output={output}']
  flags += [f'--prompt={prompt}' for prompt in PROMPTS]
  assert tiny.call(generate, *flags) == 0
  ours = [s['continuation'] for s in json.loads(output.read_text())]

  tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
  model = transformers.AutoModelForSeq2SeqLM.from_pretrained(
    exported, dtype=torch.float32, attn_implementation='eager'
  )
  theirs = []
  for prompt in PROMPTS:
    inputs = tokenizer(prompt, return_tensors='pt')
    tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    theirs.append(tokenizer.decode(tokens[0], skip_special_tokens=True))
  assert theirs == ours
  assert len(set(ours)) > 1
