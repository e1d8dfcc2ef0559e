"""Runs generated programs: in a process of their own, with limits.

Nothing runs unless `allowed` was entered, which `evaluate --allow_code` does.
The limits keep mistakes small; they are no sandbox against malice.
"""

from collections.abc import Iterator
import contextlib
import os
import subprocess
import sys
import tempfile

from encdec_adapt.cli import errors

# Set while generated programs may run; lm-eval's own tasks read it, too.
_VARIABLE = 'HF_ALLOW_CODE_EVAL'
SECONDS = 10
MEGABYTES = 1024
# The new process limits itself, which it cannot undo, before it reads.
_START = """
import math, resource, sys
for kind, most in (
  (resource.RLIMIT_CPU, math.ceil(float(sys.argv[1])) + 1),
  (resource.RLIMIT_AS, int(sys.argv[2]) << 20),
  (resource.RLIMIT_FSIZE, 1 << 20),
  (resource.RLIMIT_CORE, 0),
):
  resource.setrlimit(kind, (most, most))
exec(compile(sys.stdin.read(), 'program', 'exec'), {'__name__': '__main__'})
"""


@contextlib.contextmanager
def allowed(allow: bool) -> Iterator[None]:
  """Allows generated programs to run inside the context."""
  before = os.environ.get(_VARIABLE)
  os.environ[_VARIABLE] = '1' if allow else '0'
  try:
    yield
  finally:
    if before is None:
      del os.environ[_VARIABLE]
    else:
      os.environ[_VARIABLE] = before


def passes(
  program: str, *, seconds: float = SECONDS, megabytes: int = MEGABYTES
) -> bool:
  """Runs a Python program and returns whether it ends without an error.

  Args:
    program: source text, which ends with its tests.
    seconds: most time that it may take.
    megabytes: most memory that it may have.

  Raises:
    UserError: generated programs may not run.
  """
  if os.environ.get(_VARIABLE) != '1':
    raise errors.UserError(
      'this task runs generated programs, which may do anything that you may;'
      ' give --allow_code to run them, in a container best.'
    )

  with tempfile.TemporaryDirectory() as folder:
    try:
      done = subprocess.run(
        [sys.executable, '-I', '-c', _START, str(seconds), str(megabytes)],
        input=program.encode('utf-8', 'replace'),
        cwd=folder,
        env={'PATH': os.defpath},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=seconds,
        start_new_session=True,
        check=False,
      )
    except subprocess.TimeoutExpired:
      return False
  return done.returncode == 0
