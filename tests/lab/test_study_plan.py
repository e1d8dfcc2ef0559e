"""Plans: power by variances of other studies, hours, passes, memory."""

import dataclasses
import json
import types

import numpy as np
import pytest

from encdec_adapt import config as config_lib
from encdec_adapt import configs, study
from encdec_adapt.base import errors
from encdec_adapt.cli import command
from encdec_adapt.data.sources import document_source
from encdec_adapt.evaluation.results import results_store
from encdec_adapt.lab import (
  pages,
  stage_states,
  stages,
  study_plan,
  study_results,
)
from encdec_adapt.telemetry import environment
from tests import tiny

GROUPS = [f'm{i}' for i in range(90)]
GROUPS = [x for x in GROUPS if not document_source.is_development(x)][:30]
CLAIM = pages.Claim(
  'b is ahead.', 'paper', '1', ('a', 'b'), pages.LOSS, 'less', 0.02, 'noise'
)


def _measured(name, evaluations):
  """A page with finished evaluations, and its states.

  Args:
    name: name of the page.
    evaluations: by name, deviations of losses over seeds and groups.
  """
  arms, resolved = (pages.Arm('a', 'base'), pages.Arm('b', 'base')), {}
  page = pages.Study(
    name,
    'A study',
    'test',
    arms,
    seeds=(0, 1, 2),
    claims=(CLAIM,),
    evaluations=tuple(map(pages.Evaluation, evaluations)),
  )
  for evaluation in evaluations:
    for arm in 'ab':
      for seed in page.seeds:
        stage = f'{evaluation}_{page.stage_of(arm, seed)}'
        resolved[stage] = stages.Stage(
          *(stage, 'evaluate', (), (), f'{name} {stage}'),
          model=arm,
          seed=seed,
          evaluation=evaluation,
        )
  states = stage_states.States(page, resolved)
  rng = np.random.default_rng(0)
  for stage in resolved.values():
    losses = 3 + rng.normal(0, evaluations[stage.evaluation], len(GROUPS))
    score = results_store.ratio_score(
      'held_out', 'loss', 10 * losses, np.full(len(GROUPS), 10.0), GROUPS
    )
    with states.start(stage, '') as state:
      state.status = stage_states.FINISHED
    with results_store.Store(states.folder(stage)) as store:
      store.add(results_store.Model(stage.name, 1, ''), {}, [score])
  return page, states


def test_a_page_is_planned_by_variances_of_others(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  path = configs.path
  file = tmp_path / 'variances.json'
  monkeypatch.setattr(
    configs, 'path', lambda x: str(file) if 'variances' in x else path(x)
  )
  encoder = _measured('encoder', {'text': 0.01, 'answers': 0.5})
  study_results.write_variances(*encoder)
  written = json.loads(file.read_text())
  # Losses of answers do not replace, nor plan, those of text.
  residuals = {x: y['encoder']['residual'] for x, y in written.items()}
  assert residuals == {
    'alike/text/held_out/loss': pytest.approx(2 * 0.01**2, rel=0.5),
    'alike/answers/held_out/loss': pytest.approx(2 * 0.5**2, rel=0.5),
  }
  (line,) = study_plan.describe(*encoder).splitlines()[1:]
  reason = 'no other page has variances of held_out/loss in variances.json'
  assert reason in line
  # A second study is added; each is planned by the other.
  wang = _measured('wang', {'text': 0.01})
  study_results.write_variances(*wang)
  merged = json.loads(file.read_text())
  assert merged['alike/text/held_out/loss'].keys() == {'encoder', 'wang'}
  answers = 'alike/answers/held_out/loss'
  assert merged[answers] == written[answers]
  for measured in encoder, wang:
    (line,) = study_plan.describe(*measured).splitlines()[1:]
    assert '80 % power at 0.0' in line
  # Nor is a page of other pages' models planned by these, and it adds nothing.
  other = _measured('correlation', {'encoder.answers': 0.5})
  assert 'no planned power' in study_plan.describe(*other)
  with pytest.raises(errors.UserError, match='correlation: no evaluation of'):
    study_results.write_variances(*other)


def test_a_trial_is_planned_without_a_measurement(tmp_path, monkeypatch):
  def refuse(*args):
    raise AssertionError(args)

  monkeypatch.setattr(study_plan, '_steps', refuse)
  monkeypatch.chdir(tiny.ROOT)
  page = dataclasses.replace(study.load('quickstart'), root=str(tmp_path))
  states = stage_states.States(page, stages.resolve(page))
  assert 'estimates from FLOPs' in study_plan.describe(page, states)
  # Seeds multiply what it costs.
  page = dataclasses.replace(page, seeds=(0, 1, 2))
  states = stage_states.States(page, stages.resolve(page))
  with pytest.raises(AssertionError):
    study_plan.describe(page, states)


@pytest.mark.long
def test_steps_and_passes_at_pod_are_planned(tmp_path, monkeypatch):
  (tmp_path / 'lines.txt').write_text('a line of text\n' * 400)
  monkeypatch.chdir(tiny.ROOT)
  page = study.load(
    f'initialisation:size=pod,text="text:{tmp_path}/lines.txt#lines",'
    'vocabulary=configs/decoders/base,topology=h100:64'
  )
  page = pages.Study(
    *(page.name, page.title, page.size),
    tuple(x for x in page.arms if x.name == 'copied'),
    commands=page.commands,
    root=str(tmp_path / 'run'),
    topology=page.topology,
  )
  states = stage_states.States(page, stages.resolve(page))
  lines = study_plan.describe(page, states).splitlines()
  assert lines[-1] == 'planned on h100:64, 64 chips; memory is of a chip'
  row = lines[1].split()
  assert row[0] == 'copied' and float(row[-1]) > 1
  (stage,) = (x for x in states.stages.values() if x.module == 'train')
  train = stage.settings.train
  (estimate,) = json.loads((states.root / 'rows.json').read_text()).values()
  (part,) = estimate['parts']
  passes = train.steps * train.batch_size / part['rows'] * estimate['passes']
  assert ' '.join(row).count(f'about {passes:.2f}') == 1
  (step,) = json.loads((states.root / 'steps.json').read_text()).values()
  assert step['fits'] and 1 < step['seconds'] < 100


def test_steps_of_other_adapters_and_optimizers_are_others():
  keys = environment.flat(config_lib.defaults().to_dict())
  for name in study_plan._SHAPE:
    assert any(key.startswith(name) for key in keys), name
  page = pages.Study('x', 'x', 'x', ())

  def shape(**values):
    values = {key.replace('__', '.'): x for key, x in values.items()}
    stage = stages.Stage('a', 'train', (), (), '', values=values)
    return study_plan._shape(page, stage)

  same = [shape(train__steps=n, train__lora__rank=2) for n in (1, 2)]
  shapes = {*same, shape(train__lora__rank=32), shape(train__lora__rank=0)}
  shapes |= {shape(optimizer__kind=x) for x in ('adamw', 'adafactor')}
  assert len(shapes) == 5


def test_further_rates_are_a_bound_beside_the_costs():
  page = pages.Study('x', 'x', 'x', ())
  settings = types.SimpleNamespace(train=types.SimpleNamespace(steps=3600))
  rate = pages.Rate('rate', 'a', (1e-3, 3e-3, 9e-3))
  chosen, run = (
    stages.Stage(
      *('a', 'train', (), (), ''), rate=x, settings=settings, flops=30.0
    )
    for x in (rate, None)
  )
  steps = {study_plan._shape(page, run): {'seconds': 1.0}}
  costs = study_plan._costs(page, [chosen, run], steps)
  assert costs == study_plan.Costs(2, 60.0, 0.0, 4.0, 20.0, 2.0)
  assert 'up to 20 FLOPs and 2.00 hours more' in costs.line


@pytest.mark.long
@pytest.mark.parametrize(
  'loss, rows',
  [
    ('cross_entropy', ('objective=causal_lm', 'encoder_length=0')),
    # Its teacher is an arm that is not trained yet.
    ('distill', ('objective=prefix_lm', 'encoder_length=16')),
  ],
)
def test_steps_with_dropout_and_of_teachers_are_measured(tmp_path, loss, rows):
  changes = {f'decoder.{k}': x for k, x in tiny.STACK.items() if k != 'pattern'}
  flags = [f'--config.model.{key}={x}' for key, x in changes.items()]
  flags += ['--config.model.kind=decoder_only', '--config.train.dropout=0.1']
  flags += ['--config.train.batch_size=8', '--config.data.vocabulary=bytes']
  flags += [f'--config.data.{x}' for x in ('decoder_length=16', *rows)]
  if loss == 'distill':
    flags += ['--config.loss.kind=distill']
    flags += ['--config.teacher.checkpoint={decoder_s0}']
  values = command.parse(command.define_config, ['--config=base', *flags])
  settings = config_lib.load(values.config, str(tmp_path))
  study_plan.measure(str(tmp_path / 'steps.json'), {'shape': settings}, '')
  step = json.loads((tmp_path / 'steps.json').read_text())['shape']
  assert step['seconds'] > 0 and step['bytes'] > 0
