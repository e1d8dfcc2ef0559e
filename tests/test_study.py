"""Studies: loading of pages, choices of rates, what shipped pages compare."""

import dataclasses
import json
import math
import re
import shutil
import types

import pytest

from encdec_adapt import study, train
from encdec_adapt.base import errors
from encdec_adapt.cli import command
from encdec_adapt.files import paths
from encdec_adapt.lab import (
  pages,
  plan_results,
  stage_states,
  stages,
  study_results,
  text_passes,
)
from encdec_adapt.telemetry import compute_cost, environment
from tests import tiny


def _losses_by_rate(tmp_path, monkeypatch, losses, **fields):
  """Chooses a rate; a run has the loss of its rate. Returns it and the runs."""
  runs = []

  def main(values):
    rate = values.config.optimizer.learning_rate
    runs.append(rate)
    if losses[rate] is None:
      raise errors.DivergedError('10 updates in a row are not finite')
    metric = fields.get('metric', 'loss')
    summary = json.dumps({f'eval_{metric}': losses[rate]})
    folder = paths.at(values.workdir)
    folder.mkdir(parents=True)
    (folder / compute_cost.SUMMARY).write_text(summary)
    return 0

  monkeypatch.setattr(train, 'main', main)
  rate = pages.Rate('rate', 'arm', (1e-3, 2e-3, 4e-3), **fields)
  stage = stages.Stage('rate', 'train', (), (), '', rate=rate)
  flags = f'--config={tiny.ROOT}/configs/base.py', f'--workdir={tmp_path}/rate'
  status, best = study.run_stage(stage, flags)
  assert status == 0
  return best, runs


def test_the_rate_of_the_lowest_finite_loss_is_chosen(tmp_path, monkeypatch):
  losses = {1e-3: 2.75, 2e-3: 2.5, 4e-3: math.nan}
  assert _losses_by_rate(tmp_path, monkeypatch, losses) == (2e-3, [*losses])
  # A choice that was interrupted repeats no run.
  assert _losses_by_rate(tmp_path, monkeypatch, losses)[1] == []
  saved = json.loads((tmp_path / 'rate' / 'rates.json').read_text())
  assert saved['rate'] == 2e-3 and saved['losses']['0.001'] == 2.75


def test_rates_beyond_an_edge_are_tried_twice_at_most(tmp_path, monkeypatch):
  losses = {1e-3: 4.0, 2e-3: 3.0, 4e-3: 2.0, 8e-3: 1.5, 16e-3: 1.0}
  assert _losses_by_rate(tmp_path, monkeypatch, losses) == (16e-3, [*losses])


def test_the_rate_of_the_highest_reward_is_chosen(tmp_path, monkeypatch):
  rewards = {1e-3: 0.25, 2e-3: 0.5, 4e-3: 0.125}
  found = _losses_by_rate(tmp_path, monkeypatch, rewards, metric='reward')
  assert found == (2e-3, [*rewards])


def test_rates_that_diverge_are_not_chosen(tmp_path, monkeypatch):
  losses = {1e-3: 2.0, 2e-3: None, 4e-3: None, 5e-4: 2.5}
  assert _losses_by_rate(tmp_path, monkeypatch, losses) == (1e-3, [*losses])
  losses = dict.fromkeys((1e-3, 2e-3, 4e-3))
  with pytest.raises(errors.UserError, match='none of the rates'):
    _losses_by_rate(tmp_path / 'other', monkeypatch, losses)


def test_an_imported_decoder_has_the_numbers_of_its_training(tmp_path):
  source = tiny.ROOT / 'configs' / 'decoders' / 'base'
  summary = dict(steps=0, target_tokens=0.0, inclusive={'flops': 5.0})
  summary['made_by'] = {'command': 'import', 'sources': [str(source)]}
  (tmp_path / compute_cost.SUMMARY).write_text(json.dumps(summary))
  training = study_results.training_summary(paths.at(tmp_path))
  assert (training['steps'], training['target_tokens']) == (3000, 6141172)
  assert training['eval_loss_at_step_0'] > 8 > 3 > training['eval_loss']
  for name in ('inclusive', 'made_by'):
    assert training[name] == summary[name]


def test_a_model_has_the_rate_that_was_chosen_and_keys_of_its_stacks():
  values = {'model.encoder.layers': 2, 'model.decoder.layers': 4}
  values['optimizer.learning_rate'] = '{rate}'
  stage = stages.Stage('arm', 'train', (), (), '', values=values)
  states = types.SimpleNamespace(values=lambda stage: {'rate': '0.009'})
  config = types.SimpleNamespace(stacks={'decoder': None})
  assert study_results._values(states, stage, config) == {
    'model.decoder.layers': 4,
    'optimizer.learning_rate': '0.009',
  }


def test_stages_of_other_versions_and_numbers_of_cores_are_named():
  def state(cores, **changes):
    made_in = environment.versions() | {'cores': cores} | changes
    status = stage_states.FINISHED
    return stage_states.State('x', '', status, environment=made_in)

  # Workers have other numbers of cores than the process that reports.
  started = {'a': state(999), 'b': state(999)}
  assert study_results._notes(started) == []
  other, mixed = study_results._notes(
    started | {'c': state(1), 'd': state(1, jax='0.4')}
  )
  assert other.startswith("made by another version (jax: '0.4' before")
  assert other.endswith('): d.')
  text = 'Stages were made with different numbers of cores'
  assert mixed == f'{text}: 2 with 999, 2 with 1.'


@pytest.mark.parametrize(
  'content, problem',
  [
    ('import no_such_module', r'line 1 \(ModuleNotFoundError'),
    ('\ndef get_study(arg:\n  pass', r'line 2 \(SyntaxError'),
    ('def get_study(arg):\n  return arg[0]', r'line 2 \(TypeError'),
    ('def get_config(arg):\n  pass', r'has no get_study\(arg\)'),
  ],
)
def test_a_study_that_fails_is_named_with_its_line(tmp_path, content, problem):
  (tmp_path / 'broken.py').write_text(content)
  with pytest.raises(errors.UserError, match=f'broken.py.* {problem}'):
    study.load(f'{tmp_path}/broken.py')


_PAGE = """
from encdec_adapt.lab import pages

def get_study(arg):
  changes = {'data.source': 'text:lines.txt#lines', 'data.vocabulary': 'bytes'}
  command = pages.Command('hf', 'generate', ('--chekpoint={run}',))
  return pages.Study(
    'small', 'A study', 'tiny', (pages.Arm('run', 'base', changes),),
    commands=(command,) * (arg == 'wrong'), root='runs/small',
  )
"""


def test_bad_arguments_are_refused_before_the_first_stage(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'page.py').write_text(_PAGE)
  (tmp_path / 'lines.txt').write_text('a line\n' * 40)
  with pytest.raises(errors.UserError, match='chekpoint'):
    tiny.call(study, '--study=page.py:wrong')
  with pytest.raises(errors.UserError, match=r"--stage=rum .* mean 'run'"):
    tiny.call(study, '--study=page.py', '--stage=rum')
  assert not (tmp_path / 'runs').exists()
  assert tiny.call(study, '--study=page.py', '--list', '--json') == 0
  records, run = json.loads(capsys.readouterr().out)
  assert (records['name'], run['reads']) == ('records', ['records'])
  assert run['status'] == 'not started' and run['folder'] == 'runs/small/run'
  assert '--workdir=runs/small/run' in run['command']


def test_runs_of_the_quickstart_differ_in_what_is_compared_alone(monkeypatch):
  monkeypatch.chdir(tiny.ROOT)
  resolved = stages.resolve(study.load('configs/quickstart.py:size=default'))
  trained = {n: x for n, x in resolved.items() if x.module == 'train'}
  tuned = [x.settings for n, x in trained.items() if n.endswith('_tuned')]
  assert len({(x.data, x.train, x.optimizer) for x in tuned}) == 1
  warmups = {
    n: x.values['train.cross_attention_warmup'] for n, x in trained.items()
  }
  assert [n for n, steps in warmups.items() if steps] == ['unbalanced']


def test_a_text_that_is_read_too_often_is_refused(tmp_path, monkeypatch):
  tiny.make_records(tmp_path)
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'page.py').write_text(_PAGE)
  (tmp_path / 'lines.txt').write_text('a line\n' * 40)
  page = study.load('page.py')
  for steps, fits in ((12, True), (4000, False)):
    arm = dataclasses.replace(page.arms[0], budget=steps)
    resolved = stages.resolve(dataclasses.replace(page, arms=(arm,)))
    arguments = [f'--config.data.folder={tmp_path}/prefix_lm']
    if fits:
      text_passes.check(resolved['run'], arguments)
    else:
      with pytest.raises(errors.UserError, match='stage run reads .* times in'):
        text_passes.check(resolved['run'], arguments)


@pytest.mark.parametrize(
  'rates, passes',
  [
    # 48 of 100 rows of a pass, and 48 of 60: both objectives read all the text.
    ('', 8 * 12 * 2 / 160),
    ('rows:0,1', 8 * 12 / 60),
    ('rows:1,0; 6=rows:0,1', 8 * 6 / 100 + 8 * 6 / 60),
  ],
)
def test_every_objective_of_a_mixture_reads_the_text(rates, passes):
  parts = [
    {'objective': name, 'source': 'text:x', 'rows': rows}
    for name, rows in (('prefix_lm', 200), ('ul2', 120))
  ]
  settings = types.SimpleNamespace(
    train=types.SimpleNamespace(steps=12, batch_size=8),
    data=types.SimpleNamespace(rates=rates),
  )
  found = text_passes.count(settings, parts, 2)
  assert found == pytest.approx(passes)


def test_a_plan_warns_of_text_that_is_read_too_often(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'page.py').write_text(_PAGE)
  (tmp_path / 'lines.txt').write_text('a line\n' * 40)
  page = dataclasses.replace(study.load('page.py'), root=str(tmp_path / 'x'))
  states = stage_states.States(page, stages.resolve(page))
  run, records = states.stages['run'], states.stages['records']
  train = run.settings.train
  rows = train.steps * train.batch_size / 9
  part = {'objective': 'x', 'source': 'text', 'rows': rows}
  estimates = {records.identity: {'parts': [part], 'passes': 1}}
  passes = text_passes.Passes(states, estimates)
  assert passes.describe(run) == 'about 9.00'
  (note,) = passes.notes([run, run])  # As of two seeds.
  assert note.startswith('run reads its text about 9.0 times, and more than 4')
  unknown = text_passes.Passes(states, {})
  assert unknown.describe(run) == ''
  assert unknown.notes([run]) == ['passes are known after --stage=records']


_ALL = """
from encdec_adapt.lab import pages

def get_study(arg):
  names = 'page.py', 'page.py:wrong'
  commands = [
    pages.Command(f'page{i}', 'study', (f'--study={name}',))
    for i, name in enumerate(names)
  ]
  return pages.Study(
    'all', 'All', 'tiny', (), commands=tuple(commands), readme='README.md',
  )
"""


def test_the_report_of_all_pages_writes_the_table_of_claims(
  tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'page.py').write_text(_PAGE)
  (tmp_path / 'all.py').write_text(_ALL)
  (tmp_path / 'README.md').write_text('<!-- claims --><!-- end of claims -->')
  (tmp_path / 'results.json').write_text(
    json.dumps({'page0': [{'verdict': 'y'}]})
  )
  assert tiny.call(study, '--study=all.py', '--report') == 0
  lines = (tmp_path / 'README.md').read_text().splitlines()
  assert lines[1:4] == [
    '| verdict |',
    '| --- |',
    '| y (by the rule of before) |',
  ]
  assert lines[-2] == 'Not run: page1.'


def test_pages_run_again_and_get_the_flags(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'lines.txt').write_text('a line\n' * 40)
  (tmp_path / 'page.py').write_text(_PAGE)
  (tmp_path / 'all.py').write_text(_ALL)
  (tmp_path / 'README.md').write_text('<!-- claims --><!-- end of claims -->')
  run_stage, ran = study.run_stage, []

  def run(stage, arguments, jobs):
    if stage.module == 'study':
      assert jobs == 1
      return run_stage(stage, arguments, jobs)
    ran.append((stage.name, arguments))
    return 0, None

  monkeypatch.setattr(study, 'run_stage', run)
  monkeypatch.setattr(plan_results, 'find', lambda *_: {})
  monkeypatch.setattr(study, '_report', lambda *_: None)
  flags = '--study=all.py', '--jobs=1', '--root=out'
  assert tiny.call(study, *flags) == 1  # The second page is wrong.
  assert [name for name, _ in ran] == ['records', 'run']
  assert ran[1][1][-1].endswith('out/page0/run')
  # After an edit of the page, which it does not show in its name.
  edited = _PAGE.replace("'base', changes", "'base', changes, budget=9")
  (tmp_path / 'page.py').write_text(edited)
  assert tiny.call(study, *flags) == 1
  assert [name for name, _ in ran[2:]] == ['run']
  assert tiny.call(study, *flags, '--plan') == 0


def test_a_worker_without_the_gpu_of_a_page_is_refused(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'page.py').write_text(_PAGE)
  (tmp_path / 'lines.txt').write_text('a line\n' * 40)
  page = dataclasses.replace(study.load('page.py'), platform='gpu')
  states = stage_states.States(page, stages.resolve(page))
  with states.start(states.stages['records'], '') as state:
    state.status = 'finished'
  with pytest.raises(errors.UserError, match='run .* needs a gpu, .* are cpu'):
    study.workers.work(page, states, study.run_stage)


def test_what_another_version_has_made_is_named_and_run_again(tmp_path, capsys):
  page, root = tmp_path / 'page.py', tmp_path / 'study'
  source = tmp_path / 'small'  # The shipped one has stored results.
  shutil.copytree(tiny.ROOT / 'configs' / 'decoders' / 'small', source)
  page.write_text(f"""
from encdec_adapt.lab import pages
def get_study(arg=None):
  flags = 'import', '--source={source}', '--output={{imported}}'
  command = pages.Command('imported', 'convert', flags)
  return pages.Study('page', 'A page', 'tiny', (), commands=(command,))
""")

  def run(*flags):
    arguments = [f'--study={page}', f'--root={root}', *flags]
    assert study.main(command.parse(study.define_flags, arguments)) == 0
    return capsys.readouterr().out

  ran = '[imported]'
  assert ran in run() and ran not in run()
  assert 'imported: finished\n' in run('--list')
  (state,) = (root / 'stages').glob('*/stage.json')
  content = json.loads(state.read_text())
  content['environment']['python'] = '3.1.4'
  state.write_text(json.dumps(content))
  assert "imported: finished (python: '3.1.4' before, " in run('--list')
  assert ran not in run()
  assert ran in run('--fresh') and ran not in run('--fresh')


def test_the_example_of_the_page_is_a_study(tmp_path, monkeypatch, capsys):
  page = (tiny.ROOT / 'configs' / 'studies' / 'README.md').read_text()
  (tmp_path / 'mine.py').write_text(
    re.search('```python\n(.*?)```', page, re.S)[1]
  )
  monkeypatch.chdir(tmp_path)
  assert tiny.call(study, '--study=mine.py:size=smoke', '--list') == 0
  listed = capsys.readouterr().out
  assert 'dropout: not started' in listed
  assert 'text_dropout: not started' in listed
