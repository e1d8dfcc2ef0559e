"""Jobs in worker processes: every job once, and their failures."""

import os
import signal

import pytest

from encdec_adapt.base import errors
from encdec_adapt.data.making import process_pool
from tests import tiny


def square(job):
  """Fails as the job says, if it is a string."""
  if job == 'bug':
    raise ZeroDivisionError('no reason')
  if job == 'bad input':
    raise errors.UserError('mend this')
  if job == 'killed':
    os.kill(os.getpid(), signal.SIGKILL)
  return job * job, os.getpid()


@pytest.mark.long
@pytest.mark.multiproc
@pytest.mark.parametrize('count', [1, 2])
def test_every_job_has_its_result(count):
  results = dict(process_pool.run_jobs(square, range(5), count))
  assert {job: value for job, (value, _) in results.items()} == {
    job: job * job for job in range(5)
  }
  here = {process == os.getpid() for _, process in results.values()}
  assert here == {count == 1}


@pytest.mark.long
@pytest.mark.multiproc
@pytest.mark.parametrize(
  'job, error, message',
  [
    ('bug', ZeroDivisionError, 'no reason'),
    ('bad input', errors.UserError, '^mend this$'),
    ('killed', errors.UserError, 'died; .* use fewer workers'),
  ],
)
def test_failures_are_raised_here(job, error, message):
  with pytest.raises(error, match=message):
    list(process_pool.run_jobs(square, [job, 1], 2))


@pytest.mark.multiproc
def test_a_subprocess_raises_its_user_error_here():
  with pytest.raises(errors.UserError, match='^mend this$'):
    process_pool.run_in_subprocess(square, 'bad input')


@pytest.mark.multiproc
def test_a_script_needs_no_guard(tmp_path):
  script = tmp_path / 'script.py'
  script.write_text(
    'import math\n'
    'from encdec_adapt.data.making import process_pool\n'
    "print('begins', flush=True)\n"
    "process_pool.run_in_subprocess(print, 'child')\n"
    'print(sorted(process_pool.run_jobs(math.factorial, [3, 4], 2)))\n'
  )
  done = tiny.run_script(script)
  assert done.returncode == 0, done.stderr
  lines = ['begins', 'child', '[(3, 6), (4, 24)]']
  assert done.stdout.splitlines() == lines
