"""Two real processes train as one: same batches, same losses."""

import socket

import pytest

from encdec_adapt.runtime import metrics
from tests import tiny

pytestmark = pytest.mark.multiproc


def _free_port() -> int:
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    return probe.getsockname()[1]


def _losses(workdir):
  return {
    (r['kind'], r['step']): r['loss'] for r in metrics.read_metrics(workdir)
  }


def test_two_processes_equal_one(tmp_path):
  flags = tiny.make_records(tmp_path) + [
    '--config.train.steps=4',
    '--config.train.microbatches=2',
    f'--config.compute.compile_cache={tmp_path}/compiled',
  ]
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
