"""launch/real_model.sh: deadlines, damaged copies, and a rehearsal."""

import json
import signal
import subprocess
import sys

import numpy as np
import pytest

from launch import commands
from launch.real_model import card, plan, prepare, report, weights
from tests import tiny

# Writes a file once it listens; at SIGTERM another, and ends.
PATIENT = """
import pathlib, signal, sys, time
def stop(*_):
  pathlib.Path(sys.argv[1], 'stopped').touch()
  sys.exit(75)
signal.signal(signal.SIGTERM, stop)
time.sleep(0.5)  # The parent, too, may need time to begin to wait.
pathlib.Path(sys.argv[1], 'started').touch()
time.sleep(60)
"""


def _parts(folders):
  return folders.output / 'parts.jsonl'


def _lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def folders(tmp_path):
  """Folders with the last copy of a run."""
  folders = plan.Folders(str(tmp_path / 'run'))
  last = folders.copy(plan.REHEARSAL.parts + 1)
  last.mkdir(parents=True)
  (last / 'manifest.json').write_text('{}')
  return folders


def test_a_part_at_its_deadline_gets_sigterm_and_is_not_finished(
  folders, tmp_path
):
  job = card.Run(plan.REHEARSAL, folders)
  patient = [sys.executable, '-c', PATIENT, str(tmp_path)]
  results = lambda: {'stopped': (tmp_path / 'stopped').exists()}  # noqa: E731
  state = job.part('late', patient, card._LEAST, results)
  assert state == 'not finished' and (tmp_path / 'stopped').exists()
  (line,) = _lines(_parts(folders))
  assert line['state'] == state and line['status'] == 75
  assert line['stopped'] and line['limit'] == card._LEAST
  # At once: the line is there before the next part starts.
  assert job.part('bad', [sys.executable, '-c', '1/0'], 60, dict) == 'failed'
  assert job.part('soon', [sys.executable, '-c', ''], 4, dict) == 'dropped'
  states = [x['state'] for x in _lines(_parts(folders))]
  assert states == ['not finished', 'failed', 'dropped']
  assert 'ZeroDivisionError' in (folders.output / 'log.txt').read_text()


def test_results_that_cannot_be_read_do_not_lose_the_line(folders):
  job = card.Run(plan.REHEARSAL, folders)
  state = job.part('odd', [sys.executable, '-c', ''], 60, lambda: 1 / 0)
  (line,) = _lines(_parts(folders))
  assert state == line['state'] == 'finished'
  assert 'ZeroDivisionError' in line['results']


def test_the_pair_leaves_the_control_its_time(folders, monkeypatch):
  (folders.copy(plan.CARD.parts + 1) / 'manifest.json').write_text(
    json.dumps(
      {
        'folder': 'run',
        'steps': 190,
        'flops': {'pair': 1, 'decoder': 1},
        'rates': {'pair': 1, 'decoder': 1},
      }
    )
  )
  now, limits = [0.0], {}
  monkeypatch.setattr(card.time, 'monotonic', lambda: now[0])
  monkeypatch.setattr(card, '_exists', lambda model: True)
  monkeypatch.setattr(card.signal, 'signal', lambda *_: None)

  def part(job, name, command, limit, results, stop=None, grace=card._GRACE):
    # Every part runs to its deadline and needs its grace.
    limits[name] = min(limit, job.seconds_left - grace)
    now[0] += limits[name] + (grace if name != 'source' else 0)
    return 'finished'

  monkeypatch.setattr(card.Run, 'part', part)
  card.run(plan.CARD, folders)
  # What the slowest steps and compilation of the pair take, and its control.
  assert limits['pair'] >= 165
  assert limits['decoder'] >= plan.CARD.limits['decoder']
  assert limits['scores'] >= plan.CARD.limits['scores']
  assert now[0] <= plan.CARD.end
  states = {x['part']: x['state'] for x in _lines(_parts(folders))}
  assert states == dict.fromkeys(plan.TASKS, 'dropped')


def test_unequal_flops_are_named():
  arms = {x: {'steps': 10, 'FLOPs': 1e16} for x in plan.ARMS}
  assert report._training(arms).endswith('ratio 1.000.')
  arms['decoder'] = {'steps': 9, 'FLOPs': 0.98e16}
  assert 'ratio 0.980. **Unequal FLOPs.**' in report._training(arms)


def test_a_run_that_is_stopped_ends_its_part_and_writes_it(folders, tmp_path):
  program = (
    'import signal, sys; from launch.real_model import card, plan;'
    'signal.signal(signal.SIGTERM, lambda *_: sys.exit(143));'
    'job = card.Run(plan.REHEARSAL, plan.Folders(sys.argv[1]));'
    "job.part('first', [sys.executable, '-c', *sys.argv[2:]], 60, dict)"
  )
  process = subprocess.Popen(
    [sys.executable, '-c', program, folders.root, PATIENT, tmp_path],
    cwd=tiny.ROOT,
  )
  tiny.wait_until((tmp_path / 'started').exists, process)
  process.send_signal(signal.SIGTERM)
  assert process.wait(60) == 143
  assert (tmp_path / 'stopped').exists()
  (line,) = _lines(_parts(folders))
  assert (line['part'], line['state']) == ('first', 'not finished')


def _record(step, seconds, kind='time', compiling=0):
  parts = dict.fromkeys(('data', 'dispatch'), 0)
  parts |= {'device': seconds, 'compile': compiling, 'evaluate': 9.0}
  record = {f'seconds/{name}': value for name, value in parts.items()}
  return json.dumps({'kind': kind, 'step': step, **record}) + '\n'


@pytest.mark.parametrize('seconds, slow', [(0.8, 0.8), (0.6, 0)])
def test_the_first_steps_tell_a_slow_card(tmp_path, seconds, slow):
  file = tmp_path / 'metrics.jsonl'
  assert card.slow_step(tmp_path, 0.7) == 0
  records = [_record(1, 50, compiling=40)]
  records += [_record(step, seconds) for step in range(2, 21)]
  file.write_text(''.join(records[:-1]))
  assert card.slow_step(tmp_path, 0.7) == 0
  # A line that is being written is not read.
  file.write_text(''.join(records) + '{"kind": "ti')
  assert card.slow_step(tmp_path, 0.7) == pytest.approx(slow)


def test_both_arms_have_equal_flops():
  flops = {'pair': 8.75e13, 'decoder': 1.11e14}
  for steps, expected in (190, 149), (120, 94):
    count = plan.decoder_steps(flops, steps)
    assert count == expected
    ratio = count * flops['decoder'] / (steps * flops['pair'])
    assert 0.99 <= ratio <= 1


@pytest.fixture
def parts(tmp_path):
  """A file, its parts, and what they were split into."""
  path = tmp_path / 'model.safetensors'
  path.write_bytes(np.random.default_rng(0).bytes(1001))
  folders = [tmp_path / str(i) for i in range(5)]
  return path, folders, weights.split(path, folders)


def test_parts_are_joined_to_the_same_file(parts, tmp_path):
  path, folders, expected = parts
  joined = weights.join(expected, folders, tmp_path / 'out')
  assert joined.read_bytes() == path.read_bytes()
  sizes = [(x / weights.PART).stat().st_size for x in folders]
  assert max(sizes) - min(sizes) < 5


def test_lost_and_damaged_parts_are_named(parts, tmp_path):
  _, folders, expected = parts
  part = folders[3] / weights.PART
  data = bytearray(part.read_bytes())
  data[7] ^= 1
  part.write_bytes(data)
  with pytest.raises(commands.LaunchError, match='3 is damaged or of other'):
    weights.join(expected, folders, tmp_path / 'out')
  part.unlink()
  (folders[1] / weights.PART).unlink()
  with pytest.raises(commands.LaunchError, match=r'/1, \S*/3 of the weights'):
    weights.join(expected, folders, tmp_path / 'out')


def test_weights_of_another_size_are_refused(tmp_path):
  config = {'num_hidden_layers': 1, 'vocab_size': 8, 'hidden_size': 4}
  (tmp_path / 'config.json').write_text(
    json.dumps(config | {'intermediate_size': 6})
  )
  shapes = {
    weights.name_of('token_embd.weight'): (8, 4),
    weights.name_of('blk.0.ffn_up.weight'): (6, 4),
  }
  check = lambda: weights.check_shapes(  # noqa: E731
    tmp_path / 'a.gguf', shapes, tmp_path / 'config.json'
  )
  check()
  shapes[weights.name_of('blk.1.ffn_up.weight')] = (6, 4)
  with pytest.raises(commands.LaunchError, match='weights of another size'):
    check()


@pytest.fixture(scope='session')
def data(tmp_path_factory):
  """Stand-ins for the data sets, with text of this repository."""
  root = tmp_path_factory.mktemp('data')
  text = (tiny.ROOT / 'CONTRIBUTING.md').read_text()
  lines = [x for x in text.splitlines() if len(x) > 60]

  def write(name, content):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(content, str):
      content = ''.join(json.dumps(x) + '\n' for x in content)
    path.write_text(content)

  for name in (*prepare.BOOKS, 'another-book', 'a-third'):
    write(f'pretrain_classic_books/train/{name}.txt', f'{name}\n\n{text}')
  texts = [{'text': x} for x in text.split('\n## ')]
  write('pretrain_wiki_c4_demo/c4_train.jsonl', texts)
  write('pretrain_wiki_c4_demo/c4_valid.jsonl', texts)
  write('pretrain_onestop_english/onestop.jsonl', texts)
  write('pretrain_tinystories_sample/tiny_stories.txt', text)
  for split in ('train', 'test'):
    examples = [
      {'source': f'{x} It ends. It does.', 'targets': [x[:40], 'An end.']}
      for x in lines * 8
    ]
    write(f'pairs_scitldr/{split}.jsonl', examples)
  pairs = [{'en': x, 'de': x[::-1]} for x in lines * 8]
  write('pairs_eng_deu_tatoeba/train.jsonl', pairs)
  for name in ('src-train', 'tgt-train'):
    write(f'pairs_wmt_ende_10k/{name}.txt', 'It &apos;s an end .\n' * 9)
  names = ('newstest2019-src.eng.txt', 'newstest2019-ref.deu.txt')
  for name in names:
    write(f'pairs_ntrex/{name}', '\n'.join(lines))
  documents = [f'news.{i // 2}' for i in range(len(lines))]
  write('pairs_ntrex/DOCUMENT_IDS.tsv', '\n'.join(documents))
  return root


def test_own_text_is_that_of_the_commit(data, folders):
  text = folders.texts / 'own.jsonl'

  def changes(commit):
    folders.records.mkdir(exist_ok=True)
    before = text.stat().st_mtime_ns if text.exists() else 0
    prepare.write_texts(plan.REHEARSAL, folders, data, commit)
    return text.stat().st_mtime_ns > before, not folders.records.exists()

  assert changes('first') == (True, True)
  training = (folders.texts / 'train.jsonl').stat().st_mtime_ns
  assert changes('first') == (False, False)
  assert changes('second') == (True, True)
  assert (folders.texts / 'train.jsonl').stat().st_mtime_ns == training


def _bash(*arguments):
  return subprocess.run(
    ['bash', 'launch/real_model.sh', '--rehearsal', *arguments],
    cwd=tiny.ROOT,
    env=tiny.environment() | {'PYTHON': sys.executable},
    capture_output=True,
    text=True,
  )


def test_missing_data_and_copies_are_named(tmp_path):
  for verb, message in (
    ('prepare', 'is not a folder; name the one'),
    ('rates', 'copies is missing; prepare first'),
    ('run', 'copies/6 is not on this machine'),
    ('report', 'copy the output of `run` here'),
  ):
    process = _bash(verb, f'--folder={tmp_path}/run', f'--data={tmp_path}/data')
    assert process.returncode == commands.USER_ERROR, verb
    assert message in process.stderr and 'Traceback' not in process.stderr


@pytest.mark.slow
def test_a_rehearsal_runs_every_part(data, tmp_path):
  flags = f'--folder={tmp_path}/run', f'--data={data}'
  folders = plan.Folders(str(tmp_path / 'run'))
  log, storage = folders.output / 'log.txt', tmp_path / 'storage'
  # A card has the copies only.
  texts = [folders.texts]
  texts += [folders.root / task / 'train.jsonl' for task in plan.TASKS]
  for verb in ('prepare', 'rates', 'run', 'report'):
    if verb == 'run':
      for path in texts:
        moved = storage / path.relative_to(folders.root)
        moved.parent.mkdir(parents=True, exist_ok=True)
        path.rename(moved)
    process = _bash(verb, *flags)
    assert process.returncode == 0, process.stderr + (
      log.read_text() if log.exists() else ''
    )
  for path in texts:
    (storage / path.relative_to(folders.root)).rename(path)
  parts = _lines(_parts(folders))
  states = [(x['part'], x['state']) for x in parts]
  assert states == [
    ('source', 'finished'),
    ('source_scores', 'finished'),
    ('pair', 'restarted'),
    ('pair', 'finished'),
    ('decoder', 'finished'),
    ('scores', 'finished'),
    *(
      (f'{arm}_{task}{part}', 'finished')
      for task in plan.TASKS
      for part in ('', '_answers')
      for arm in plan.ARMS
    ),
  ]
  by_name = {x['part']: x for x in parts}
  manifest = plan.read_json(folders.copy(6) / 'manifest.json')
  steps = plan.REHEARSAL.fewer_steps
  assert by_name['pair']['steps'] == steps
  expected = plan.decoder_steps(manifest['flops'], steps)
  assert by_name['decoder']['steps'] == expected
  source = by_name['source']
  assert {x: source[x] for x in card._FIELDS} == {
    x: manifest[x] for x in card._FIELDS
  }
  curve = [x['step'] for x in by_name['pair']['evaluations']]
  assert curve == [0, 12, 24]
  content = plan.read_json(folders.output / 'report.json')
  rows = {x['text']: x for x in content['differences']}
  assert [*rows] == [*plan.HELD_OUT, *plan.TASKS]
  repository = rows['own']
  assert repository['low'] < repository['difference'] < repository['high']
  assert repository['over'].endswith('groups')
  assert rows['translation']['over'].endswith(' documents')
  assert repository['n'] == plan.REHEARSAL.held_out
  assert repository['matters'] == 0.02
  assert {x['model'] for x in content['other_inputs']} == {
    'source',
    *plan.ARMS,
  }
  page = (folders.output / 'report.md').read_text()
  assert page in process.stdout and f'pair {steps} steps' in page

  # A machine that was replaced has lost a copy.
  (folders.copy(2) / weights.PART).unlink()
  process = _bash('run', *flags)
  assert process.returncode == commands.USER_ERROR
  assert 'copies/2 of the weights are not on this machine' in process.stderr

  # Records of another vocabulary are not trained on.
  manifest = folders.records / 'train' / 'manifest.json'
  text = manifest.read_text()
  fingerprint = json.loads(text)['spec']['vocabulary']
  manifest.write_text(text.replace(fingerprint, fingerprint[::-1]))
  process = _bash('prepare', *flags)
  assert process.returncode == commands.USER_ERROR
  assert 'do not match: vocabulary is' in process.stdout + process.stderr
