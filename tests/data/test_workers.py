"""Jobs in worker processes: every job once, and failures that name theirs."""

import os
import signal

import pytest

from encdec_adapt.cli import errors
from encdec_adapt.data import workers


def square(job, report):
  """Fails as the job says, if it is a string."""
  if job == 'bug':
    raise ZeroDivisionError('no reason')
  if job == 'bad input':
    raise errors.UserError('mend this')
  if job == 'killed':
    os.kill(os.getpid(), signal.SIGKILL)
  report({'done': 1})
  return job * job, os.getpid()


def run(jobs, count):
  """Results and processes by job, and how many were reported."""
  results, reported = {}, []
  workers.run_jobs(
    square,
    jobs,
    count,
    on_report=lambda counts: reported.append(counts.get('done', 0)),
    on_result=results.__setitem__,
  )
  return results, sum(reported)


@pytest.mark.multiproc
@pytest.mark.parametrize('count', [1, 2])
def test_every_job_has_its_result(count):
  results, reported = run(list(range(5)), count)
  assert {job: value for job, (value, _) in results.items()} == {
    0: 0,
    1: 1,
    2: 4,
    3: 9,
    4: 16,
  }
  assert reported == 5
  here = {process == os.getpid() for _, process in results.values()}
  assert here == {count == 1}


@pytest.mark.multiproc
@pytest.mark.parametrize(
  'job, error, message',
  [
    ('bug', RuntimeError, 'bug failed in a worker:(.|\n)*no reason'),
    ('bad input', errors.UserError, '^mend this$'),
    ('killed', errors.UserError, 'the worker that made killed died .signal 9'),
  ],
)
def test_failures_name_the_job(job, error, message):
  with pytest.raises(error, match=message):
    run([1, job], 2)
