"""The page of post-training, its recipes, and its study."""

import dataclasses
import json
import shlex
import shutil

import pytest

from encdec_adapt import config as config_lib
from encdec_adapt import convert, evaluate, generate, study, train
from encdec_adapt.base import errors
from encdec_adapt.cli import command
from encdec_adapt.configs import functions, post_training
from encdec_adapt.configs.studies import post_training as post_training_page
from encdec_adapt.data.sources import text_sources
from encdec_adapt.lab import pages, stages
from tests import tiny

pytestmark = pytest.mark.e2e
PAGE = (tiny.ROOT / 'configs' / 'post_training.md').read_text()
DECODER = tiny.ROOT / 'configs' / 'decoders' / 'small'
BLOCKS = PAGE.split('```')[1::2]
MAINS = {'evaluate': evaluate, 'generate': generate}


def _commands():
  """The commands of the page, as modules and arguments."""
  for block in BLOCKS:
    if block.startswith('\npython'):
      for line in block.strip().replace('\\\n', ' ').splitlines():
        python, flag, module, *arguments = shlex.split(line)
        assert (python, flag) == ('python', '-m')
        yield module.removeprefix('encdec_adapt.'), arguments


@pytest.fixture(scope='module')
def models(tmp_path_factory):
  """A folder with the runs that the commands start from."""
  root = tmp_path_factory.mktemp('post_training')
  runs = root / 'runs'
  imported = runs / 'quickstart' / 'decoder_only'
  flags = [f'--source={DECODER}', f'--output={imported}']
  assert tiny.convert('import', *flags) == 0
  flags = [f'--encoder={imported}', f'--output={runs / "tuned"}']
  assert tiny.convert('adapt', *flags) == 0
  shutil.copytree(runs / 'tuned', runs / 'quickstart' / 'adapted')
  return root


def test_the_commands_of_the_page_are_understood(models, monkeypatch):
  monkeypatch.chdir(models)
  assert PAGE.count('\n') <= 200
  (models / 'rewards.py').write_text(
    next(x for x in BLOCKS if '# rewards.py' in x).removeprefix('python')
  )
  recipes = set()
  for module, arguments in _commands():
    if module == 'train':
      values = command.parse(train.define_flags, arguments)
      recipes.add(
        config_lib.load(values.config, sources=False).recipe.loss.name
      )
    elif module == 'convert':
      verb, *flags = arguments
      flags = [x for x in flags if x.startswith('--')]
      command.parse(convert.COMMANDS[verb].define, flags)
    else:
      command.parse(MAINS[module].define_flags, arguments)
  kinds = {keys['kind'] for keys, *_ in post_training.RECIPES.values()}
  assert recipes == kinds | {'cross_entropy'}


@pytest.mark.parametrize(
  'arg', ['recipe=ppo', 'recipe=distill', 'recipe=dpo,teacher=x']
)
def test_bad_recipes_are_refused(arg):
  with pytest.raises(errors.UserError, match=arg.split(',')[0]):
    post_training.get_config(f'{arg},source={DECODER}')


def test_rewards_of_functions():
  prompt = 'def total(self, rows):\n    count = 0'
  good = '\n    for row in rows:\n        count += len(row)\n    return count'
  bad = [
    '\n    return count',  # One line.
    good + '\n    # That is all.',
    good.replace('rows:', 'lines:'),  # An undefined name.
    good.replace('(row)', '(row'),
    good + '\n    return count',
    good + '\nrows = 3',  # Outside of the function.
    good[1:],
    '\n    pass\n    return',  # Reads no name.
  ]
  texts = [good, *bad]
  args = [prompt] * len(texts), texts, [{}] * len(texts)
  assert functions.valid(*args) == [1.0] + [0.0] * len(bad)
  assert functions.one_line(*args)[:2] == [0.0, 1.0]


@pytest.mark.long
def test_functions_of_held_out_modules_are_held_out(monkeypatch):
  monkeypatch.chdir(tiny.ROOT)
  name = 'functions:configs/decoders/held_out.txt'
  module = 'encdec_adapt.configs.functions'
  source = text_sources.open_source(name, 0, (module,))
  splits = [
    [json.loads(x.text) for x in source.documents(keep)]
    for keep in (
      lambda x: source.in_split(x, 'train', 0, 0),
      lambda x: source.in_split(x, 'eval', 0, 0),
    )
  ]
  train_pairs, held_out = ({tuple(x) for x in pairs} for pairs in splits)
  assert len(train_pairs) > 3000 and len(held_out) > 200
  assert not train_pairs & held_out


def test_every_stage_of_the_study_is_understood(models, monkeypatch):
  monkeypatch.chdir(models)
  page = post_training_page.get_study('size=cpu')
  resolved = stages.resolve(page)
  trained = {n: x for n, x in resolved.items() if x.module == 'train'}
  rates = {x.name: x for x in page.rates}
  runs = 8 * len(post_training_page.RUNS)
  # And the models that all start from, as `adaptation` makes them.
  started = stages.resolve(study.load('adaptation:size=cpu'))
  for name in 'adapted', 'wide', 'rate_adapted', 'rate_wide':
    assert trained[name].identity == started[name].identity
  assert len(trained) - len(rates) == runs + 2
  assert len(rates) == len(post_training_page.RUNS)
  for name, rate in rates.items():
    assert len(rate.values) == 3
    is_policy = 'rloo' in name or 'grpo' in name
    assert rate.metric == ('reward' if is_policy else 'loss')
  for claim in page.claims:
    assert claim.metric in page.evaluation_for(claim).floors
  assert set(trained['pair_rloo_model_seed1'].reads) == {
    *('pair_tuned_seed1', 'pair_reward_seed1', 'records_pair_rloo'),
    'rate_pair_rloo',
  }
  # Samples of a seed, and the records that are made of them.
  (records,) = (
    x for x in resolved['pair_dpo_seed1'].reads if x.startswith('records_')
  )
  assert resolved[records].reads == ('samples_seed1',)
  measured = [x for x in resolved if x.startswith('measured_')]
  assert len(measured) == runs
  for stage in resolved.values():
    if stage.module == 'convert':
      continue  # Its subcommands parse flags.
    values = dict.fromkeys((stage.name, *stage.reads), '1')
    study._parse(stage.module, [pages.fill(x, values) for x in stage.arguments])


@pytest.mark.slow
def test_the_study(models, monkeypatch):
  monkeypatch.chdir(models)
  # The models are not trained: nothing that they sample would end or pass.
  monkeypatch.setattr(functions, 'is_valid', lambda _, text: len(text) % 2)
  sample = post_training_page._sample

  def sample_ended(*args):
    ids, groups = sample(*args)
    return ids, [
      [dataclasses.replace(x, ended='eos') for x in group] for group in groups
    ]

  monkeypatch.setattr(post_training_page, '_sample', sample_ended)
  assert tiny.call(study, '--study=post_training:size=smoke') == 0
  root = models / 'runs' / 'studies' / 'post_training_smoke'
  page = (root / 'report.html').read_text()
  assert 'functions/greedy_of_others' in page and 'pair_reward' in page
  assert '<h2>Rollouts</h2>' in page and 'alt="held-out margin"' in page
  assert 'alt="held-out kl"' in page
