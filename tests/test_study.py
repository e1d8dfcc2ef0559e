"""Studies: which run is the best, and what the quickstart's runs differ in."""

import json
import math

from flax import traverse_util
import pytest

from encdec_adapt import config as config_lib
from encdec_adapt import study, train
from encdec_adapt.cli import command, errors
from encdec_adapt.files import paths
from encdec_adapt.telemetry import accounting
from tests import tiny

RATES = ('0.0005', '0.0015', '0.0045')


def _summaries(folder, **losses):
  """Summaries of runs by name; their learning rates are 1, 2, .."""
  for rate, (name, loss) in enumerate(losses.items(), 1):
    (folder / name).mkdir()
    (folder / name / accounting.SUMMARY).write_text(
      json.dumps({'eval_loss': loss, 'learning_rate': rate * 1e-3})
    )
  return paths.at(folder), tuple(losses)


def test_rate_of_the_lowest_loss_and_never_of_a_run_that_diverged(tmp_path):
  root, names = _summaries(tmp_path, a=3.0, b=2.5, c=2.75)
  assert study._best_rate(root, names) == (
    '--config.optimizer.learning_rate=0.002',
  )
  # NaN is neither higher nor lower than a number: it may stand anywhere.
  (tmp_path / 'nan').mkdir()
  root, names = _summaries(
    tmp_path / 'nan', a=math.nan, b=-math.inf, c=2.75, d=2.5, e=math.nan
  )
  assert study._best(root, names) == 'd'
  assert study._best(root, names[::-1]) == 'd'
  assert study._best(root, names[:3]) == 'c'
  with pytest.raises(errors.UserError, match='none of the runs'):
    study._best(root, ('a', 'b', 'e'))
  assert study._best_rate(root, ()) == ()


def test_a_stage_is_given_the_rate_of_the_best_run(tmp_path, monkeypatch):
  root, names = _summaries(tmp_path, a=math.nan, b=2.5, c=2.75)
  flags = (f'--config={tiny.ROOT}/configs/base.py',)
  stage = study.Stage('seeds', 'train', flags, 1.0, rate_of=names)
  given = []
  monkeypatch.setattr(
    train, 'main', lambda v: given.append(v.config.optimizer.learning_rate)
  )
  assert study.run_stages(str(root), [stage]) == 0
  assert given == [0.002]


ROOT = 'runs/x'
BASE = f'--config={tiny.ROOT}/configs/base.py'


def _stage(name, module, *flags, **fields):
  return study.Stage(name, module, flags, 1.0, **fields)


def _trained(name, *flags, **fields):
  flags = BASE, f'--workdir={ROOT}/{name}', *flags
  return _stage(name, 'train', *flags, **fields)


def _study(*stages, **fields):
  """A study of two runs, and what is given in place of it."""
  checkpoints = [f'--checkpoint={ROOT}/{name}' for name in 'ab']
  stages = stages or (_trained('a'), _trained('b', rate_of=('a',)))
  stages += (
    _stage('evaluate', 'evaluate', '--records=x', *checkpoints),
    _stage('generate', 'generate', f'--output={ROOT}/out.json', '--prompt=x'),
  )
  fields = {
    'runs': ('a', 'b'),
    'best_of': {'best': ('a', 'b')},
    'samples': f'{ROOT}/./out.json',
    **fields,
  }
  return study.Study(ROOT, 'title', 'small', stages, **fields)


@pytest.mark.parametrize(
  'plan, words',
  [
    (_study(_trained('a'), _trained('a')), "two stages have the name 'a'"),
    (_study(_trained('a'), _stage('b', 'tran')), "stage 'b': 'tran' is no com"),
    (_study(_stage('b', 'convert')), "'convert' is no command that a stage"),
    (_study(_trained('a', '--stepz=3')), "stage 'a': .*stepz"),
    (_study(_trained('a', '--config.sead=3')), "'a': .*no key 'sead'"),
    (_study(_trained('a', '--config.train.steps=0')), 'train.steps is 0'),
    (_study(_trained('a', '--config.init.mode=adapt')), 'init.encoder is emp'),
    (_study(_stage('a', 'train', BASE)), "stage 'a': --workdir is missing"),
    (_study(_stage('r', 'materialize', BASE, '--config.data.eval_rows=-1')),
     "stage 'r': config.data.eval_rows is -1"),
    (_study(_trained('a', '--config.data.passes=0')), "stage 'a': .*passes"),
    (_study(_trained('a', rate_of=('b',)), _trained('b')),
     "rate_of of 'a' names 'b', which no stage before it trains"),
    (_study(runs=('a', 'c')), "runs names 'c', .* are .*/x/a, .*/x/b"),
    (_study(_trained('a'), _trained('b'), _trained('c'), runs=('c',)),
     "runs names 'c', which no stage evaluates"),
    (_study(best_of={'best': ('d',)}), r"best_of\['best'\] names 'd'"),
    (_study(samples=f'{ROOT}/other.json'), 'samples is .*those are .*/x/out'),
  ],
)  # fmt: skip
def test_a_study_that_cannot_end_is_refused_before_any_stage(
  plan, words, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(errors.UserError, match=words):
    study.run(plan)
  assert not any(tmp_path.iterdir())


def test_a_study_that_can_end_is_not(monkeypatch):
  study.check(_study())
  monkeypatch.chdir(tiny.ROOT)
  for size in ('smoke', 'full'):
    study.check(study.load(f'configs/quickstart.py:size={size}'))


@pytest.fixture(scope='module')
def full():
  """The quickstart's study of size full, and the configs that it trains."""
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(tiny.ROOT)
    plan = study.load('configs/quickstart.py:size=full')
    configs = {}
    for stage in plan.stages:
      if stage.module == 'train':
        values = command.parse(train.define_flags, stage.flags)
        assert values.workdir == f'{plan.root}/{stage.name}'
        config_lib.load(values.config, values.workdir)
        configs[stage.name] = values.config
  return plan, configs


def _sweep(run):
  return tuple(f'{run}_lr_{rate}' for rate in RATES)


def _changed(configs, one, other):
  """Key to the values of two runs' configs, where they are not the same."""
  one, other = (
    traverse_util.flatten_dict(configs[name].to_dict(), sep='.')
    for name in (one, other)
  )
  assert one.keys() == other.keys()
  return {key: (one[key], other[key]) for key in one if one[key] != other[key]}


def test_full_quickstart_has_rates_seeds_and_controls(full):
  plan, configs = full
  runs = ['decoder_only', 'decoder_only_small']
  for run in ('adapted', 'scratch'):
    runs += [*_sweep(run), f'{run}_seed1', f'{run}_seed2']
    assert plan.best_of[run] == _sweep(run)
  runs += ['unbalanced', 'decoder_only_continued', 'adapted_embeddings']
  assert [stage.name for stage in plan.stages] == [
    'records_decoder_only',
    'records_adapted',
    *runs,
    'evaluate',
    'generate',
  ]
  assert list(plan.runs) == list(configs) == runs
  evaluated = [f'--checkpoint={plan.root}/{run}' for run in runs]
  assert list(plan.stages[-2].flags[1:]) == evaluated
  rate_of = {stage.name: stage.rate_of for stage in plan.stages}
  for run in ('adapted', 'scratch'):
    for rate in RATES:
      config = configs[f'{run}_lr_{rate}']
      assert config.optimizer.learning_rate == float(rate)
      assert config.seed == 0
    for seed in (1, 2):
      assert configs[f'{run}_seed{seed}'].seed == seed
      assert rate_of.pop(f'{run}_seed{seed}') == _sweep(run)
  assert not any(rate_of.values())  # Every other rate is its config's.


def test_scratch_differs_from_adapted_in_where_it_starts_alone(full):
  plan, configs = full
  source = f'{plan.root}/decoder_only'
  for name in (*(f'lr_{rate}' for rate in RATES), 'seed1', 'seed2'):
    assert _changed(configs, f'adapted_{name}', f'scratch_{name}') == {
      'init.mode': ('adapt', 'random'),
      'init.encoder': (source, ''),
    }
  one = configs['scratch_seed1']
  assert one.teacher.checkpoint == source and one.loss.distillation > 0
  seeds = _changed(configs, 'adapted_seed1', 'adapted_seed2')
  assert seeds == {'seed': (1, 2)}


def test_controls_of_the_full_quickstart(full):
  plan, configs = full
  fresh = _changed(configs, 'adapted_lr_0.0015', 'adapted_embeddings')
  fresh.pop('optimizer.learning_rate')
  assert fresh == {'init.mode': ('adapt', 'embeddings')}
  more, pair = configs['decoder_only_continued'], configs['adapted_seed1']
  assert more.model.kind == 'decoder_only' and more.init.mode == 'checkpoint'
  assert more.init.encoder == pair.init.encoder == f'{plan.root}/decoder_only'
  # As many tokens, in another order than those that it was trained on.
  assert more.train == pair.train
  lengths = pair.data.encoder_length + pair.data.decoder_length
  assert more.data.encoder_length + more.data.decoder_length == lengths
  assert more.seed != configs['decoder_only'].seed


def test_cross_attention_of_the_unbalanced_pair_alone_is_warmed_up(full):
  _, configs = full
  train_ = configs['unbalanced'].train
  share = train_.cross_attention_warmup / train_.steps
  assert share == pytest.approx(0.05, abs=0.005)
  others = (c.train for name, c in configs.items() if name != 'unbalanced')
  assert not any(train_.cross_attention_warmup for train_ in others)
