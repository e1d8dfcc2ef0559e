"""Two real processes train as one, stop as one, and continue as two or one."""

import pathlib
import shutil
import signal
import time

import pytest

from encdec_adapt.checkpoints import manager
from encdec_adapt.cli import app
from encdec_adapt.data import records
from encdec_adapt.files import paths
from encdec_adapt.telemetry import metrics, timing
from tests import tiny

pytestmark = pytest.mark.multiproc

STEPS = 20
BATCH = 16
DEVICES = 4  # Of each of two processes; one alone has all eight.
# How long a notice takes at most: the runtime looks for one every second.
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
    f'--config.train.eval_every={STEPS // 2}',
    f'--config.checkpoint.every={STEPS}',
    # A job of fewer steps takes the same ones.
    '--config.optimizer.schedule=constant',
    # Divide over a tensor axis.
    '--config.model.encoder.kv_heads=2',
    '--config.model.decoder.kv_heads=2',
    f'--config.compute.compile_cache={folder}/compiled',
  ]


@pytest.fixture(scope='module')
def two(folder, flags):
  """The work directory of two processes that nothing interrupted."""
  workdir = folder / 'two'
  processes = _start_two(flags, workdir)
  assert tiny.wait_all(processes) == [0, 0], _said(workdir)
  return workdir


@pytest.mark.long
def test_after_one_is_killed_both_continue(folder, flags, two):
  workdir = folder / 'killed'
  flags = [*flags, '--config.checkpoint.every=4']
  processes = _start_two(flags, workdir)
  try:
    _wait_for_step(processes, workdir, 9)
    processes[1].kill()
    began = time.monotonic()
  finally:
    codes = tiny.wait_all(processes)
  print(f'ended after {time.monotonic() - began:.1f} s')
  assert codes == [-signal.SIGABRT, -signal.SIGKILL], _said(workdir)
  step = manager.open_latest(workdir).step
  assert step >= 4
  _continue_by_two(flags, workdir, step, two)
  *_, last = (r for r in metrics.read_metrics(workdir) if r['kind'] == 'job')
  assert last['starts'] == 2 and last['lost_steps'] >= 9 - step
  assert last['lost_seconds'] > 0 or step >= 9


def _start_two(flags, workdir: pathlib.Path, command: str = 'train'):
  return tiny.start_several(
    *(2, command, *flags, f'--workdir={workdir}'),
    devices=DEVICES,
    logs=_logs(workdir),
  )


def _logs(workdir: pathlib.Path) -> pathlib.Path:
  return workdir.with_name(f'{workdir.name}_logs')


def _said(workdir: pathlib.Path) -> str:
  logs = sorted(_logs(workdir).iterdir())
  return '\n'.join(f'{log.name}:\n{log.read_text()}' for log in logs)


def _records(workdir: pathlib.Path):
  kinds = 'train', 'eval'
  found = [r for r in metrics.read_metrics(workdir) if r['kind'] in kinds]
  by_step = {(r['kind'], r['step']): r for r in found}
  assert len(by_step) == len(found), 'a step appears twice'
  return by_step


@pytest.mark.long
def test_two_processes_equal_one(folder, flags, two):
  # The rows of `tiny` have different weights, so that a divisor of each
  # process's own would show.
  one = tiny.run(
    'train', *flags, f'--workdir={folder}/one', devices=2 * DEVICES
  )
  assert one.returncode == 0, one.stdout + one.stderr
  _assert_equal_to_rounding(folder / 'one', two, 2e-5)


@pytest.mark.parametrize(
  'command, mesh, tolerance',
  [
    # Each process holds three of the four shards of rows.
    pytest.param(
      *('tests.multiproc.crossing_train', dict(fsdp=4, tensor=2), 2e-5),
      id='groups',
      marks=pytest.mark.long,
    ),
    # The default order of devices: each process holds half of every row.
    pytest.param(
      *('train', dict(fsdp=1, sequence=8), 1e-4),
      id='sequences',
      marks=pytest.mark.slow,
    ),
  ],
)
def test_meshes_that_cross_processes_equal_one_that_does_not(
  folder, flags, two, command, mesh, tolerance
):
  workdir = folder / '_'.join(mesh)
  flags = [*flags, f'--config.train.steps={STEPS // 2}']
  flags += [f'--config.mesh.{axis}={size}' for axis, size in mesh.items()]
  processes = _start_two(flags, workdir, command)
  assert tiny.wait_all(processes) == [0, 0], _said(workdir)
  _assert_equal_to_rounding(workdir, two, tolerance, STEPS // 2)


@pytest.mark.long
def test_two_processes_in_a_bucket(
  folder, flags, two, bucket, tmp_path, monkeypatch
):
  """Work directory and records there; one copy of these for both."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  for split in ('train', 'eval'):
    here = folder / 'prefix_lm' / split
    there = paths.at(f'{bucket}/records/{split}')
    paths.upload(here, there, records.MANIFEST)
  workdir, logs = paths.at(bucket) / 'two', folder / 'bucket_logs'
  processes = tiny.start_several(
    2,
    'train',
    *flags,
    f'--config.data.folder={bucket}/records',
    f'--config.checkpoint.every={STEPS // 2}',
    f'--workdir={workdir}',
    devices=DEVICES,
    logs=logs,
  )
  statuses = tiny.wait_all(processes)
  said = '\n'.join(log.read_text() for log in sorted(logs.iterdir()))
  assert statuses == [0, 0], said
  assert said.count('records: copying 1 of 1 shards') == 2  # Of two sets.
  assert _records(workdir) == _records(two)
  tiny.assert_same_params(workdir, two)


@pytest.mark.long
def test_the_metrics_say_where_the_time_went(two):
  of_kind = {'time': [], 'job': []}
  for record in metrics.read_metrics(two):
    of_kind.get(record['kind'], []).append(record)
  assert len(of_kind['time']) == STEPS
  for record in of_kind['time']:
    parts = [record[f'seconds/{part}'] for part in timing.PARTS]
    assert 0 < sum(parts) <= record['seconds/total'] * 1.001
    assert record['tokens_per_second'] > 0 and record['mfu'] > 0
  compiled = [r['step'] for r in of_kind['time'] if r['seconds/compile'] > 0]
  assert compiled == [1]
  # The rate is of the step, without what was compiled and measured before.
  first = of_kind['time'][0]
  step = first['seconds/total'] - sum(
    first[f'seconds/{part}'] for part in ('compile', 'evaluate')
  )
  tokens = _records(two)['train', 1]['tokens']
  assert first['tokens_per_second'] * step >= tokens
  last = of_kind['job'][-1]
  assert 0 < last['goodput'] <= 1 and last['starts'] == 1
  assert last['lost_steps'] == last['lost_seconds'] == 0


def _assert_equal_to_rounding(
  workdir, reference, tolerance: float, steps: int = STEPS
):
  """The same rows in the same order, and losses equal to rounding."""
  found, wanted = _records(workdir), _records(reference)
  wanted = {key: r for key, r in wanted.items() if r['step'] <= steps}
  assert found.keys() == wanted.keys()
  for key, record in wanted.items():
    assert found[key]['loss'] == pytest.approx(record['loss'], abs=tolerance), (
      key
    )
    for name in ('weight', 'tokens', 'target_tokens'):
      assert found[key].get(name) == record.get(name), (key, name)


@pytest.mark.long
def test_processes_stop_at_one_step_and_continue(folder, flags, two):
  workdir = folder / 'stopped'
  step = _stop_two(flags, workdir)
  one = folder / f'{workdir.name}_by_one'
  shutil.copytree(workdir, one)
  _continue_by_two(flags, workdir, step, two)
  _continue_by_one(flags, one, step, two)


def _stop_two(flags, workdir) -> int:
  """Sends SIGTERM on the way; both must save one step and say so."""
  processes = _start_two(flags, workdir)
  try:
    _wait_for_step(processes, workdir, 2)
    # Without process 0 no step ends: the notice arrives before the last one.
    processes[0].send_signal(signal.SIGSTOP)
    # Only one process gets the signal, as when a cloud takes one machine.
    processes[1].send_signal(signal.SIGTERM)
    time.sleep(NOTICE)
  finally:
    processes[0].send_signal(signal.SIGCONT)
    codes = tiny.wait_all(processes)
  assert codes == [app.RESTART] * 2, _said(workdir)
  step = manager.open_latest(workdir).step
  print(f'stopped after step {step}')
  last = max(number for _, number in _records(workdir))
  assert step == last < STEPS, _said(workdir)
  return step


def _wait_for_step(processes, workdir, step: int) -> None:
  deadline = time.monotonic() + 240
  path = workdir / metrics.FILE
  while not (
    path.exists() and any(r['step'] >= step for r in metrics.read_metrics(path))
  ):
    assert all(p.poll() is None for p in processes), _said(workdir)
    assert time.monotonic() < deadline, _said(workdir)
    time.sleep(0.002)


def _continue_by_two(flags, workdir, step, reference) -> None:
  """As they were: bit for bit what the uninterrupted job came to."""
  processes = _start_two(flags, workdir)
  assert tiny.wait_all(processes) == [0, 0], _said(workdir)
  said = _said(workdir)
  assert f'resuming at step {step}' in said
  assert 'not bit for bit' not in said
  assert _records(workdir) == _records(reference)
  tiny.assert_same_params(workdir, reference)


def _continue_by_one(flags, workdir, step, reference) -> None:
  """On another mesh: the same rows, the rest to rounding, and says so."""
  done = tiny.run(
    'train',
    *flags,
    '--config.mesh.fsdp=4',
    '--config.mesh.tensor=2',
    f'--workdir={workdir}',
    devices=2 * DEVICES,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert f'resuming at step {step}' in done.stdout
  assert 'to rounding, not bit for bit' in done.stdout
  assert 'processes: 2 before, 1 now' in done.stdout
  assert "'tensor': 1} before" in done.stdout
  assert "'tensor': 2} now" in done.stdout
  _assert_equal_to_rounding(workdir, reference, 1e-4)
