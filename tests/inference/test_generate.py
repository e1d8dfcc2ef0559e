"""The command `generate` on a run of a toy model."""

import json

import pytest

from encdec_adapt import config as config_lib
from encdec_adapt import generate
from encdec_adapt.checkpoints import manager
from encdec_adapt.cli import errors
from encdec_adapt.tokenizers import vocabulary_training
from tests import tiny, toy_models

TEXT = 'The quick brown fox jumps over the lazy dog, again and again.\n'
PROMPTS = ['The quick', 'over\nthe lazy dog', 'fox ' * 20, 'dog', 'again']


@pytest.fixture(scope='module', params=['encoder_decoder', 'decoder_only'])
def run_folder(request, tmp_path_factory):
  """A work directory as training leaves it, of random parameters."""
  workdir = tmp_path_factory.mktemp(request.param)
  config = config_lib.defaults()
  config.data.vocabulary = str(workdir / 'vocabulary.model')
  texts = [
    f'{TEXT} {i} {chr(97 + i % 26) * (1 + i % 7)} {i * i:x}' for i in range(900)
  ]
  size = vocabulary_training.train_vocabulary(
    texts, config.data.vocabulary, 512, max_bytes=100_000
  ).size
  config.model.kind = request.param
  config.data.objective = 'prefix_lm'
  config.data.encoder_length = config.data.decoder_length = 32
  for stack in (config.model.encoder, config.model.decoder):
    stack.update(
      layers=1,
      width=16,
      mlp_width=16,
      heads=2,
      kv_heads=1,
      head_dim=8,
      vocab_size=size + 5,  # more ids than pieces
      tied_head=False,
    )
  settings = config_lib.load(config, str(workdir))
  config_lib.save(config, str(workdir))
  params = toy_models.params(settings.model, seed=5)
  with manager.Checkpoints(workdir / manager.FOLDER) as checkpoints:
    checkpoints.save(
      3, {'params': params}, data={}, meta={'vocabularies': None}
    )
  return workdir


def _run(*arguments):
  return tiny.call(generate, *arguments)


def test_prints_and_writes_continuations(run_folder, tmp_path, capsys):
  prompts = tmp_path / 'prompts.jsonl'
  prompts.write_text(''.join(json.dumps(p) + '\n' for p in PROMPTS))
  output = tmp_path / 'new' / 'samples.json'
  arguments = [
    f'--checkpoint={run_folder}',
    f'--prompts={prompts}',
    f'--output={output}',
    '--max_tokens=6',
    '--temperature=1',
  ]
  assert _run(*arguments, '--batch_size=3') == 0
  samples = json.loads(output.read_text())
  assert [sample['prompt'] for sample in samples] == PROMPTS
  assert all(sample['run'] == run_folder.name for sample in samples)
  assert all(1 <= sample['tokens'] <= 6 for sample in samples)
  assert len({sample['continuation'] for sample in samples}) > 1
  printed = capsys.readouterr().out
  for number, sample in enumerate(samples, start=1):
    assert f'prompt {number} of 5\n{sample["prompt"]}\n' in printed
    assert f'\n{sample["continuation"]}\n' in printed

  # A prompt draws alike in any batch, and otherwise with another seed.
  assert _run(*arguments, '--batch_size=8') == 0
  assert json.loads(output.read_text()) == samples
  assert _run(*arguments, '--batch_size=8', '--seed=1') == 0
  assert json.loads(output.read_text()) != samples


@pytest.mark.parametrize(
  'arguments, message',
  [
    (['--prompt=x'], '--checkpoint is missing'),
    (['--checkpoint=c'], 'give either --prompt=TEXT or --prompts=FILE'),
    (['--checkpoint=c', '--prompt=x', '--prompts=y'], 'not both'),
    (['--checkpoint=c', '--prompt='], '--prompt number 1: the prompt is empty'),
    (['--checkpoint=c', '--prompts=nowhere.txt'], 'nowhere.txt cannot be read'),
    (['--checkpoint=c', '--prompts=EMPTY'], 'the prompt is empty'),
    (['--checkpoint=c', '--prompts=GAP'], 'line 2: the prompt is empty'),
    (['--checkpoint=c', '--prompts=BAD.jsonl'], 'line 2 is not JSON'),
    (['--checkpoint=c', '--prompts=NUMBER.jsonl'], 'be a JSON string: 3'),
    (['--checkpoint=c', '--prompt=x', '--max_tokens=0'], 'max_tokens=0'),
    (['--checkpoint=c', '--prompt=x', '--top_k=5'], 'do nothing at'),
    (['--checkpoint=c', '--prompt=x'], 'c holds no model'),
    (
      ['--checkpoint=c', '--prompt=x', '--output=EMPTY/out.json'],
      'cannot be written',
    ),
  ],
)
def test_bad_input_is_named(arguments, message, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'EMPTY').write_text('')
  (tmp_path / 'GAP').write_text('a\n\nb\n')
  (tmp_path / 'BAD.jsonl').write_text('"a"\nb\n')
  (tmp_path / 'NUMBER.jsonl').write_text('3\n')
  with pytest.raises(errors.UserError, match=message):
    _run(*arguments)


def test_conversations_are_lines_of_json(tmp_path):
  file = tmp_path / 'prompts.jsonl'
  messages = [{'role': 'user', 'content': 'x'}]
  file.write_text(json.dumps('a') + '\n' + json.dumps(messages) + '\n')
  found = generate.read_prompts([], str(file), chat=True)
  assert list(found.values()) == ['a', messages]
  with pytest.raises(errors.UserError, match='line 2 must be a JSON string'):
    generate.read_prompts([], str(file))


@pytest.fixture
def unread(monkeypatch):
  """No parameters are read."""

  def read(*_):
    raise AssertionError('parameters are read')

  monkeypatch.setattr(manager.Checkpoint, 'restore_params', read)


def test_a_chat_needs_a_vocabulary_with_turns(run_folder, unread):
  with pytest.raises(errors.UserError, match='^the voc.* has no chat template'):
    _run(f'--checkpoint={run_folder}', '--prompt=x', '--chat')


def test_a_prompt_that_cannot_be_encoded_is_named_before_any_work(
  run_folder, unread, tmp_path
):
  prompts = tmp_path / 'prompts.jsonl'
  lines = [*(PROMPTS * 4), '\ud800', 'end']
  prompts.write_text(''.join(json.dumps(line) + '\n' for line in lines))
  flags = [f'--checkpoint={run_folder}', f'--prompts={prompts}']
  with pytest.raises(errors.UserError, match='prompts.jsonl, line 21: '):
    _run(*flags, '--batch_size=2')
