"""Adapters of two real processes: equal to one, and killed and resumed."""

import re
import signal

import pytest

from encdec_adapt.telemetry import metrics
from tests import tiny
from tests.e2e import folders

pytestmark = [pytest.mark.multiproc, pytest.mark.resume, pytest.mark.long]

STEPS = 8
LORA = {'rank': 2, 'full': ('cross_attention', 'norms')}
LORA |= {'dropout': 0.1, 'base': 'int8'}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('adapters')


@pytest.fixture(scope='module')
def flags(folder):
  records = tiny.make_records(folder, 8 * STEPS)
  source = folders.make_folder(
    folder / 'source', folders.GEMMA, folder / 'vocabulary.model'
  )
  base = folders.adapt(
    folder / 'base', f'--encoder={source}', '--vocab_multiple=8'
  )
  return records + [
    '--config.init.mode=checkpoint',
    f'--config.init.encoder={base}',
    *(f'--config.train.lora.{k}={v}' for k, v in LORA.items()),
    f'--config.train.steps={STEPS}',
    '--config.train.microbatches=2',
    '--config.optimizer.learning_rate=1e-2',
    '--config.checkpoint.every=2',
    '--config.mesh.fsdp=2',
    f'--config.compute.compile_cache={folder}/compiled',
  ]


@pytest.fixture(scope='module')
def two(folder, flags):
  """The work directory of two processes without an interruption."""
  codes, text = tiny.run_two(flags, folder / 'two')
  assert codes == [0, 0], text
  return folder / 'two'


def _records(workdir):
  records = metrics.read_metrics(workdir / metrics.FILE)
  return [x for x in records if x['kind'] in ('train', 'eval')]


def test_two_processes_equal_one(folder, flags, two):
  workdir = folder / 'one'
  done = tiny.run('train', *flags, f'--workdir={workdir}', devices=2)
  assert done.returncode == 0, done.stdout + done.stderr
  records, expected = _records(workdir), _records(two)
  assert len(records) == len(expected)
  for record, wanted in zip(records, expected, strict=True):
    assert record['step'] == wanted['step']
    assert record['loss'] == pytest.approx(wanted['loss'], abs=2e-5)
  assert expected[-1]['loss'] < expected[0]['loss'] - 0.05


@pytest.mark.slow
def test_killed_processes_resume_bit_for_bit(folder, flags, two, monkeypatch):
  workdir = folder / 'killed'
  monkeypatch.setenv('KILL', 'save:6')
  codes, text = tiny.run_two(flags, workdir, 'tests.resume.killed_train')
  # The runtime aborts a process whose peer is gone.
  assert -signal.SIGKILL in codes and 0 not in codes, text
  codes, text = tiny.run_two(flags, workdir)
  assert codes == [0, 0], text
  # The save of step 4 may not have been committed.
  assert re.search('resuming at step [24]', text), text
  assert 'not bit for bit' not in text
  assert _records(workdir) == _records(two)
  tiny.assert_same_params(workdir, two)
