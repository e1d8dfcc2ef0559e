"""Adapters of two real processes, killed and resumed."""

import re
import signal

import pytest

from encdec_adapt.telemetry import metrics
from tests import tiny
from tests.e2e import folders

pytestmark = [pytest.mark.multiproc, pytest.mark.resume, pytest.mark.slow]

STEPS = 8
LORA = {'rank': 2, 'full': ('cross_attention', 'norms')}
LORA |= {'dropout': 0.1, 'base': 'int8'}


def test_killed_processes_resume_bit_for_bit(tmp_path, monkeypatch):
  records = tiny.make_records(tmp_path, 8 * STEPS)
  source = folders.make_folder(
    tmp_path / 'source', folders.GEMMA, tmp_path / 'vocabulary.model'
  )
  base = folders.adapt(
    tmp_path / 'base', f'--encoder={source}', '--vocab_multiple=8'
  )
  flags = records + [
    '--config.init.mode=checkpoint',
    f'--config.init.encoder={base}',
    *(f'--config.train.lora.{k}={v}' for k, v in LORA.items()),
    f'--config.train.steps={STEPS}',
    '--config.train.microbatches=2',
    '--config.optimizer.learning_rate=1e-2',
    '--config.checkpoint.every=2',
    '--config.mesh.fsdp=2',
    f'--config.compute.compile_cache={tmp_path}/compiled',
  ]
  whole, killed = tmp_path / 'whole', tmp_path / 'killed'
  codes, text = tiny.run_two(flags, whole)
  assert codes == [0, 0], text
  monkeypatch.setenv('KILL', 'save:6')
  codes, text = tiny.run_two(flags, killed, 'tests.resume.killed_train')
  # The runtime aborts a process whose peer is gone.
  assert -signal.SIGKILL in codes and 0 not in codes, text
  codes, text = tiny.run_two(flags, killed)
  assert codes == [0, 0], text
  # The save of step 4 may not have been committed.
  assert re.search('resuming at step [24]', text), text
  assert 'not bit for bit' not in text
  records, expected = (
    [x for x in metrics.read_metrics(w) if x['kind'] in ('train', 'eval')]
    for w in (killed, whole)
  )
  assert records == expected
  # It trains at all.
  assert records[-1]['loss'] < records[0]['loss'] - 0.05
  tiny.assert_same_params(killed, whole)
