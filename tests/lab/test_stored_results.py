"""Results that outlive the folders of runs: reports, stages, edits."""

import csv
import json
import shutil

import numpy as np
import pytest

from encdec_adapt import study
from encdec_adapt.base import errors
from encdec_adapt.data.sources import document_source
from encdec_adapt.evaluation.results import contrasts, results_store
from encdec_adapt.lab import stored_results
from tests import tiny

GROUPS = [f'm{i}' for i in range(9)]
REPORTED = [x for x in GROUPS if not document_source.is_development(x)]


def _stored(path, loss=2.5):
  """Writes the results of a study with an evaluation and a choice of rates."""
  rng = np.random.default_rng(0)
  score = results_store.ratio_score(
    'held_out',
    'loss',
    loss * 10 + rng.normal(size=len(GROUPS)),
    np.full(len(GROUPS), 10.0),
    GROUPS,
  )
  acc = results_store.mean_score('tasks', 'acc', [0, 1, 1])
  lost = results_store.Score('held_out', 'f1', float('nan'), None, 3)
  rows = [row for x in (score, acc, lost) for row in stored_results.rows(x)]
  loss = results_store.Score('rate', '0.003', 1 / 3, None, 1)
  results = {
    name: stored_results.Stored(
      {'state': {'identity': name}, 'own': True}, content
    )
    for name, content in (
      ('loss_pair', rows),
      ('rate', stored_results.rows(loss)),
    )
  }
  facts = {'study': 'small', 'claims': {'It is so.': 'less by 0.1'}}
  stored_results.write(path, facts, results)
  return score, acc


def test_values_are_read_as_they_were_measured(tmp_path):
  score, acc = _stored(tmp_path / 'small.csv')
  page, stages = stored_results.read(tmp_path / 'small.csv')
  assert page.facts['claims'] == {'It is so.': 'less by 0.1'}
  assert stages['rate'].scores == [
    results_store.Score('rate', '0.003', 1 / 3, None, 1)
  ]
  loss, accuracy, lost = stages['loss_pair'].scores
  assert loss.groups == tuple(REPORTED)
  for stored, measured in ((loss, score), (accuracy, acc)):
    measured = contrasts.reported(measured)
    for x, y in zip(
      contrasts.sums([[stored]]), contrasts.sums([[measured]]), strict=True
    ):
      np.testing.assert_allclose(x, y, rtol=1e-12)
    assert contrasts.same_examples(stored, measured)
  assert np.isnan(lost.value) and not lost.scores
  claims, found = stored_results.find(str(tmp_path / 'small.csv'))
  assert (claims, {*found}) == (page.facts['claims'], {*stages})
  # Another page of the folder has read the stages, and has no claims.
  claims, found = stored_results.find(str(tmp_path / 'other.csv'))
  assert found['rate'].scores == stages['rate'].scores and not claims
  assert stages['rate'].facts['own'] and not found['rate'].facts['own']


@pytest.mark.parametrize('reader', ['a', 'c'])
def test_a_page_keeps_its_facts_and_gets_what_it_lacks(tmp_path, reader):
  shape = {'parameters': 7}
  for name, seconds, facts in (('b', 9.0, shape), (reader, 1.0, {})):
    state = {'identity': 'x', 'seconds': seconds}
    stage = stored_results.Stored({'state': state, 'own': True, **facts}, [])
    path = tmp_path / f'{name}.csv'
    stored_results.write(path, {'study': name, 'claims': {}}, {'pair': stage})
  _, found = stored_results.find(str(tmp_path / f'{reader}.csv'))
  facts = {**found['x'].facts}
  facts.pop('digest')
  assert facts == {'state': state, 'own': True, **shape}


def _edit(path, change):
  with open(path, newline='') as file:
    lines = list(csv.DictReader(file))
  change(lines)
  with open(path, 'w', newline='') as file:
    writer = csv.DictWriter(file, stored_results.COLUMNS)
    writer.writeheader()
    writer.writerows(lines)


def _value(lines):
  (line, *_) = (x for x in lines if x['metric'] == 'loss')
  line['value'] = '1.0'
  return line['stage']


def _value_and_digest(lines):
  name = _value(lines)
  (line,) = (x for x in lines if x['stage'] == name and x['facts'])
  columns = stored_results.COLUMNS[1:-1]
  rows = [[x[key] for key in columns] for x in lines if x['stage'] == name]
  facts = json.loads(line['facts'])
  digest = stored_results.Stored(facts, rows[1:]).digest
  line['facts'] = json.dumps(facts | {'digest': digest})


def _claim(lines):
  lines[0]['facts'] = lines[0]['facts'].replace('less', 'greater')


@pytest.mark.parametrize(
  'change, problem',
  [
    (_value, 'results of stage loss_pair of study small do not match'),
    (_value_and_digest, 'of the stages and claims of study small do not match'),
    (_claim, 'of the stages and claims of study small do not match'),
    (lambda lines: lines.pop(), 'results of stage rate of study small'),
    (lambda lines: lines.pop(1), 'not results of a study'),
  ],
)
def test_edited_results_are_refused(tmp_path, change, problem):
  path = tmp_path / 'small.csv'
  _stored(path)
  _edit(path, lambda lines: None)
  stored_results.read(path)
  _edit(path, change)
  with pytest.raises(errors.UserError, match=f'small.csv: .*{problem}'):
    stored_results.read(path)


def test_results_of_shipped_pages_travel_with_a_checkout(monkeypatch):
  monkeypatch.chdir(tiny.ROOT)
  file = 'configs/studies/results/wang.csv'
  assert study.load('wang:size=cpu').results == file
  # Reports of all pages, trials, and pages elsewhere have no such file.
  for spec in ('all:size=cpu', 'wang:size=smoke', 'quickstart'):
    assert not study.load(spec).results
  monkeypatch.chdir(tiny.ROOT / 'tests')
  assert study.load('wang:size=cpu').results == str(tiny.ROOT / file)


_PAGE = """
import types

from encdec_adapt.configs.studies import combined
from encdec_adapt.lab import pages

STACK = dict(layers=1, width=16, mlp_width=32, heads=2, kv_heads=1, head_dim=8)
STACK |= dict(vocab_size=512, window=8)
CHANGES = {
  'data.source': 'text:lines.txt#lines', 'data.vocabulary': 'bytes',
  'data.objective': 'prefix_lm', 'data.encoder_length': 16,
  'data.decoder_length': 16, 'data.shards': 1, 'data.workers': 1,
  'data.eval_fraction': 0.3, 'data.repeat': True, 'compute.dtype': 'float32',
  'train.batch_size': 8, 'train.steps': 2, 'train.log_every': 1,
  'compute.compile_cache': 'compiled',
}
CHANGES |= {
  f'model.{side}.{key}': value
  for side in ('encoder', 'decoder') for key, value in STACK.items()
}


def get_study(arg):
  claim = pages.Claim(
    'Tuned is ahead.', 'a paper', '+1', ('pair', 'tuned'), 'held_out/loss',
    'less', 0.2 if arg == 'claim' else 0.1, 'noise', primary=True,
  )
  page = pages.Study(
    'small', 'A study', 'tiny',
    arms=(
      pages.Arm('pair', 'base', CHANGES, rate='rate'),
      pages.Arm(
        'tuned', 'base', CHANGES | {'init.mode': 'checkpoint'},
        starts={'init.encoder': 'pair'},
      ),
    ),
    seeds=(0, 1, 2) if arg == 'seeds' else (0, 1),
    claims=(claim,),
    evaluations=(pages.Evaluation('loss', records='pair'),),
    rates=(pages.Rate('rate', 'pair', (1e-3, 3e-3), 1, extra=0),),
    root='runs/studies/small', results='results/small.csv',
  )
  size = types.SimpleNamespace(name='tiny')
  return page if arg != 'read' else combined.study(
    'read', 'Of its models', size, [page], results='results/read.csv',
  )
"""
_ALL = """
from encdec_adapt.lab import pages

def get_study(arg):
  commands = [
    pages.Command(x, 'study', (f'--study=page.py{y}',))
    for x, y in (('small', ''), ('read', ':read'))
  ]
  return pages.Study(
    'all', 'All', 'tiny', (), commands=tuple(commands), readme='README.md',
  )
"""


@pytest.mark.long
def test_a_study_without_its_runs_has_the_same_report(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'page.py').write_text(_PAGE)
  (tmp_path / 'all.py').write_text(_ALL)
  (tmp_path / 'README.md').write_text('<!-- claims --><!-- end of claims -->')
  (tmp_path / 'lines.txt').write_text('\n'.join(tiny.text(200)))

  def report(arg='', flags=('--jobs=1',)):
    assert tiny.call(study, f'--study=page.py{arg}', *flags) == 0
    return json.loads((tmp_path / 'runs/studies/small/report.json').read_text())

  trained = report()
  stored_file = tmp_path / 'results' / 'small.csv'
  stored = stored_file.read_bytes()
  numbers = (tmp_path / 'runs/studies/small/numbers.csv').read_text()
  assert str(tmp_path).encode() not in stored
  file = tmp_path / 'runs/studies/small/loss_pair/results.jsonl'
  results = [json.loads(line) for line in file.read_text().splitlines()]
  results[0]['scores'] = [x + 1 for x in results[0]['scores']]
  file.write_text('\n'.join(map(json.dumps, results)) + '\n')
  with pytest.raises(errors.UserError, match='results of stage loss_pair than'):
    report(flags=('--report',))
  assert stored_file.read_bytes() == stored
  shutil.rmtree(tmp_path / 'runs')
  run_stage = lambda stage, *_, **__: pytest.fail(stage.name)  # noqa: E731
  monkeypatch.setattr(study, 'run_stage', run_stage)
  again = report()
  assert again['claims'] == trained['claims'] and trained['claims']
  ((*names, verdict, x, low, high),) = trained['effects']
  assert again['effects'] == [[*names, verdict, *map(_near, (x, low, high))]]
  assert again['summary'] == trained['summary']
  assert again['seconds'] == pytest.approx(trained['seconds'])
  *findings, note = again['findings']
  assert findings == trained['findings'] and 'rate: the best' in findings[0]
  assert note.startswith('10 of 10 stages are stored results')
  assert (tmp_path / 'runs/studies/small/numbers.csv').read_text() == numbers
  assert stored_file.read_bytes() == stored
  # From the file alone, too.
  shutil.rmtree(tmp_path / 'runs')
  assert tiny.call(study, '--study=all.py', '--report') == 0
  (cells,) = trained['claims']
  text = f'{cells["effect"]} ({cells["interval"]}) | {cells["verdict"]} |'
  readme = (tmp_path / 'README.md').read_text()
  assert text in readme
  # A page of these models reads them, and has no copy.
  assert 'Without claims: read.' in readme
  assert {*(tmp_path / 'results').iterdir()} == {stored_file}
  # Stages of other text, or of another Python, are others; nothing is lost.
  text = (tmp_path / 'lines.txt').read_text()
  (tmp_path / 'lines.txt').write_text(f'{text}\none more')
  assert tiny.call(study, '--study=page.py', '--report') == 0
  assert stored_file.read_bytes() == stored
  (tmp_path / 'lines.txt').write_text(text)
  # What another seed needs runs, and no rate is chosen again.
  capsys.readouterr()
  assert tiny.call(study, '--study=page.py:seeds', '--list', '--json') == 0
  missing = [
    x['name']
    for x in json.loads(capsys.readouterr().out)
    if x['status'] == 'not started'
  ]
  new = {f'{x}_seed2' for x in ('pair', 'tuned', 'loss_pair', 'loss_tuned')}
  assert {*missing} == {'records', *new}
  with pytest.raises(errors.UserError, match='--stage=pair reads records, not'):
    report(flags=('--stage=pair',))  # The folder of a stored run.
  assert tiny.call(study, '--study=page.py:seeds', '--list', '--fresh') == 0
  assert 'finished' not in capsys.readouterr().out
  changed = report(':claim', ('--report',))['findings']
  assert any(
    x.startswith("Changed since the first start: Tuned is ahead.: 'less by 0.1")
    and "'less by 0.2" in x
    for x in changed
  )
  _edit(stored_file, _value_and_digest)
  with pytest.raises(errors.UserError, match='small.csv: .* were edited'):
    report()


def _near(value):
  return pytest.approx(value, rel=1e-9)
