"""An exported run in transformers: the same text for the same prompts."""

import json

import pytest

from encdec_adapt import generate, train
from tests import tiny, tiny_tokenizers
from tests.e2e import folders

transformers = pytest.importorskip('transformers')
pytestmark = [pytest.mark.e2e, pytest.mark.parity]
PROMPTS = (
  'the quick brown fox jumps over a lazy dog while two cats sleep',
  '  two\n\ncats  42',
  'Caf\u00e9 \U0001f600 <eos> <unused3>',
)


def _ours(run, output, *flags):
  """Continuations by `generate`."""
  flags = [
    f'--checkpoint={run}',
    '--max_tokens=12',
    f'--output={output}',
    *flags,
  ]
  assert tiny.call(generate, *flags) == 0
  lines = output.read_text().splitlines()
  return [json.loads(line)['continuation'] for line in lines]


def _theirs(exported, prompts, encode):
  """Continuations by transformers of `encode(tokenizer, prompt)`."""
  import torch

  tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
  model = transformers.AutoModelForSeq2SeqLM.from_pretrained(
    exported, dtype=torch.float32, attn_implementation='eager'
  )
  found = []
  for prompt in prompts:
    inputs = encode(tokenizer, prompt)
    tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    found.append(tokenizer.decode(tokens[0], skip_special_tokens=True))
  return found


@pytest.mark.long
def test_an_exported_run_generates_the_same_text(
  folder, pairs, tmp_path, monkeypatch
):
  run = tmp_path / 'run'
  # The window of transformers' eager attention.
  flags = ['--config.model.window_rule=inclusive', '--config.train.steps=2']
  assert tiny.call(train, *pairs, *flags, f'--workdir={run}') == 0
  exported = folders.export(run, tmp_path / 'exported')
  ours = _ours(run, tmp_path / 'out.json', *[f'--prompt={p}' for p in PROMPTS])
  theirs = _theirs(
    exported, PROMPTS, lambda one, prompt: one(prompt, return_tensors='pt')
  )
  assert theirs == ours
  assert len(set(ours)) > 1
  names = folders.run_card(exported, monkeypatch)
  assert type(names['model']).__name__ == 'LoadedModel'
  assert names['tokens'].shape[1] > 1


@pytest.mark.long
def test_a_model_tuned_on_chats_answers_alike(tmp_path, capsys):
  texts = ['two cats sleep', 'the quick brown fox']
  answers = ['ask the fox', 'they sleep']
  lines = [
    [
      {'role': 'user', 'content': text},
      {'role': 'assistant', 'content': answer},
    ]
    for text, answer in zip(texts, answers, strict=True)
  ]
  file = tmp_path / 'chats.jsonl'
  file.write_text(
    ''.join(json.dumps({'messages': lines[i % 2]}) + '\n' for i in range(400))
  )
  vocabulary = tiny_tokenizers.train(
    tmp_path / 'vocabulary.model',
    600,
    user_defined_symbols=['\n', '<start_of_turn>', '<end_of_turn>'],
  )
  run = tmp_path / 'run'
  flags = [
    *tiny.flags(tmp_path, 'prefix_lm'),
    f'--config.data.vocabulary={vocabulary}',
    '--config.model.encoder.vocab_size=600',
    '--config.model.decoder.vocab_size=600',
    f'--config.data.source=chat:{file}',
    '--config.data.objective=chat',
    f'--config.data.folder={tmp_path}/records',
    '--config.data.encoder_length=64',
    '--config.data.eval_fraction=0.1',
    '--config.data.repeat=True',
    '--config.data.workers=1',
    '--config.train.steps=120',
    '--config.evaluation.loss=120',
    '--config.evaluation.samples=120',
    '--config.checkpoint.every=120',
    '--config.optimizer.learning_rate=0.02',
    '--config.model.window_rule=inclusive',
    f'--workdir={run}',
  ]
  assert tiny.call(train, *flags) == 0
  sample = json.loads((run / 'samples.jsonl').read_text().splitlines()[-2])
  assert sample['output'] == sample['reference']
  assert sample['output'].endswith('<end_of_turn>')
  exported = folders.export(run, tmp_path / 'exported')
  prompts = [f'--prompt={text}' for text in texts]
  ours = _ours(run, tmp_path / 'out.json', '--chat', *prompts)
  theirs = _theirs(
    exported,
    texts,
    lambda one, text: one.apply_chat_template(
      [{'role': 'user', 'content': text}],
      add_generation_prompt=True,
      return_tensors='pt',
      return_dict=True,
    ),
  )
  assert theirs == ours == answers
  assert '--chat' not in capsys.readouterr().err
  _ours(run, tmp_path / 'plain.json', '--prompt=x')
  assert 'with --chat, a prompt is a turn of' in capsys.readouterr().err
