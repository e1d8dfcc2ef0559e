"""Every recipe of two real processes: equal to one, and no hang at a start."""

import contextlib

import pytest

from encdec_adapt import materialize, train
from encdec_adapt.base import errors
from encdec_adapt.cli import command
from encdec_adapt.telemetry import metrics
from tests import tiny
from tests.e2e import folders
from tests.golden import jobs

pytestmark = [pytest.mark.multiproc, pytest.mark.long]

STORED = 'records/stored_teacher/teacher-counts-'
# Of each process: a folder or a run, folders of other weights, and a teacher
# stored with other numbers.
LINKS = {
  'model': (jobs.SMALL, 'pair'),
  'copy': (jobs.SMALL, 'other'),
  'teacher': (f'{STORED}7', f'{STORED}3'),
}
# Jobs of `golden.jobs`: changed keys; the last is of what processes may find
# different, and left out otherwise. The first jobs train models for others.
JOBS = {
  'lora_over_int8': (
    "train.lora.full=('cross_attention','norms')",
    'train.microbatches=2',
    'init.encoder=model',
  ),
  'labels': ('init.encoder=copy',),
  'reward': ('init.encoder=model',),
  'dpo_and_cross_entropy': ('teacher.checkpoint=model',),
  'distillation_by_share': ('teacher.checkpoint=model',),
  'distillation_on_policy': (
    # Not the student itself: its gradient would be nothing but rounding.
    'teacher.checkpoint=dpo_and_cross_entropy',
    'teacher.checkpoint=model',
  ),
  'stored_teacher': (
    f'teacher.checkpoint=stored:{STORED}7',
    'teacher.checkpoint=stored:teacher',
  ),
  'rloo_with_a_judge': ('train.rewards.models=model',),
  'infonce_with_a_learnt_temperature': ('mesh.replica=2', 'init.encoder=model'),
}
SHORT = ('data.passes=3', 'train.batch_size=16', 'train.steps=3')
SHORT += ('evaluation.loss=3', 'checkpoint.every=3')

# Each process works in a folder of its own.
_MEMBER = """
import os, sys
from encdec_adapt.cluster import distributed
from tests.multiproc import test_recipes

folder, me = sys.argv[4], int(sys.argv[3])
with distributed.fail_together():
  distributed.initialize(sys.argv[1], 2, me)
  os.chdir(f'{folder}/{me}')
  for name in test_recipes.JOBS:
    test_recipes.refuse(name)
    test_recipes.run(name, f'{folder}/{name}')
"""


def run(name: str, workdir: str, changes: tuple[str, ...] = ()) -> None:
  """Trains to the end; an error ends this process alone."""
  changes = changes or JOBS[name][:-1]
  values = command.parse(train.define_flags, jobs.flags(name, *SHORT, *changes))
  assert train.run(values.config, workdir) == 0


def refuse(name: str) -> None:
  """Starts a job that finds something else on each process."""
  try:
    run(name, f'../refused/{name}', JOBS[name])
  except errors.UserError as error:
    print(f'{name} is refused: {error}', flush=True)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A folder with the runs and the output of two processes."""
  folder = tmp_path_factory.mktemp('recipes')
  shape = tiny.STACK | {'layers': 1, 'vocab_size': 2048}
  vocabulary = tiny.ROOT / jobs.SMALL / 'tokenizer.model'
  folders.make_folder(folder / jobs.SMALL, shape, vocabulary)
  folders.make_folder(folder / 'other', shape, vocabulary, seed=1)
  with contextlib.chdir(folder):
    jobs.write_files(folder)
    for name in JOBS:
      flags = jobs.flags(name, *SHORT)
      assert tiny.call(materialize, *flags) == 0
      for tokens in (7, 3) if name == 'stored_teacher' else ():
        store = f'--teacher={jobs.SMALL}', f'--teacher_tokens={tokens}'
        assert tiny.call(materialize, *flags, *store) == 0
  shared = [*JOBS, *(path.name for path in folder.iterdir())]
  for i in range(2):
    (folder / f'{i}').mkdir()
    links = {name: name for name in shared}
    links |= {link: paths[i] for link, paths in LINKS.items()}
    for link, path in links.items():
      (folder / f'{i}' / link).symlink_to(folder / path)
  codes = tiny.wait_all(tiny.start_programs(_MEMBER, folder, 2, folder))
  assert codes == [0, 0], tiny.read_logs(folder)
  return folder


@pytest.mark.parametrize('name', JOBS)
def test_both_refuse_what_differs_between_them(folder, name):
  text = f'{name} is refused: the processes of this job differ: '
  assert all(text in log.read_text() for log in folder.glob('*.log'))


@pytest.mark.parametrize('name', JOBS)
def test_two_processes_equal_one(folder, name, monkeypatch):
  monkeypatch.chdir(folder)
  run(name, f'one/{name}')
  records, expected = (
    [x for x in metrics.read_metrics(w) if x.pop('kind') in ('train', 'eval')]
    for w in (name, f'one/{name}')
  )
  # Before the first step and after the last, and of each.
  assert len(records) == len(expected) == 5
  for record, wanted in zip(records, expected, strict=True):
    assert record == pytest.approx(wanted, rel=1e-5, abs=1e-6)
