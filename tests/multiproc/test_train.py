"""Two real processes train and stop as one, and resume as two or one."""

import json
import shutil
import signal
import time

import pytest

from encdec_adapt.base import exit_status
from encdec_adapt.checkpoints import checksums, manager
from encdec_adapt.evaluation.measures import samples
from encdec_adapt.telemetry import metrics
from tests import tiny

pytestmark = [pytest.mark.multiproc, pytest.mark.long]

STEPS = 12
BATCH = 16
DEVICES = 2  # Of each of two processes; one alone has all four.
# Longest delay of a preemption notice: jax's service polls every second.
NOTICE = 2.5


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('multiproc')


@pytest.fixture(scope='module')
def flags(folder):
  return tiny.make_records(folder, STEPS * BATCH) + [
    f'--config.train.steps={STEPS}',
    f'--config.train.batch_size={BATCH}',
    '--config.train.microbatches=2',
    '--config.train.dropout=0.1',
    f'--config.evaluation.loss={STEPS // 2}',
    f'--config.evaluation.samples={STEPS // 2}',
    f'--config.checkpoint.every={STEPS}',
    # A job of fewer steps takes the same ones.
    '--config.optimizer.schedule=constant',
    # Divide over a tensor axis.
    '--config.model.encoder.kv_heads=2',
    '--config.model.decoder.kv_heads=2',
    f'--config.compute.compile_cache={folder}/compiled',
  ]


def _train_by_two(flags, workdir, command='train', devices=DEVICES) -> str:
  """Runs a job of two processes to its end; returns what they print."""
  codes, text = tiny.run_two(flags, workdir, command, devices)
  assert codes == [0, 0], text
  return text


def _train_by_one(flags, workdir) -> str:
  """Runs a job of one process to its end; returns what it prints."""
  flags = [*flags, f'--workdir={workdir}']
  done = tiny.run('train', *flags, devices=2 * DEVICES)
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


@pytest.fixture(scope='module')
def two(folder, flags):
  """The work directory of two processes without an interruption."""
  # Process 0 alone reads the losses of saved steps.
  flags = [*flags, '--config.checkpoint.keep_best=True']
  _train_by_two(flags, folder / 'two')
  # Process 0 alone has trackers.
  assert len(list((folder / 'two' / 'tensorboard').iterdir())) == 1
  return folder / 'two'


def _records(workdir):
  kinds = 'train', 'eval'
  found = [r for r in metrics.read_metrics(workdir) if r['kind'] in kinds]
  by_step = {(r['kind'], r['step']): r for r in found}
  assert len(by_step) == len(found), 'a step appears twice'
  return by_step


def _wait_for_step(processes, logs, workdir, step: int) -> None:
  path = workdir / metrics.FILE
  tiny.wait_until(
    lambda: (
      path.exists()
      and any(r['step'] >= step for r in metrics.read_metrics(path))
    ),
    *processes,
    text=lambda: tiny.read_logs(logs),
  )


def _assert_close(workdir, reference, tolerance: float, steps: int = STEPS):
  """The same rows in the same order, and losses equal to rounding."""
  found, wanted = _records(workdir), _records(reference)
  wanted = {key: r for key, r in wanted.items() if r['step'] <= steps}
  assert found.keys() == wanted.keys()
  for key, record in wanted.items():
    loss = pytest.approx(record['loss'], abs=tolerance)
    assert found[key]['loss'] == loss, key
    for name in ('weight', 'tokens', 'target_tokens'):
      assert found[key].get(name) == record.get(name), (key, name)


def _assert_resumed_exactly(text, step, workdir, reference) -> None:
  """Two processes resumed, bit-equal to an uninterrupted job."""
  assert f'resuming at step {step}' in text and 'not bit for bit' not in text
  assert _records(workdir) == _records(reference)
  tiny.assert_same_params(workdir, reference)


def test_after_one_is_killed_both_resume(folder, flags, two):
  workdir = folder / 'killed'
  flags = [*flags, '--config.checkpoint.every=4']
  processes, logs = tiny.start_two(flags, workdir, devices=DEVICES)
  try:
    _wait_for_step(processes, logs, workdir, 9)
    processes[1].kill()
  finally:
    codes = tiny.wait_all(processes)
  assert codes == [-signal.SIGABRT, -signal.SIGKILL], tiny.read_logs(logs)
  step = manager.open_latest(workdir).step
  assert step >= 4
  # As if killed before the manifest: process 0 alone reads the step in full.
  (workdir / manager.FOLDER / str(step) / checksums.FILE).unlink()
  text = _train_by_two(flags, workdir)
  _assert_resumed_exactly(text, step, workdir, two)
  *_, last = (r for r in metrics.read_metrics(workdir) if r['kind'] == 'job')
  assert last['starts'] == 2 and last['lost_steps'] >= 9 - step
  assert last['lost_seconds'] > 0 or step >= 9


def test_two_processes_equal_one(folder, flags, two):
  # Rows of `tiny` have different weights: dividing by each process's own
  # weight would show.
  _train_by_one(flags, folder / 'one')
  _assert_close(folder / 'one', two, 2e-5)
  lines = (two / samples.FILE).read_text().splitlines()
  steps = [json.loads(line)['step'] for line in lines]
  assert steps == [0, 0, STEPS // 2, STEPS // 2, STEPS, STEPS]


def test_a_mesh_that_crosses_processes_equals_one_that_does_not(
  folder, flags, two
):
  """Each process holds three of the four shards of rows."""
  workdir = folder / 'crossing'
  flags = [*flags, f'--config.train.steps={STEPS // 2}']
  flags += ['--config.mesh.fsdp=4', '--config.mesh.tensor=2']
  _train_by_two(flags, workdir, 'tests.multiproc.crossing_train', 4)
  _assert_close(workdir, two, 2e-5, STEPS // 2)


@pytest.mark.slow
def test_the_smallest_memory_of_all_decides(folder, flags, monkeypatch):
  monkeypatch.setenv('MEMORY', f'{2**30},{2**21}')
  workdir = folder / 'chosen'
  flags = [*flags, '--config.train.steps=2']
  text = _train_by_two(flags, workdir, 'tests.accelerator')
  assert 'the fastest that fits into 1.8 MiB, 90% of' in text
  config = json.loads((workdir / 'config.json').read_text())
  assert config['compute']['remat'] == 'dots'


@pytest.mark.slow
def test_both_stop_after_one_step_and_resume_as_two_or_one(folder, flags, two):
  workdir = folder / 'stopped'
  processes, logs = tiny.start_two(flags, workdir, devices=DEVICES)
  try:
    _wait_for_step(processes, logs, workdir, 2)
    # Without process 0 no step ends: the notice arrives before the last one.
    processes[0].send_signal(signal.SIGSTOP)
    # Only one process gets the signal, as when a cloud takes one machine.
    processes[1].send_signal(signal.SIGTERM)
    time.sleep(NOTICE)
  finally:
    processes[0].send_signal(signal.SIGCONT)
    codes = tiny.wait_all(processes)
  assert codes == [exit_status.RESTART] * 2, tiny.read_logs(logs)
  step = manager.open_latest(workdir).step
  assert step == max(number for _, number in _records(workdir)) < STEPS

  by_one = shutil.copytree(workdir, folder / 'stopped_by_one')
  text = _train_by_two(flags, workdir)
  _assert_resumed_exactly(text, step, workdir, two)
  # On another mesh: the same rows, equal to rounding, which is printed.
  mesh = ['--config.mesh.fsdp=2', '--config.mesh.tensor=2']
  text = _train_by_one([*flags, *mesh], by_one)
  assert f'resuming at step {step}' in text
  assert 'to rounding, not bit for bit' in text
  assert 'processes: 2 before, 1 now' in text
  assert "'tensor': 1} before" in text and "'tensor': 2} now" in text
  _assert_close(by_one, two, 1e-4)
