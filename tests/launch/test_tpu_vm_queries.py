"""Cloud TPU VMs: status queries and requests that fail."""

import pytest

from launch import commands
from launch.tpu_vm import job, resource
from tests.launch import cloud as clouds


def test_queries_that_fail_do_not_end_the_launcher(cloud):
  blips = {'queued-resources describe': 3, 'tpu-vm describe': 2}
  done = cloud.train(['slow'], '--delete_when_done', blips=blips)
  clouds.assert_ended(done, 0)
  assert done.stdout.count('# status query failed (') == 5
  assert 'Unable to find the server' in done.stdout
  assert 'machines are being preempted' not in done.stdout
  assert [call[3] for call in cloud.calls('create', 'delete')] == [
    'create',
    'delete',
  ]


def test_a_query_that_fails_after_the_connection_did_deletes_nothing(cloud):
  done = cloud.train(['drop', 'finish'], blips={'tpu-vm describe': 4})
  clouds.assert_ended(done, 0)
  assert done.stdout.count('# status query failed (') == 4
  assert 'preempted' not in done.stdout
  assert not cloud.calls('delete')
  assert clouds.starts(cloud) == 1


def test_requests_that_fail_after_a_preemption_are_made_again(cloud):
  blips = {'queued-resources delete': 2, 'queued-resources create': 2}
  done = cloud.train(['preempt', 'finish'], blips=blips)
  clouds.assert_ended(done, 0)
  assert '# request failed with status 2 (2 of 30 tolerated)' in done.stdout
  assert '[0.0] resuming at step 2' in done.stdout
  assert [call[3] for call in cloud.calls('create', 'delete')] == (
    ['create'] + ['delete'] * 3 + ['create'] * 3
  )


class Queries(commands.Shell):
  """A shell whose queries end with the given answers, one after another."""

  def __init__(self, *answers):
    """Answers are status, output and complaint; the last one stays."""
    super().__init__(dry_run=False)
    self.answers = list(answers)
    self.requests = 0

  def run(self, command):
    """Counts a command, which fails."""
    self.requests += 1
    return 1

  def ask(self, command):
    """The next answer."""
    return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


ACTIVE, READY = (0, 'ACTIVE', ''), (0, 'READY', '')
BLIP = (1, '', 'Unable to find the server')
MISSING = (1, '', 'ERROR: (gcloud...) NOT_FOUND: Resource was not found.')


def _job(*answers):
  one = resource.Resource('pair', 'us-west4-a', 'v5litepod-16')
  return job.Job(one, Queries(*answers), poll_seconds=0, grace_seconds=0)


@pytest.mark.parametrize(
  'answers, gone',
  [
    ([ACTIVE, READY], False),
    ([ACTIVE, MISSING], True),
    ([ACTIVE, (0, 'PREEMPTED', '')], True),
    ([MISSING], True),
    ([(0, 'SUSPENDING', '')], True),
    ([ACTIVE, BLIP], None),
    ([ACTIVE, (127, '', 'gcloud: command not found')], None),
  ],
)
def test_machines_are_gone_where_the_cloud_says_so(answers, gone):
  assert _job(*answers).gone() is gone


def test_half_an_hour_of_failed_queries_ends_it(capsys):
  watching = _job(ACTIVE, READY, BLIP)
  assert watching.gone() is False
  for _ in range(30):
    assert watching.gone() is None
  with pytest.raises(commands.LaunchError, match='Unable to find the server'):
    watching.gone()
  assert capsys.readouterr().out.count('# status query failed (') == 30


@pytest.mark.parametrize(
  'verb, state', [('create', MISSING), ('delete', READY)]
)
def test_half_an_hour_of_requests_that_fail_ends_it(verb, state, capsys):
  been = _job(ACTIVE, state)
  been.bring_up()
  with pytest.raises(commands.LaunchError, match=f'{verb} pair.* status 1'):
    been.take_down() if verb == 'delete' else been.bring_up(again=True)
  assert been.shell.requests == 31
  assert capsys.readouterr().out.count('# request failed') == 30


@pytest.mark.parametrize(
  'statuses, gcloud, end',
  [
    ({'0.0': 0, '0.1': 0}, 0, job.End.DONE),
    ({'0.0': 0}, 255, job.End.LOST),  # Of a worker nothing is known.
    ({}, 1, job.End.LOST),
    ({'0.0': 75, '0.1': 75}, 75, job.End.RESTART),
    ({'0.0': 75, '0.1': 0}, 75, job.End.RESTART),
    ({'0.0': 2, '0.1': 2}, 2, job.End.REFUSED),
    ({'0.0': 1, '0.1': 2}, 1, job.End.FAILED),  # It tells the others.
    ({'0.0': 75, '0.1': 137}, 75, job.End.FAILED),
    ({'0.0': 76, '0.1': 76}, 76, job.End.FAILED),
  ],
)
def test_how_an_attempt_ended(statuses, gcloud, end):
  assert job.judge(statuses, gcloud) is end
