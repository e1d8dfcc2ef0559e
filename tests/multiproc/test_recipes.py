"""Every recipe trains in two real processes as it does in one."""

import os
import pathlib

import pytest

from encdec_adapt import config as config_lib
from encdec_adapt import materialize, train
from encdec_adapt.cli import command
from encdec_adapt.telemetry import metrics
from encdec_adapt.training import recipes
from tests import tiny
from tests.golden import jobs

pytestmark = [pytest.mark.multiproc, pytest.mark.long]

STEPS = 3
# Jobs of `tests.golden`; a policy reads the reward model of an earlier job.
JOBS = (
  'mixture_with_rates',
  'labels',
  'distillation_by_share',
  'stored_teacher',
  'distillation_on_policy',
  'dpo_and_cross_entropy',
  'reward',
  'rloo_with_a_judge',
  'infonce_with_a_learnt_temperature',
)
_MEMBER = """
import sys
from encdec_adapt.cluster import distributed
from tests.multiproc import test_recipes

coordinator, count, index, folder, workdirs = sys.argv[1:]
with distributed.fail_together():
  if int(count) > 1:
    distributed.initialize(coordinator, int(count), int(index))
  test_recipes.train_all(folder, workdirs)
"""


def train_all(folder: str, workdirs: str) -> None:
  """Trains the jobs one after the other, in this process of a job."""
  os.chdir(folder)
  for name in JOBS:
    workdir = f'--workdir={workdirs}/{name}'
    teacher = f'teacher.checkpoint=stored:records/{name}/teacher-counts-7'
    more = [teacher] if name.startswith('stored') else []
    assert tiny.call(train, *_flags(name, *more), workdir) == 0


def _flags(name: str, *more: str) -> list[str]:
  changes = [
    f'train.steps={STEPS}',
    f'evaluation.loss={STEPS}',
    f'checkpoint.every={STEPS}',
    'compute.compile_cache=compiled',
    'data.passes=1',
  ]
  if 'judge' in name:
    changes.append('train.rewards.models=one/reward')
  return jobs.flags(name, *changes, *more)


def _losses(workdir: pathlib.Path) -> list[tuple[str, int, float]]:
  return [
    (x['kind'], x['step'], x['loss'])
    for x in metrics.read_metrics(workdir)
    if x['kind'] in ('train', 'eval')
  ]


def test_two_processes_equal_one(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  pathlib.Path('configs').symlink_to(tiny.ROOT / 'configs')
  jobs.write_files(tmp_path)
  values = [command.parse(train.define_flags, _flags(x)) for x in JOBS]
  loaded = [config_lib.load(x.config, sources=False) for x in values]
  assert {type(x.recipe) for x in loaded} >= {*recipes.BY_LOSS.values()}
  store = f'--teacher={jobs.SMALL}', '--teacher_tokens=7'
  assert tiny.call(materialize, *_flags('stored_teacher'), *store) == 0
  for workdirs, count in (('one', 1), ('two', 2)):
    logs = tmp_path / f'{workdirs}_logs'
    logs.mkdir()
    codes = tiny.wait_all(
      tiny.start_programs(
        _MEMBER, logs, count, tmp_path, workdirs, devices=3 - count
      )
    )
    texts = [path.read_text() for path in sorted(logs.iterdir())]
    assert codes == [0] * count, '\n'.join(texts)
  for name in JOBS:
    one, two = (_losses(tmp_path / x / name) for x in ('one', 'two'))
    assert [x[:2] for x in one] == [x[:2] for x in two], name
    assert [x[2] for x in one] == pytest.approx([x[2] for x in two], abs=2e-5)
