"""The quickstart's study in a size for tests: every stage, and again."""

import json
import pathlib
import time

import pytest

from tests import tiny

pytestmark = pytest.mark.e2e


def _kill_in_training(config, root: pathlib.Path, log: pathlib.Path) -> None:
  """Starts the study and kills it while its first model is trained."""
  study = tiny.start('study', f'--study={config}', log=log)
  try:
    metrics = root / 'adapted' / 'metrics.jsonl'
    while not (metrics.exists() and '"train"' in metrics.read_text()):
      assert study.poll() is None, log.read_text()
      time.sleep(0.05)
  finally:
    study.kill()
    study.wait()


@pytest.mark.long
def test_study_runs_reports_and_continues(tmp_path):
  root = tmp_path / 'run'
  # The same file with another root, so that a user's runs are left alone.
  source = (tiny.ROOT / 'configs' / 'quickstart.py').read_text()
  path = tmp_path / 'quickstart.py'
  path.write_text(
    source.replace('runs/quickstart_smoke', f'{root}').replace(
      'configs/quickstart.py:', f'{path}:'
    )
  )
  _kill_in_training(f'{path}:size=smoke', root, tmp_path / 'killed.log')
  finished = {marker.stem for marker in (root / 'stages').glob('*.json')}
  assert 'records_adapted' in finished and 'adapted' not in finished
  flag = f'--study={path}:size=smoke'
  done = tiny.run('study', flag, timeout=600)
  assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
  assert '[adapted] budget' in done.stdout
  for name in finished:
    assert f'[{name}] budget' not in done.stdout
  report = json.loads((root / 'report.json').read_text())
  runs = report['runs']
  assert set(runs) == {'decoder_only', 'adapted', 'scratch', 'unbalanced'}
  decoder = runs.pop('decoder_only')
  assert decoder['kind'] == 'decoder_only'
  # It was trained elsewhere, on text that is not the held-out text.
  assert decoder['inclusive']['flops'] == decoder['flops'] > 0
  for name, run in runs.items():
    assert run['kind'] == 'encoder_decoder'
    assert run['inclusive']['flops'] > run['flops'] > 0, name
    assert len(run['curve']['step']) == len(run['curve']['eval_loss']) > 2
    assert run['eval_loss_shuffled_prefix'] != run['eval_loss']
  starts = {name: run['eval_loss_at_step_0'] for name, run in runs.items()}
  assert starts['adapted'] < starts['scratch']
  assert decoder['eval_loss'] < runs['scratch']['eval_loss'] - 2
  assert len(report['samples']) == 4
  assert (root / 'report.html').stat().st_size > 10_000
  assert (root / 't5gemma' / 'config.json').exists()
