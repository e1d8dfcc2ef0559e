"""Decisions of launch.tpu_vm, on answers of gcloud."""

import pytest

from launch import commands
from launch.tpu_vm import job, resource


class Queries(commands.Shell):
  """A shell whose queries return answers in turn, and whose commands fail."""

  def __init__(self, *answers):
    """Takes (status, output, error); the last answer is repeated."""
    super().__init__(dry_run=False)
    self.answers = list(answers)
    self.requests = 0

  def run(self, command):
    self.requests += 1
    return 1

  def ask(self, command):
    return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


ACTIVE, READY = (0, 'ACTIVE', ''), (0, 'READY', '')
FAILED = (1, '', 'Unable to find the server')
MISSING = (1, '', 'ERROR: (gcloud...) NOT_FOUND: Resource was not found.')


def _job(*answers):
  pair = resource.Resource('pair', 'us-west4-a', 'v5litepod-16')
  return job.Job(pair, Queries(*answers), poll_seconds=0, grace_seconds=0)


@pytest.mark.parametrize(
  'answers, gone',
  [
    ([ACTIVE, READY], False),
    ([ACTIVE, MISSING], True),
    ([ACTIVE, (0, 'PREEMPTED', '')], True),
    ([MISSING], True),
    ([(0, 'SUSPENDING', '')], True),
    ([ACTIVE, FAILED], None),
  ],
)
def test_machines_are_gone_only_if_the_cloud_answers_so(answers, gone):
  assert _job(*answers).gone() is gone


def test_thirty_failed_queries_are_tolerated(capsys):
  watching = _job(ACTIVE, READY, FAILED)
  assert watching.gone() is False
  for _ in range(30):
    assert watching.gone() is None
  with pytest.raises(commands.LaunchError, match='Unable to find the server'):
    watching.gone()
  assert capsys.readouterr().out.count('# status query failed (') == 30


@pytest.mark.parametrize(
  'verb, state', [('create', MISSING), ('delete', READY)]
)
def test_thirty_failed_requests_are_tolerated(verb, state):
  created = _job(ACTIVE, state)
  created.bring_up()
  with pytest.raises(commands.LaunchError, match=f'{verb} pair.* status 1'):
    created.take_down() if verb == 'delete' else created.bring_up(again=True)
  assert created.shell.requests == 31


@pytest.mark.parametrize(
  'statuses, gcloud, end',
  [
    ([0, 0], 0, job.End.DONE),
    ([0], 255, job.End.LOST),  # One worker reported nothing.
    ([], 1, job.End.LOST),
    ([75, 0], 75, job.End.RESTART),
    ([2, 2], 2, job.End.REFUSED),
    ([3, 0], 3, job.End.DIVERGED),
    ([1, 2], 1, job.End.FAILED),  # Its peers end with it.
    ([75, 137], 75, job.End.FAILED),
    ([76, 76], 76, job.End.FAILED),
  ],
)
def test_end_of_an_attempt(statuses, gcloud, end):
  found = {f'0.{worker}': status for worker, status in enumerate(statuses)}
  assert job.judge(found, gcloud) is end
