"""Jobs whose `compute.remat` follows from the memory of the devices."""

import functools
import json

import pytest

from encdec_adapt import train
from encdec_adapt.base import errors
from encdec_adapt.checkpoints import manager
from tests import accelerator, tiny

pytestmark = pytest.mark.e2e
_train = functools.partial(tiny.call, train)


def _stand_in(monkeypatch, limit):
  accelerator.stand_in(lambda: limit, monkeypatch.setattr)


def _losses(workdir):
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  return [row['loss'] for row in rows if 'loss' in row]


@pytest.mark.long
def test_a_job_chooses_stores_and_keeps_its_policy(
  pairs, tmp_path, monkeypatch, capfd
):
  # Of the last of two phases, which is compiled before the first step.
  flags = [*pairs, '--config.train.steps=6', '--config.evaluation.loss=0']
  flags += ['--config.train.cross_attention_warmup=3']
  flags += ['--config.optimizer.schedule=constant']
  plain = [*flags, '--config.compute.remat=none']
  assert _train(*plain, f'--workdir={tmp_path}/plain') == 0
  _stand_in(monkeypatch, 2**30)
  whole, part = tmp_path / 'whole', tmp_path / 'part'
  capfd.readouterr()
  assert _train(*flags, f'--workdir={whole}') == 0
  printed = capfd.readouterr().out
  assert 'memory of a device: 1.0 GiB' in printed
  assert printed.count('compiling the step with') == 1
  assert "compute.remat is 'dots', the fastest" in printed
  assert _losses(whole) == pytest.approx(_losses(tmp_path / 'plain'), rel=1e-4)

  assert _train(*flags, f'--workdir={part}', '--config.train.steps=4') == 0
  config = json.loads((part / 'config.json').read_text())
  assert config['compute']['remat'] == 'dots'
  meta = manager.open_latest(part).read_meta()
  assert meta['config']['compute']['remat'] == 'dots'
  assert "'dots' needs" in meta['remat']
  # The devices have less memory now, which changes nothing.
  _stand_in(monkeypatch, 2**10)
  capfd.readouterr()
  assert _train(*flags, f'--workdir={part}') == 0
  assert 'compiling the step with' not in capfd.readouterr().out
  tiny.assert_same_params(part, whole)
  assert manager.open_latest(part).read_meta()['remat'] == meta['remat']
  # Chosen again on another mesh, where nothing fits now.
  with pytest.raises(errors.UserError, match='fits: with .full. a step needs'):
    mesh = ['--config.mesh.replica=2', '--config.mesh.fsdp=4']
    _train(*flags, *mesh, '--config.train.steps=8', f'--workdir={part}')
  printed = capfd.readouterr().out
  assert "config.compute.remat: 'dots' before, 'auto' now" in printed


def test_memory_that_cannot_be_read_asks_for_a_policy(
  pairs, tmp_path, monkeypatch
):
  _stand_in(monkeypatch, None)
  with pytest.raises(errors.UserError, match="memory of cpu cannot.*'dots' is"):
    _train(*pairs, f'--workdir={tmp_path}/run')
