"""The command for GPUs where their compiler is missing."""

import json

import jax
import pytest

from encdec_adapt import plan
from encdec_adapt.base import errors
from encdec_adapt.planner import calibration, chips, plan_report
from tests import tiny
from tests.planner import toy

FLAGS = [
  f'--config={tiny.ROOT}/configs/presets.py:encoder=toy',
  '--config.data.encoder_length=64',
  '--config.data.decoder_length=64',
  '--config.train.batch_size=64',
  '--topology=h100:8',
]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
  monkeypatch.chdir(tiny.ROOT)
  monkeypatch.setattr(chips, 'compiler', lambda kind: None)


def test_a_plan_of_gpus_is_written_and_tabulated(tmp_path, capsys):
  output = tmp_path / 'plan.json'
  flags = ['--config.mesh.replica=2', '--programs=train,eval,decode']
  assert tiny.call(plan, *FLAGS, *flags, f'--output={output}') == 0
  printed = capsys.readouterr().out
  assert 'h100:8 x 1: 8 devices' in printed and '[cuda13,gpu]' in printed
  assert calibration.text(calibration.table()) in printed
  written = json.loads(output.read_text())
  assert written['overrides']['mesh.replica'] == 2
  assert list(written['programs']) == ['train', 'eval', 'decode']
  for program in written['programs'].values():
    assert program['source'] == 'shapes' and 0 < program['mfu'] < 1
    assert toy.KEYS < set(program)
    assert program['kernels'] == [] and 'replicated' in program
  assert written['calibration'] == calibration.table()
  assert tiny.call(plan, f'--table={tmp_path}') == 0
  rows = [r for r in capsys.readouterr().out.splitlines() if 'h100:8' in r]
  assert len([row for row in rows if row.startswith('| `encoder=toy`')]) == 3


def test_the_shipped_plan_comes_first_then_what_is_compiled(
  monkeypatch, capsys
):
  def describe(*_):
    printed.append(capsys.readouterr().out)
    raise jax.errors.JaxRuntimeError('ends here')

  printed = []
  monkeypatch.setattr(chips, 'compiler', lambda kind: 'cudac 1')
  monkeypatch.setattr(chips, 'devices_of', lambda where: jax.devices()[:1])
  monkeypatch.setattr(plan_report, 'describe', describe)
  row = 'configs/gemma2.py:size=2b_2b,objective=pairs,topology=h100:1'
  for flags in ([f'--config={row}'], [*FLAGS[:-1], '--config.mesh.fsdp=1']):
    with pytest.raises(errors.UserError, match='cudac 1 fails on program'):
      tiny.call(plan, *flags, '--topology=h100:1')
  subject = "compiling program 'train' for h100:1 x 1 by cudac 1 ..\n"
  assert printed[0].endswith(subject)
  assert printed[1] == f'planning 1/1\n{subject}'
  begin, train, *_ = printed[0].splitlines()
  assert begin.startswith('Shipped plan of this configuration')
  assert train == '[train] h100:1 x 1: 1 devices' and '[decode]' in printed[0]


def test_a_reward_model_that_is_not_here_is_assumed(capsys):
  policy = {x.replace('__', '.'): value for x, value in toy.POLICY.items()}
  flags = [f'--config.{key}={value}' for key, value in policy.items()]
  flags += ['--config.data.objective=pairs', '--programs=train,reward']
  flags += ['--config.loss.kind=rloo']
  assert tiny.call(plan, *FLAGS, *flags) == 0
  printed = capsys.readouterr().out
  text = "nowhere/judge does not exist: a reward model of the policy's shape"
  assert printed.count(text) == 2
  assert 'reward model 1 (beside)' in printed and '[reward]' in printed


def test_over_the_budget_it_names_what_fits(capsys):
  flags = ['--hbm_gib=0.02', '--config.compute.remat=none']
  assert tiny.call(plan, *FLAGS, *flags) == plan.DOES_NOT_FIT
  printed = capsys.readouterr().out
  assert 'DOES NOT FIT' in printed and '--config.mesh.replica=' in printed


def test_the_policy_of_a_step_follows_from_the_budget(capsys):
  # The toy configuration states no policy.
  assert tiny.call(plan, *FLAGS) == 0
  roomy = capsys.readouterr().out
  assert 'compute.remat=dots: ' in roomy and 'compute.remat=full' not in roomy
  assert tiny.call(plan, *FLAGS, '--hbm_gib=0.02') == plan.DOES_NOT_FIT
  assert 'compute.remat=full: ' in capsys.readouterr().out


@pytest.mark.long
def test_a_search_ranks_what_fits(tmp_path, capsys):
  output = tmp_path / 'search.json'
  flags = ['--search=2', '--hbm_gib=0.022', f'--output={output}']
  flags += ['--config.train.steps=3600', '--price_per_hour=1000000']
  assert tiny.call(plan, *FLAGS, *flags) == 0
  rows = json.loads(output.read_text())['candidates']
  assert len(rows) == 2
  assert all(row['plan']['fits'] and row['flags'] for row in rows)
  assert all(toy.KEYS < set(row['plan']) for row in rows)
  # Once each, with hours and the cost of eight GPUs.
  lines = capsys.readouterr().out.splitlines()
  lines = [line.split() for line in lines if '--config.mesh' in line]
  for row, line in zip(rows, lines, strict=True):
    assert row['hours'] == pytest.approx(row['plan']['roofline']['step_s'])
    cost = float(line[4].replace(',', ''))
    assert cost == pytest.approx(8e6 * row['hours'], rel=1e-3)
    assert '--config.train.batch_size=64' in line


@pytest.mark.parametrize(
  'flags, words',
  [
    (['--config.compute.attention=splash'], 'can run chunked, reference, tok'),
    (['--search=2', '--programs=eval'], '--programs is eval; leave out one'),
    (['--sharding', '--output=plan.json'], 'writes no --output=plan.json'),
    (['--programs=serve'], 'serve is not known; choose of train, eval, dec'),
    (['--search=2', '--hbm_gib=0.0001'], 'nothing fits into h100:8'),
    (['--search=2', '--config.train.batch_size=63'], 'is 63, which divides'),
    (['--table=nowhere'], '--table=nowhere has no plans'),
    (['--output=README.md/plan.json'], 'cannot be written'),
    (['--config.mesh.tensor=3'], 'does not multiply'),
    (['--config.train.batch_size=6'], 'batch_size is 6'),
    (['--topology=h100'], 'column 5 must have 1 dimension'),
    (['--topology=h100:12'], 'must be at most 8, a host, or whole hosts'),
    (['--topology=h20:8'], 'another one in planner/chips.py'),
    (['--num_slices=0'], 'num_slices=0'),
  ],
)
def test_refusals(flags, words):
  with pytest.raises(errors.UserError, match=words):
    tiny.call(plan, *FLAGS, *flags)
