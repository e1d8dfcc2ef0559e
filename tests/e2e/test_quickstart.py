"""The quickstart's studies in sizes for tests: every stage, and again."""

import json
import pathlib

import pytest

from tests import tiny

pytestmark = pytest.mark.e2e


def _kill_in_training(config, root: pathlib.Path, log: pathlib.Path) -> None:
  """Starts the study and kills it while its first model is trained."""
  study = tiny.start('study', f'--study={config}', log=log)
  try:
    metrics = root / 'adapted' / 'metrics.jsonl'
    tiny.wait_until(
      lambda: metrics.exists() and '"train"' in metrics.read_text(),
      study,
      text=log.read_text,
    )
  finally:
    study.kill()
    study.wait()


def _states(root: pathlib.Path) -> dict[str, dict]:
  """States of the stages by name."""
  files = (root / 'stages').glob('*/stage.json')
  return {file.parent.name: json.loads(file.read_text()) for file in files}


def _copy(folder: pathlib.Path, *changes: tuple[str, str]) -> pathlib.Path:
  """Copies the study with changes, so that a user's runs are left alone."""
  path = folder / 'quickstart.py'
  source = (tiny.ROOT / 'configs' / path.name).read_text()
  for old, new in (*changes, ("'quickstart:", f"'{path}:")):
    source = source.replace(old, new)
  path.write_text(source)
  return path


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
  values = tiny.numbers(root)
  tuned = 'adapted_tuned', 'decoder_only_tuned'
  models = {'adapted', 'unbalanced', *tuned}
  assert {arm for arm, *_ in values} == {*models, 'decoder_only'}
  for name in models:
    assert len(values[name, '0', 'development', 'loss']) > 1
    (loss,), (shuffled,) = (
      values[name, '0', 'answers/held_out', x]
      for x in ('loss', 'loss_shuffled_prefix')
    )
    assert shuffled != loss
  report = json.loads((root / 'report.json').read_text())
  assert report['claims'] == []
  best, _, seeds = report['summary']
  assert best.startswith('Of 5 models, ') and 'one seed' in seeds
  page = (root / 'report.html').read_text()
  assert all(f'{name}, log_prob' in page for name in tuned)
  assert (root / 't5gemma' / 'config.json').exists()
