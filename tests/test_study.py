"""Studies: their order, their best runs, and what the quickstart compares."""

import json
import math

from flax import traverse_util
import pytest

from encdec_adapt import config as config_lib
from encdec_adapt import study, train
from encdec_adapt.base import errors
from encdec_adapt.cli import command
from encdec_adapt.evaluation import study_stages
from encdec_adapt.evaluation.results import results_store
from encdec_adapt.files import paths
from encdec_adapt.telemetry import compute_cost
from tests import tiny


def test_stages_get_the_rate_of_the_best_finite_run(tmp_path, monkeypatch):
  names, losses = ('a', 'b', 'c', 'd'), (math.nan, -math.inf, 2.75, 2.5)
  for name, loss, rate in zip(names, losses, (1, 2, 3, 4), strict=True):
    (tmp_path / name).mkdir()
    summary = {'eval_loss': loss, 'learning_rate': rate * 1e-3}
    (tmp_path / name / compute_cost.SUMMARY).write_text(json.dumps(summary))
  flags = (f'--config={tiny.ROOT}/configs/base.py',)
  stage = study_stages.Stage('seeds', 'train', flags, 1.0, rate_of=names)
  rates = []
  monkeypatch.setattr(
    train, 'main', lambda v: rates.append(v.config.optimizer.learning_rate)
  )
  assert study.run_stages(str(tmp_path), [stage]) == 0
  assert rates == [0.004]
  stage = study_stages.Stage('seeds', 'train', flags, 1.0, rate_of=names[:2])
  with pytest.raises(errors.UserError, match='none of the runs'):
    study.run_stages(str(tmp_path), [stage])


def test_an_imported_decoder_has_the_numbers_of_its_training(tmp_path):
  source = tiny.ROOT / 'configs' / 'decoders' / 'base'
  summary = dict(steps=0, target_tokens=0.0, inclusive={'flops': 5.0})
  summary['made_by'] = {'command': 'import', 'sources': [str(source)]}
  (tmp_path / compute_cost.SUMMARY).write_text(json.dumps(summary))
  training = study._training_summary(paths.at(tmp_path), '.')
  assert (training['steps'], training['target_tokens']) == (3000, 6141172)
  assert training['eval_loss_at_step_0'] > 8 > 3 > training['eval_loss']
  assert training['inclusive'] == summary['inclusive']


def test_costs_of_an_earlier_version_are_to_be_measured_again(tmp_path):
  model = results_store.Model(f'{tmp_path}/a', 3, 'f')
  with results_store.Store(tmp_path) as store:
    for task, metric in (('held_out', 'loss'), ('cost', 'decode_ms')):
      score = results_store.Score(task, metric, 2.0, None, 1)
      store.add(model, {'generated': 32}, [score])
    with pytest.raises(errors.UserError, match='cost of a, .* remove .*stages'):
      study._run(paths.at(tmp_path), 'a', store)


def test_bad_flags_are_refused_before_the_first_stage(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  flags = (f'--config={tiny.ROOT}/configs/base.py', '--config.sead=3')
  stage = study_stages.Stage('a', 'train', flags, 1.0)
  plan = study_stages.Study('runs/x', 'title', 'small', (stage,), ('a',), 'x')
  with pytest.raises(errors.UserError, match='sead'):
    study.run(plan, 'digest')
  assert not any(tmp_path.iterdir())


@pytest.fixture(scope='module', params=['default', 'full'])
def loaded(request):
  """A size of the quickstart's study, and the configs that it trains."""
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(tiny.ROOT)
    plan, _ = study.load(f'configs/quickstart.py:size={request.param}')
    configs = {}
    for stage in plan.stages:
      if stage.module == 'train':
        values = command.parse(train.define_flags, stage.arguments)
        assert values.workdir == f'{plan.root}/{stage.name}'
        config_lib.load(values.config, values.workdir)
        configs[stage.name] = values.config
  return plan, configs


def _changed(configs, *runs):
  """Key to the values of two runs' configs, where they are not the same."""
  a, b = (
    traverse_util.flatten_dict(configs[run].to_dict(), sep='.') for run in runs
  )
  assert a.keys() == b.keys()
  return {key: (a[key], b[key]) for key in a if a[key] != b[key]}


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


def test_runs_differ_in_what_is_compared_alone(loaded):
  plan, configs = loaded
  source = f'{plan.root}/decoder_only'
  assert _changed(configs, 'adapted', 'scratch') == {
    'init.mode': ('adapt', 'random'),
    'init.encoder': (source, ''),
  }
  assert configs['scratch'].teacher.checkpoint == source
  warmups = {n: c.train.cross_attention_warmup for n, c in configs.items()}
  assert [n for n, s in warmups.items() if s] == ['unbalanced'] * (
    plan.size == 'default'
  )
  if plan.size == 'default':
    return
  more, pair = configs['decoder_only_continued'], configs['adapted']
  assert (more.init.mode, more.init.encoder) == ('checkpoint', source)
  # As many tokens, of a pass each.
  assert (more.train, more.data.passes) == (pair.train, pair.data.passes)
  tokens = {c.data.encoder_length + c.data.decoder_length for c in (more, pair)}
  assert len(tokens) == 1


def test_full_fits_into_two_and_a_half_hours(loaded):
  """Rates are chosen in short runs, for all models alike."""
  plan, configs = loaded
  if plan.size == 'full':
    assert sum(stage.budget_seconds for stage in plan.stages) <= 9000
    repeated = [stage for stage in plan.stages if stage.rate_of]
    assert len(repeated) == 9
    for stage in repeated:
      for name in stage.rate_of:
        assert configs[name].train.steps < configs[stage.name].train.steps / 5
        changed = _changed(configs, name, stage.name).keys()
        assert changed <= {'train.steps', 'optimizer.learning_rate', 'seed'}
