"""The checks of a first GPU, with tiny shapes on CPUs."""

import dataclasses
import json

import pytest

from encdec_adapt.ops import attention
from tests.benchmarks import device_check, gpu_numerics

SMALL = ['--heads=2', '--kv_heads=1']
ROWS = [*SMALL, '--length=24', '--window=5', '--padding=5', '--head_dims', '16']
MODEL = [*SMALL, '--layers=1', '--width=16', '--mlp_width=32', '--head_dim=16']
MODEL += ['--vocab_size=64', '--encoder_length=32', '--decoder_length=16']


@pytest.fixture
def tiny(monkeypatch):
  """Makes every check small."""
  monkeypatch.setattr(device_check, 'SIZES', ['--head_dim=16'])
  monkeypatch.setattr(device_check, 'ATTEMPTS', [(1, 2)])
  monkeypatch.setattr(device_check, 'EXAMPLES', [2])
  monkeypatch.setattr(device_check, 'DECODE_ROWS', [1])
  for name in ('SECONDS', 'LIMIT'):
    monkeypatch.setattr(device_check, name, 3600)  # On a busy machine.
  step = [*MODEL, '--platform=cpu', '--dtype=float32', '--steps=2']
  flags = {'gpu_numerics': ROWS, 'gpu_step': step}
  flags['gpu_generation'] = ['--pair=toy_toy', '--prompt=16', '--tokens=8']
  flags['encdec_adapt.plan'] = ['--config.train.batch_size=4']
  monkeypatch.setattr(device_check, 'FLAGS', flags)
  monkeypatch.setenv('XLA_FLAGS', '')
  monkeypatch.setenv('JAX_NUM_CPU_DEVICES', '2')


@pytest.mark.slow
def test_every_check_runs(tiny, tmp_path):
  output = tmp_path / 'check.json'
  device_check.main([f'--output={output}', '--chip=h100'])
  written = json.loads(output.read_text())
  assert written['device']['devices'] == 2
  checks = written['checks']
  assert [name.split(',')[0] for name in checks] == (
    ['numerics', 'numerics', 'sharded', 'decode', 'step', 'plan']
  )
  assert not [check for check in checks.values() if 'error' in check], checks
  (step,) = checks['step, chunked, 2 examples, 1 layers x 2']['rows']
  assert step['examples'] == 2 and step['FLOP/s'] > 0
  assert checks['plan, chunked']['programs']['train']['memory']['peak'] > 0


def _cpu():
  return {'platform': 'cpu', 'chip': None, 'devices': 1}


def _ampere():
  return {'platform': 'gpu', 'chip': 'a100', 'device_kind': 'NVIDIA A100'}


def test_a_run_that_is_cut_keeps_its_results(tiny, tmp_path, monkeypatch):
  monkeypatch.setattr(device_check, 'describe', _cpu)
  monkeypatch.setattr(device_check, 'SECONDS', 0)
  output, check = tmp_path / 'check.json', device_check._Run.check

  def stop_at_second(self, name, *arguments, **variables):
    if self.content['checks']:
      raise KeyboardInterrupt
    return check(self, name, *arguments, **variables)

  monkeypatch.setattr(device_check._Run, 'check', stop_at_second)
  with pytest.raises(KeyboardInterrupt):
    device_check.main([f'--output={output}'])
  (result,) = json.loads(output.read_text())['checks'].values()
  assert 'cut after 0 s' in result['error']


def test_a_chip_that_was_not_planned_for_is_refused(monkeypatch):
  monkeypatch.setattr(device_check, 'describe', _ampere)
  with pytest.raises(SystemExit, match='--chip=h100: this .* A100, .* a100'):
    device_check.main(['--chip=h100'])


def test_kernels_without_their_package_are_recorded(monkeypatch):
  def attend(*_, **__):
    raise ImportError('tokamax needs jax 0.11.1')

  backend = dataclasses.replace(attention.BACKENDS['chunked'], kernels=True)
  backend = dataclasses.replace(backend, attend=attend, takes_chunk=False)
  monkeypatch.setitem(attention.BACKENDS, 'old', backend)
  rows = {row['backend']: row for row in gpu_numerics.main(ROWS)['rows']}
  assert rows['old']['refused'] == 'ImportError: tokamax needs jax 0.11.1'
  assert rows['chunked']['passed'] and rows['chunked']['output'] < 2e-2
