"""The quickstart's studies in sizes for tests: every stage, and again."""

import json
import pathlib
import time

import pytest

from tests import tiny

pytestmark = pytest.mark.e2e

SEEDS = '', '_seed1'


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


def _states(root: pathlib.Path) -> dict[str, dict]:
  """States of the stages by name."""
  files = (root / 'stages').glob('*/stage.json')
  return {file.parent.name: json.loads(file.read_text()) for file in files}


def _copy(folder: pathlib.Path, *changes: tuple[str, str]) -> pathlib.Path:
  """Copies the studies with changes, so that a user's runs are left alone."""
  names = 'quickstart', 'tuning'
  changes += tuple((f'={name}:', f'={folder / name}.py:') for name in names)
  for name in names:
    source = (tiny.ROOT / 'configs' / f'{name}.py').read_text()
    for old, new in changes:
      source = source.replace(old, new)
    (folder / f'{name}.py').write_text(source)
  return folder / 'quickstart.py'


@pytest.mark.long
def test_study_runs_reports_and_continues(tmp_path):
  root = tmp_path / 'run'
  path = _copy(tmp_path, ('runs/quickstart_smoke', f'{root}'))
  _kill_in_training(f'{path}:size=smoke', root, tmp_path / 'killed.log')
  states = _states(root)
  finished = {n for n, x in states.items() if x['status'] == 'finished'}
  assert 'records' in finished and states['adapted']['status'] == 'running'
  flag = f'--study={path}:size=smoke'
  done = tiny.run('study', flag, timeout=600)
  assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
  assert '[adapted, start 2]' in done.stdout
  for name in finished:
    assert f'[{name}]' not in done.stdout
  resumed = _states(root)['adapted']
  assert resumed['starts'] == 2
  assert resumed['seconds'] > states['adapted']['seconds'] > 0
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


@pytest.mark.slow
def test_full_size_compares_crosses_and_tunes(tmp_path):
  root = tmp_path / 'run'
  path = _copy(
    tmp_path,
    ("'runs/quickstart_full', 0, 900, 18, 192, 40, rate_steps=130", 'FULL'),
    ('FULL', f"'{root}', 400_000, 8, 2, 16, rate_steps=2"),
    ('(384, 128, 0)', '(384, 128, 100_000)'),
    ('(2e-3, 4e-3, 8e-3)', '(1e-3, 2e-3)'),
    ('SEEDS = 3', 'SEEDS = 2'),
  )
  flag = f'--study={path}:size=full'
  done = tiny.run('study', flag, timeout=3600)
  assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
  report = json.loads((root / 'report.json').read_text())
  models = {'adapted', 'scratch', 'decoder_only_continued'}
  seeds = {f'{model}{seed}' for model in models for seed in SEEDS}
  tuned = {f'{model}_tuned{seed}' for model in models for seed in SEEDS}
  assert set(report['runs']) == {*seeds, *tuned, 'decoder_only'}
  for name in seeds:
    assert report['runs'][name]['steps'] == 8
  for model in models:
    request = report['runs'][f'{model}_tuned']['request']
    assert request['FLOPs'] > 0 and request['ms at batch 1'] > 0
  assert 'its control' in '\n'.join(report['findings'])
