"""The quickstart's study in a size for tests: every stage, and again."""

import json
import subprocess
import sys

import pytest

from tests import tiny

pytestmark = pytest.mark.e2e


def _run(config) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, '-m', 'encdec_adapt.study', f'--study={config}'],
    cwd=tiny.ROOT,
    env=tiny.environment(),
    capture_output=True,
    text=True,
    timeout=600,
  )


def test_study_runs_reports_and_continues(tmp_path):
  # The same file with another root, so that a user's runs are left alone.
  source = (tiny.ROOT / 'configs' / 'quickstart.py').read_text()
  path = tmp_path / 'quickstart.py'
  path.write_text(
    source.replace('runs/quickstart_smoke', f'{tmp_path}/run').replace(
      'configs/quickstart.py:', f'{path}:'
    )
  )
  done = _run(f'{path}:size=smoke')
  assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
  report = json.loads((tmp_path / 'run' / 'report.json').read_text())
  runs = report['runs']
  assert {'decoder_only', 'adapted', 'scratch', 'unbalanced'} <= set(runs)
  for name, run in runs.items():
    assert run['target_tokens'] > 0, name
    assert run['inclusive']['flops'] >= run['flops'] > 0, name
    assert len(run['curve']['step']) == len(run['curve']['eval_loss']) > 2
    alone = name.startswith('decoder_only')
    assert run['kind'] == ('decoder_only' if alone else 'encoder_decoder')
    assert run['eval_loss_shuffled_prefix'] != run['eval_loss']
  assert (
    runs['adapted']['eval_loss_at_step_0']
    < (runs['scratch']['eval_loss_at_step_0'])
  )
  assert len(report['samples']) == 4
  assert all(stage['seconds'] > 0 for stage in report['stages'])
  assert (tmp_path / 'run' / 'report.html').stat().st_size > 10_000

  # A stage that was interrupted is run again, the others are not.
  (tmp_path / 'run' / 'stages' / 'generate.json').unlink()
  again = _run(f'{path}:size=smoke')
  assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
  assert again.stdout.count('\n$ ') == 1
