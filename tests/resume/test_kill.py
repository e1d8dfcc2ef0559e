"""A job killed at any moment ends as the uninterrupted one, bit for bit."""

import json
import pathlib
import random
import signal
import subprocess
import time

import pytest

from encdec_adapt.base import exit_status
from encdec_adapt.checkpoints import checksums, manager
from encdec_adapt.cluster import lock
from encdec_adapt.files import paths
from encdec_adapt.telemetry import metrics
from tests import tiny

pytestmark = pytest.mark.resume

STEPS = 20
ROWS = 8 * STEPS
DRAFTS = '*.orbax-checkpoint-tmp*'  # What a save writes before it commits.


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('resume')


@pytest.fixture(scope='module')
def flags(folder):
  return tiny.make_records(folder, ROWS) + [
    f'--config.train.steps={STEPS}',
    # Cross-attention alone first, so that a phase begins on the way.
    '--config.train.cross_attention_warmup=4',
    # Masks that every step and microbatch draws again.
    '--config.train.dropout=0.1',
    '--config.train.microbatches=2',
    '--config.checkpoint.keep_best=True',
    f'--config.compute.compile_cache={folder}/compiled',
  ]


@pytest.fixture(scope='module')
def uninterrupted(folder, flags):
  workdir = folder / 'uninterrupted'
  done = tiny.run('train', *flags, f'--workdir={workdir}')
  assert done.returncode == 0, done.stdout + done.stderr
  return workdir


def _last_step(workdir: pathlib.Path) -> int:
  path = workdir / metrics.FILE
  if not path.exists():
    return 0
  return max([r['step'] for r in metrics.read_metrics(path)], default=0)


def _assert_same(workdir: paths.Path, reference: pathlib.Path):
  mine, wanted = (
    [r for r in metrics.read_metrics(w) if r['kind'] in ('train', 'eval')]
    for w in (workdir, reference)
  )
  key = lambda r: (r['kind'], r['step'])  # noqa: E731
  assert sorted(map(key, mine)) == sorted(map(key, wanted))
  assert {key(r): r for r in mine} == {key(r): r for r in wanted}
  tiny.assert_same_params(workdir, reference)
  for name in ('target_tokens', 'total_tokens', 'rows', 'eval_loss'):
    one, other = (
      json.loads((w / 'summary.json').read_text())[name]
      for w in (workdir, reference)
    )
    assert one == other, name


def _wait(process: subprocess.Popen, due) -> bool:
  """Waits until `due()`; False where the process ended before."""
  deadline = time.monotonic() + 240
  while process.poll() is None:
    assert time.monotonic() < deadline, 'the job does not get on'
    if due():
      return True
    time.sleep(0.002)
  return False


def _kill(flags, workdir: paths.Path, due, log=None) -> bool:
  """Starts the job and kills it once `due()`; whether it was running."""
  process = tiny.start(
    'train',
    *flags,
    f'--workdir={workdir}',
    log=log or workdir.with_suffix('.log'),
  )
  try:
    _wait(process, due)
  finally:
    process.kill()
  # Of a job that had ended by itself, this is the status it ended with.
  return process.wait() == -signal.SIGKILL


def _kill_during_a_save(flags, workdir: paths.Path, half, log=None) -> None:
  """Kills a new job while `half()`, a part of a save, is there."""
  for _ in range(3):  # A save may end just before the signal arrives.
    assert _kill(flags, workdir, half, log)
    if half():
      return
  pytest.fail('every kill missed the save that it was meant for')


def _kill_at(flags, workdir: pathlib.Path, step: int) -> bool:
  """Kills a job at a step, or at the first one that it had not reached."""
  wanted = max(step, _last_step(workdir) + 1)
  return _kill(flags, workdir, lambda: _last_step(workdir) >= wanted)


@pytest.mark.long
def test_killed_during_a_save_and_at_random_steps(folder, flags, uninterrupted):
  workdir = folder / 'killed'
  seed = random.randrange(2**32)
  print(f'seed {seed}')
  rng = random.Random(seed)
  early = rng.randrange(4, STEPS // 2)
  late = rng.randrange(STEPS // 2, STEPS - 3)
  print(f'steps {early}, {late}')
  # First, so that a half written save is of this kill and no earlier one.
  saves = workdir / manager.FOLDER
  _kill_during_a_save(flags, workdir, lambda: any(saves.glob(DRAFTS)))
  assert _last_step(workdir) < STEPS
  assert _kill_at(flags, workdir, early)
  # The job may end before this one arrives.
  print('late kill landed:', _kill_at(flags, workdir, late))
  done = tiny.run('train', *flags, f'--workdir={workdir}')
  assert done.returncode == 0, done.stdout + done.stderr
  _assert_same(workdir, uninterrupted)


def _saves(store, workdir: paths.Path) -> dict[int, bool]:
  """The steps in a bucket of which anything is there: whether all is."""
  saves = store.key(paths.join(workdir, manager.FOLDER)) + '/'
  found: dict[int, bool] = {}
  for name in store.names(saves):
    step, _, below = name.removeprefix(saves).partition('/')
    if step.isdecimal():
      whole = below == checksums.FILE
      found[int(step)] = found.get(int(step), False) or whole
  return found


@pytest.mark.long
def test_killed_in_a_bucket(folder, flags, uninterrupted, store, bucket):
  """The kill leaves half a save, and a lock."""
  workdir, log = paths.at(bucket) / 'run', folder / 'bucket.log'
  half = lambda: not all(_saves(store, workdir).values())  # noqa: E731
  held = store.key(workdir / lock.FILE)
  _kill_during_a_save(flags, workdir, half, log)
  del store.objects[held]  # Else the next job waits a minute to take it over.
  done = tiny.run('train', *flags, f'--workdir={workdir}')
  assert done.returncode == 0, done.stdout + done.stderr
  _assert_same(workdir, uninterrupted)
  assert held not in store.objects


@pytest.mark.long
def test_sigterm_saves_and_exits_with_its_own_status(
  folder, flags, uninterrupted
):
  workdir = folder / 'terminated'
  process = tiny.start(
    'train', *flags, f'--workdir={workdir}', log=folder / 'terminated.log'
  )
  assert _wait(process, lambda: _last_step(workdir) >= 2)
  process.send_signal(signal.SIGTERM)
  assert process.wait(120) == exit_status.RESTART
  saved = manager.open_latest(workdir).step
  assert saved == _last_step(workdir) < STEPS
  done = tiny.run('train', *flags, f'--workdir={workdir}')
  assert f'resuming at step {saved}' in done.stdout
  _assert_same(workdir, uninterrupted)
