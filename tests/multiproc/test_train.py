"""Two real processes train as one: same batches, same losses."""

import socket

import pytest

from encdec_adapt.data import loader, records
from encdec_adapt.runtime import metrics
from tests import tiny

pytestmark = pytest.mark.multiproc

STEPS = 4


def _free_port() -> int:
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    return probe.getsockname()[1]


def _losses(workdir):
  return {
    (r['kind'], r['step']): r['loss'] for r in metrics.read_metrics(workdir)
  }


def _weights(folder, process: int) -> list[float]:
  """Weight of what one of two processes reads in each step."""
  rows = records.RecordSet.open(folder)
  batches = loader.Loader(
    rows, rows.spec.lengths, 8, host_index=process, host_count=2, prefetch=0
  )
  return [float(next(batches)['weights'].sum()) for _ in range(STEPS)]


def test_two_processes_equal_one(tmp_path):
  flags = tiny.make_records(tmp_path) + [
    f'--config.train.steps={STEPS}',
    '--config.train.microbatches=2',
    f'--config.compute.compile_cache={tmp_path}/compiled',
  ]
  # Equal ones would let a divisor of each process's own go unnoticed.
  mine, others = (_weights(tmp_path / 'prefix_lm/train', p) for p in range(2))
  print(f'weights {mine}, {others}')
  assert sum(a != b for a, b in zip(mine, others, strict=True)) > STEPS // 2
  one = tiny.run('train', *flags, f'--workdir={tmp_path}/one', devices=4)
  assert one.returncode == 0, one.stdout + one.stderr
  coordinator = f'127.0.0.1:{_free_port()}'
  log = tmp_path / 'log'
  processes = [
    tiny.start(
      'train',
      *flags,
      f'--workdir={tmp_path}/two',
      f'--coordinator={coordinator}',
      '--processes=2',
      f'--process={index}',
      devices=2,
      log=log,
    )
    for index in range(2)
  ]
  try:
    codes = [process.wait(300) for process in processes]
  finally:
    for process in processes:
      process.kill()
  assert codes == [0, 0], log.read_text()
  wanted = _losses(tmp_path / 'one')
  found = _losses(tmp_path / 'two')
  assert found.keys() == wanted.keys()
  for key, loss in wanted.items():
    assert found[key] == pytest.approx(loss, abs=2e-5), key
