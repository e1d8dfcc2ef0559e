"""The command `generate` on a run of a toy model."""

import io
import json
import shutil
import sys

import numpy as np
import pytest

import encdec_adapt
from encdec_adapt import config as config_lib
from encdec_adapt import generate
from encdec_adapt.base import errors
from encdec_adapt.checkpoints import manager
from encdec_adapt.generation import prompt_encoding
from encdec_adapt.stored import model_on_disk, pretrained_files
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
    )
  config.model.head.tied = False
  config.compute.dtype = 'float32'
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


def _lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def _prompts(tmp_path):
  file = tmp_path / 'prompts.jsonl'
  file.write_text(''.join(json.dumps(p) + '\n' for p in PROMPTS))
  return f'--prompts={file}'


def test_writes_continuations_in_order(run_folder, tmp_path, capsys):
  output = tmp_path / 'new' / 'samples.jsonl'
  arguments = [
    f'--checkpoint={run_folder}',
    _prompts(tmp_path),
    '--max_tokens=6',
  ]
  drawn = [*arguments, '--temperature=1', f'--output={output}']
  assert _run(*drawn, '--batch_size=2') == 0
  samples = _lines(output)
  assert [sample['prompt'] for sample in samples] == PROMPTS
  assert [sample['index'] for sample in samples] == list(range(5))
  assert all(sample['run'] == run_folder.name for sample in samples)
  assert all(1 <= sample['tokens'] <= 6 for sample in samples)
  assert all(sample['log_prob'] < 0 for sample in samples)
  assert len({sample['continuation'] for sample in samples}) > 1
  assert f'5 results in {output}' in capsys.readouterr().out

  # A prompt draws alike in any batch, and otherwise with another seed.
  output.unlink()
  assert _run(*drawn, '--batch_size=8') == 0
  again = _lines(output)
  for sample, same in zip(samples, again, strict=True):
    assert same['log_prob'] == pytest.approx(sample['log_prob'], abs=1e-4)
    assert {**same, 'log_prob': 0} == {**sample, 'log_prob': 0}
  with pytest.raises(errors.UserError, match='other prompts or options'):
    _run(*drawn, '--seed=1')
  shown = ['--temperature=1', '--seed=1', '--batch_size=2']
  assert _run(*arguments, *shown) == 0
  printed = capsys.readouterr().out
  starts = [
    printed.index(f'prompt {number} of 5\n{prompt}\n')
    for number, prompt in enumerate(PROMPTS, start=1)
  ]
  assert starts == sorted(starts)
  assert f'\n{samples[0]["continuation"]}\n' not in printed


def test_a_file_is_continued(run_folder, tmp_path, capsys, monkeypatch):
  output = tmp_path / 'samples.jsonl'
  flags = [f'--checkpoint={run_folder}', f'--output={output}', '--max_tokens=3']
  monkeypatch.setattr(sys, 'stdin', io.StringIO('\n'.join(PROMPTS[2:])))
  assert _run(*flags, '--prompts=-') == 0
  whole = output.read_text()
  lines = whole.splitlines(keepends=True)
  # Killed after the second line, within the third.
  output.write_text(lines[2] + lines[0] + lines[1][:20])
  monkeypatch.setattr(sys, 'stdin', io.StringIO('\n'.join(PROMPTS[2:])))
  capsys.readouterr()
  assert _run(*flags, '--prompts=-') == 0
  found = [json.loads(line) for line in whole.splitlines()]
  for line, want in zip(_lines(output), found, strict=True):
    assert line | {'log_prob': 0} == want | {'log_prob': 0}
  assert f'{output}: 2 of 3 are done' in capsys.readouterr().out


def _tuned(run_folder, tmp_path, objective, **data):
  """A copy of the run that was trained for another objective."""
  folder = tmp_path / 'tuned'
  shutil.copytree(run_folder, folder)
  saved = json.loads((folder / 'config.json').read_text())
  saved['data'] |= {'objective': objective, **data}
  (folder / 'config.json').write_text(json.dumps(saved))
  return folder


def _log_probs(folder, *flags):
  output = folder / 'out.jsonl'
  output.unlink(missing_ok=True)
  assert _run(f'--checkpoint={folder}', f'--output={output}', *flags) == 0
  return [line['log_prob'] for line in _lines(output)]


def test_a_run_keeps_the_texts_around_its_prompts(run_folder, tmp_path, capfd):
  objective = r'pairs:prefix="Do, now: ",separator=":\n"'
  tuned = _tuned(run_folder, tmp_path, objective, source='pairs:a#b,c')
  end = '' if 'encoder_decoder' in run_folder.name else ':\n'
  texts = 'dog', 'The quick'
  plain, prefixed = (
    [f'--prompt={start}{text}{end}' for text in texts]
    for start in ('', 'Do, now: ')
  )
  want = pytest.approx(_log_probs(run_folder, *prefixed), abs=1e-4)
  flags = [f'--prompt={text}' for text in texts]
  assert _log_probs(tuned, *flags) == want
  assert capfd.readouterr().err.count("prompts begin with 'Do, now: '") == 1
  without = pytest.approx(_log_probs(run_folder, *plain), abs=1e-4)
  assert _log_probs(tuned, *flags, '--prefix=') == without


def test_several_prefixes_need_a_choice(run_folder, unread, tmp_path):
  objective = 'pairs:prefix="a, b: " | pairs:prefix=c'
  tuned = _tuned(run_folder, tmp_path, objective, source='pairs:a#b,c')
  flags = [f'--checkpoint={tuned}', '--prompt=x']
  with pytest.raises(errors.UserError, match="--prefix='a, b: ', --prefix=c "):
    _run(*flags)
  with pytest.raises(AssertionError, match='parameters are read'):
    _run(*flags, '--prefix=')


def test_prompts_of_ul2(run_folder, unread, tmp_path):
  tuned = _tuned(run_folder, tmp_path, 'denoise:R:3:0.15 + S:uniform')
  stored = model_on_disk.open_model(tuned)
  vocabulary = stored.open_vocabularies().decoder
  (first, second, *_), bos = vocabulary.sentinels, vocabulary.bos
  encode = lambda text: vocabulary.encode(text).tolist()  # noqa: E731
  text = 'The <unused0> fox<unused1>'
  encoder = prompt_encoding.PromptEncoder(stored, mode='R', sentinels=True)
  wanted = [*encode('The '), first, *encode(' fox'), second]
  head = [bos, vocabulary.mode_ids['R']]
  assert encoder.encode(text).tolist() == [*head, *wanted]
  answer = [first, *encode('quick'), second, vocabulary.eos]
  assert encoder.answer_text(answer) == '<unused0>quick<unused1>'
  # Without the flag names are characters; a cut leaves mode and prefix.
  encoder = prompt_encoding.PromptEncoder(stored, mode='S', prefix='a, b: ')
  head = [bos, vocabulary.mode_ids['S'], *encode('a, b: ')]
  prompt = encoder.encode(text * 9).tolist()
  assert first not in prompt
  cut = encoder.encode(text * 9, len(head) + 3).tolist()
  assert cut == [*head, *prompt[-3:]]
  flags = [f'--checkpoint={tuned}', '--prompt=x']
  for more, message in (
    (['--mode=X'], '--mode=X is not a mode .* has R, S;'),
    (['--mode=S', '--chat'], '--chat does not work with --mode'),
    (['--prefix=a, b: ', '--max_prompt=3'], "'a, b: ' among .* room for 3"),
  ):
    with pytest.raises(errors.UserError, match=message):
      _run(*flags, *more)


@pytest.mark.long
def test_beams_integers_and_stop_strings(run_folder, tmp_path):
  flags = [f'--checkpoint={run_folder}', _prompts(tmp_path), '--max_tokens=6']

  def run(name, *more):
    """Results of the command with more flags."""
    output = tmp_path / name
    assert _run(*flags, f'--output={output}', *more) == 0
    return _lines(output)

  greedy = run('greedy')
  beams = run('beams', '--beams=3', '--length_penalty=0')
  total = [sum(line['log_prob'] for line in lines) for lines in (greedy, beams)]
  assert total[0] < total[1]
  assert [s['continuation'] for s in beams] != [
    s['continuation'] for s in greedy
  ]
  assert len(run('int8', '--int8')) == 5
  stop = greedy[0]['continuation'][2:4]
  found = run('stop', f'--stop={stop}')[0]
  assert found['ended'] == 'stop'
  assert found['continuation'] == greedy[0]['continuation'].split(stop)[0]
  short = run('short', '--max_prompt=3')
  assert short[2]['continuation'] != greedy[2]['continuation']


def test_embeddings_are_of_the_encoder(run_folder, tmp_path):
  output = tmp_path / 'embeddings.jsonl'
  flags = [f'--checkpoint={run_folder}', _prompts(tmp_path)]
  flags += [f'--output={output}', '--batch_size=2']
  if run_folder.name.startswith('decoder_only'):
    with pytest.raises(errors.UserError, match='have no encoder'):
      _run(*flags, '--embed=mean')
    return
  loaded = encdec_adapt.load(run_folder)
  reader = loaded.stored.open_vocabularies().sides['encoder']
  for pooling in ('mean', 'last'):
    output.unlink(missing_ok=True)
    assert _run(*flags, f'--embed={pooling}') == 0
    for prompt, line in zip(PROMPTS, _lines(output), strict=True):
      rows = np.array([[reader.bos, *reader.encode(prompt)]])
      states = np.asarray(loaded.encode(rows))[0]
      want = states[-1] if pooling == 'last' else states.mean(axis=0)
      np.testing.assert_allclose(line['embedding'], want, atol=2e-5)


@pytest.mark.parametrize(
  'arguments, message',
  [
    (['--prompt=x'], '--checkpoint is missing'),
    (['--checkpoint=c'], 'give either --prompt=TEXT or --prompts=FILE'),
    (['--checkpoint=c', '--prompt=x', '--prompts=y'], 'not both'),
    (['--checkpoint=c', '--prompt='], '--prompt number 1: the prompt is empty'),
    (['--checkpoint=c', '--prompts=nowhere.txt'], 'nowhere.txt cannot be read'),
    (['--checkpoint=c', '--prompts=EMPTY'], 'EMPTY is empty'),
    (['--checkpoint=c', '--prompts=GAP'], 'line 2: the prompt is empty'),
    (['--checkpoint=c', '--prompts=BAD.jsonl'], 'line 2 is not JSON'),
    (['--checkpoint=c', '--prompts=NUMBER.jsonl'], 'be a JSON string: 3'),
    (['--checkpoint=c', '--prompt=x', '--max_tokens=0'], 'max_tokens is 0'),
    (['--checkpoint=c', '--prompt=x', '--top_k=5'], 'do nothing at'),
    (['--checkpoint=c', '--prompt=x', '--seed=-1'], 'seed is -1'),
    (['--checkpoint=c', '--prompt=x', '--stop='], '--stop is .*not empty'),
    (
      ['--checkpoint=c', '--prompt=x', '--beams=2', '--temperature=1'],
      '--beams=2 searches without drawing',
    ),
    (
      ['--checkpoint=c', '--prompt=x', '--beams=2', '--stop=a'],
      'does not work with --beams=2',
    ),
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


def test_prompts_beyond_the_positions_of_the_model(
  run_folder, unread, monkeypatch
):
  stated = {'max_position_embeddings': 24}
  monkeypatch.setattr(
    pretrained_files, 'config_fields', lambda _: {'decoder': stated}
  )
  flags = [f'--checkpoint={run_folder}', f'--prompt={TEXT * 2}']
  is_pair = 'encoder_decoder' in str(run_folder)
  room = 24 if is_pair else 16
  message = f'--prompt number 1 has .* room for {room} .*--max_prompt={room} to'
  with pytest.raises(errors.UserError, match=message):
    _run(*flags, '--max_tokens=8')
  with pytest.raises(errors.UserError, match='room for 24 '):
    _run(*flags, '--embed=mean')
  with pytest.raises(AssertionError, match='parameters are read'):
    _run(*flags, '--max_tokens=8', f'--max_prompt={room}')
  if not is_pair:
    message = '^24 generated tokens leave no room for a prompt in the 24 pos'
    with pytest.raises(errors.UserError, match=message):
      _run(*flags, '--max_tokens=24')
