"""Classifiers from the command line: of a decoder, and of a pair's encoder."""

import json
import random
import time

import numpy as np
import pytest

import encdec_adapt
from encdec_adapt.base import errors
from encdec_adapt.evaluation.results import results_store
from tests import tiny
from tests.e2e import folders

WORDS = 'red green blue one two three'.split()


def _train(source, file, workdir, *flags):
  return tiny.run(
    'train',
    f'--config=configs/classification.py:source={source}',
    f'--workdir={workdir}',
    f'--config.data.source=labels:{file}#first,second,label',
    '--config.data.encoder_length=32',
    '--config.data.eval_fraction=0.2',
    '--config.data.workers=1',
    '--config.train.batch_size=8',
    '--config.train.eval_batch_size=8',
    '--config.compute.remat=none',
    *(f'--config.{flag}' for flag in flags),
  )


@pytest.fixture(scope='module')
def file(tmp_path_factory):
  rng = np.random.default_rng(0)
  rows = []
  for i in range(240):
    words = rng.choice(WORDS, 6)
    if i % 2:
      words[rng.integers(6)] = 'zebra'
    label = ('absent', 'present')[i % 2]
    rows.append({'first': ' '.join(words), 'second': 'zebra?', 'label': label})
  path = tmp_path_factory.mktemp('labels') / 'rows.jsonl'
  path.write_text('\n'.join(map(json.dumps, rows)))
  return path


@pytest.mark.long
@pytest.mark.e2e
def test_a_decoder_learns_labels_and_stops_early(file, tmp_path, request):
  source = request.config.rootpath / 'configs' / 'decoders' / 'small'
  flags = [
    'data.objective=classify:labels=absent|present',
    'data.passes=20',
    'optimizer.learning_rate=2e-3',
    'evaluation.loss=15',
    'train.patience=2',
  ]
  done = _train(source, file, tmp_path / 'run', *flags)
  assert done.returncode == 0, done.stdout + done.stderr
  assert "labels         ['" in done.stdout
  assert 'no lower held-out loss in 2 evaluations' in done.stdout
  summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
  found = folders.evaluate(tmp_path / 'run', tmp_path / 'run/records/eval')
  assert found['accuracy'] > 0.9 and found['macro_f1'] > 0.9
  assert found['majority'] < found['accuracy']
  with results_store.Store(tmp_path / 'run' / 'evaluation') as store:
    scores = {x.metric: x for _, x in store.entries()}
  majority, accuracy = scores['majority'], scores['accuracy']
  # Row by row, so that a report leaves the same rows out of both.
  assert majority.groups == accuracy.groups
  assert {*map(round, majority.scores)} == {0, 1}
  share = sum(majority.scores) / majority.n
  assert found['majority'] == pytest.approx(max(share, 1 - share))
  # It has ended: the same command trains no more.
  again = _train(source, file, tmp_path / 'run', *flags)
  assert again.returncode == 0, again.stdout + again.stderr
  assert f'step {summary["steps"] + 1}' not in again.stdout
  exported = folders.export(tmp_path / 'run', tmp_path / 'exported')
  rows = list(map(json.loads, file.read_text().splitlines()))[:40]
  texts = [f'{x["first"]}\n{x["second"]}' for x in rows]
  for path in (tmp_path / 'run', exported):
    labels = encdec_adapt.load(path).classify(texts)
    assert (
      np.mean([x == y['label'] for x, y in zip(labels, rows, strict=True)])
      > 0.85
    )
  with pytest.raises(errors.UserError, match='is no classifier'):
    encdec_adapt.load(source).classify(texts)
  refused = tiny.run('generate', f'--checkpoint={tmp_path}/run', '--prompt=x')
  assert refused.returncode == 2 and 'generates no text' in refused.stderr


@pytest.mark.e2e
@pytest.mark.long
def test_a_classifier_starts_from_the_encoder_of_a_pair(
  file, tmp_path, request
):
  source = request.config.rootpath / 'configs' / 'decoders' / 'small'
  pair = folders.adapt(tmp_path / 'pair', f'--encoder={source}')
  run = tmp_path / 'run'
  flags = ['data.objective=classify:labels=absent|present']
  # A step of rate zero changes nothing.
  flags += ['train.steps=1', 'optimizer.learning_rate=0', 'data.passes=1']
  done = _train(pair, file, run, *flags)
  assert done.returncode == 0, done.stdout + done.stderr
  found, encoder = folders.arrays(run), folders.arrays(pair)
  assert found.pop('decoder/head/table').shape[1] == 96
  for path, value in found.items():
    expected = encoder[path.replace('decoder/', 'encoder/', 1)]
    np.testing.assert_array_equal(value, expected)
  wrong = _train(pair, file, tmp_path / 'other', 'data.objective=bert')
  assert wrong.returncode == 2 and 'has labels' in wrong.stderr


@pytest.mark.e2e
@pytest.mark.slow
def test_a_grid_killed_at_random_repeats_no_run(file, tmp_path):
  root, other = tmp_path / 'grid', tmp_path / 'other' / 'again.jsonl'
  other.parent.mkdir()
  other.write_text(file.read_text())
  # Two tasks of the same rows: the one of the other field is the easier one.
  arg = f'source=configs/decoders/small,data={file};{other},root={root}'
  arg += ',fields=first+second+label;label+label,rates=1e-4+1e-3,batches=16'
  arg += ',labels=absent|present;absent|present,dropouts=0,budget=2,length=32'
  arg += ',passes=1'
  flag = f'--study=configs/classification.py:{arg}'
  for i in range(3):  # Twice killed, then left alone.
    finished = {
      json.loads(state.read_text())['name']
      for state in (root / 'stages').glob('*/stage.json')
      if json.loads(state.read_text())['status'] == 'finished'
    }
    log = tmp_path / f'{i}.log'
    study = tiny.start('study', flag, log=log)
    try:
      if i < 2:
        time.sleep(random.uniform(8, 25))
      else:
        assert study.wait(500) == 0, log.read_text()
    finally:
      study.kill()
      study.wait()
    for name in finished:
      assert f'[{name}]' not in log.read_text()
  report = json.loads((root / 'report.json').read_text())
  names = [f'{file.parent.name}_rows', 'other_again']
  runs = {f'{name}_{rate}_16_0' for name in names for rate in ('0.0001', 0.001)}
  values = tiny.numbers(root)
  assert {arm for arm, *_ in values} == runs
  best = []
  for name in names:
    (finding,) = (
      x for x in report['findings'] if x.startswith(f'best_{name} ')
    )
    (run,) = (x for x in runs if f'best_{name} is {x}:' in finding)
    (accuracy,) = (
      value
      for (arm, _, _, metric), (value, *_) in values.items()
      if (arm, metric) == (run, 'accuracy')
    )
    best.append(accuracy)
  mean = sum(best) / 2
  assert any(f'mean is {mean:.3f}.' in text for text in report['findings'])
  assert (root / 'report.html').exists()
