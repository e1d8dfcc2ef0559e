"""DPO from the command line: accuracy rises, and resuming is exact."""

import json

import numpy as np
import pytest

from encdec_adapt import evaluate
from encdec_adapt.evaluation.results import predictions, results_store
from encdec_adapt.telemetry import metrics
from tests import tiny
from tests.e2e import folders


def _records(workdir, kind):
  return {
    record['step']: record
    for record in metrics.read_metrics(workdir / metrics.FILE)
    if record['kind'] == kind
  }


@pytest.mark.long
@pytest.mark.e2e
def test_preferences_train_a_decoder(tmp_path):
  lines = [
    {
      'prompt': f'The name of number {i} is',
      'chosen': f' value_{i}' * (1 + i % 3),
      'rejected': f' other {i}' * (1 + i % 2),
      'label': 0 if i % 20 == 19 else 1,
    }
    for i in range(120)
  ]
  file = tmp_path / 'preferences.jsonl'
  file.write_text('\n'.join(map(json.dumps, lines)))
  source = f'{tiny.ROOT}/configs/decoders/small'
  flags = [
    f'--config=configs/sft.py:source={source}',
    '--config.loss.kind=dpo',
    '--config.loss.dpo.cross_entropy=0.2',
    '--config.data.objective=preferences:separator=":"',
    f'--config.data.source=preferences:{file}#prompt,chosen,rejected,label=label',
    *folders.small_rows(tmp_path / 'records'),
    '--config.evaluation.loss=6',
    '--config.evaluation.samples=12',
    '--config.train.microbatches=2',
    '--config.checkpoint.every=6',
    '--config.optimizer.schedule=constant',
    '--config.optimizer.warmup_steps=0',
    '--config.optimizer.learning_rate=1e-3',
  ]

  def train(name, steps, *more):
    return tiny.run(
      'train',
      *flags,
      f'--workdir={tmp_path}/{name}',
      f'--config.train.steps={steps}',
      *more,
    )

  for name, steps in (('run', 12), ('resumed', 6), ('resumed', 12)):
    done = train(name, steps)
    assert done.returncode == 0, done.stdout + done.stderr
  evaluations = _records(tmp_path / 'run', 'eval')
  assert list(evaluations) == [0, 6, 12]
  # The policy is the reference at step 0.
  assert evaluations[0]['accuracy'] == pytest.approx(0.5, abs=0.05)
  assert evaluations[12]['accuracy'] > 0.9
  (step,) = (x for x in done.stdout.splitlines() if x.startswith('step 12/12'))
  assert [x.split()[0] for x in step.split('  ')[1:4]] == [
    *('loss', 'margin', 'accuracy')
  ]
  first, last = (evaluations[x]['margin'] for x in (0, 12))
  assert f', margin {first:.4g} -> {last:.4g}, accuracy ' in done.stdout
  # The reference is read again; held-out rows are a fifth of the file's.
  flag = f'--preferences={file}#prompt,chosen,rejected,label=label'
  output = f'--output={tmp_path}/evaluation'
  arguments = (f'--checkpoint={tmp_path}/run', flag, output, '--cost=')
  assert tiny.call(evaluate, *arguments) == 0
  with results_store.Store(tmp_path / 'evaluation') as store:
    found = [score for _, score in store.entries()]
  scores = {x.metric: x for x in found if x.task == 'preferences'}
  assert scores['accuracy'].value > 0.9 and scores['accuracy'].n == 114
  (kept,) = (tmp_path / 'evaluation' / predictions.FOLDER).iterdir()
  margins = np.array(
    [json.loads(x)['scores']['margin'] for x in kept.read_text().splitlines()]
  )
  assert scores['loss'].value == pytest.approx(
    np.log1p(np.exp(-margins)).mean(), rel=1e-4
  )
  manifests = [
    json.loads((tmp_path / 'records' / split / 'manifest.json').read_text())
    for split in ('train', 'eval')
  ]
  # Three passes over the training documents.
  assert (
    manifests[0]['totals']['ties'] / 3 + manifests[1]['totals']['ties'] == 6
  )
  assert not manifests[0]['spec']['pack']

  resumed = tmp_path / 'resumed'
  for kind in ('train', 'eval'):
    assert _records(resumed, kind) == _records(tmp_path / 'run', kind)
  tiny.assert_same_params(resumed, tmp_path / 'run')
  other = f'--config.teacher.checkpoint={tmp_path}/run'
  refused = train('resumed', 18, other)
  assert refused.returncode == 2
  assert 'was trained with another teacher' in refused.stderr
