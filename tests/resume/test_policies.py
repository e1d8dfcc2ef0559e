"""A policy's job that is killed in any phase resumes bit for bit."""

import signal

import pytest

from encdec_adapt.telemetry import metrics
from encdec_adapt.training.jobs import policy_batches
from tests import tiny

pytestmark = [pytest.mark.resume, pytest.mark.multiproc, pytest.mark.long]

STEPS = 8
REWARD = """
def share(prompts, completions, fields):
  assert all(prompts) and all(x['target'] for x in fields)
  return [x.count('o') / (1 + len(x)) for x in completions]
"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('policies')


@pytest.fixture(scope='module')
def flags(folder):
  (folder / 'reward.py').write_text(REWARD)
  return tiny.make_records(folder, 8 * STEPS, pack=False) + [
    f'--config.train.steps={STEPS}',
    '--config.train.microbatches=2',
    '--config.loss.kind=grpo',
    '--config.loss.grpo.truncate=2',
    '--config.train.rollouts.samples=4',
    '--config.train.rollouts.tokens=8',
    '--config.train.rollouts.cut=mask',
    '--config.train.rewards.answers=1',
    f'--config.train.rewards.functions={folder}/reward.py#share',
    '--config.train.rewards.function_weights=2',
    '--config.checkpoint.every=2',
    '--config.checkpoint.keep_best=True',
    f'--config.compute.compile_cache={folder}/compiled',
  ]


@pytest.mark.slow
def test_killed_while_sampling_rewarding_and_updating(
  folder, flags, monkeypatch
):
  codes, text = tiny.run_two(flags, folder / 'whole')
  assert codes == [0, 0], text
  workdir = folder / 'killed'
  for kill in ('sample:3', 'reward:5', 'step:7'):
    monkeypatch.setenv('KILL', kill)
    codes, text = tiny.run_two(flags, workdir, 'tests.resume.killed_train')
    assert codes == [-signal.SIGKILL] * 2, text
  codes, text = tiny.run_two(flags, workdir)
  assert codes == [0, 0], text
  assert 'resuming at step 6' in text and 'not bit for bit' not in text
  records = [
    [x for x in metrics.read_metrics(w) if x['kind'] in ('train', 'eval')]
    for w in (workdir, folder / 'whole')
  ]
  assert records[0] == records[1]
  assert [x['step'] for x in records[0] if x['kind'] == 'train'] == list(
    range(1, STEPS + 1)
  )
  texts = [
    (w / policy_batches.FILE).read_text() for w in (workdir, folder / 'whole')
  ]
  assert texts[0] == texts[1]
  tiny.assert_same_params(workdir, folder / 'whole')


def test_a_reward_that_fails_saves_the_step_before(folder, flags):
  """On one of two processes: both name the example, and save together."""
  calls = folder / 'calls'
  (folder / 'failing.py').write_text(
    'import os, pathlib\n'
    f'calls = pathlib.Path({str(calls)!r})\n'
    'def fail(prompts, completions, fields):\n'
    '  path = calls / str(os.getpid())\n'
    '  calls.mkdir(exist_ok=True)\n'
    '  count = len(path.read_text()) if path.exists() else 0\n'
    "  path.write_text('x' * (count + 1))\n"
    # The evaluation, and three steps.
    '  if count < 4 or not completions[0].strip():\n'
    '    return [float(len(x)) for x in completions]\n'
    "  raise ValueError('a test')\n"
  )
  workdir = folder / 'failed'
  own = [x for x in flags if 'rewards' not in x and 'every' not in x]
  codes, text = tiny.run_two(
    [
      *own,
      '--config.checkpoint.every=100',
      f'--config.train.rewards.functions={folder}/failing.py#fail',
    ],
    workdir,
  )
  assert codes == [2, 2], text
  assert 'raises ValueError: a test, for the prompt' in text
  assert (workdir / 'checkpoints' / '3').exists(), text
