"""Runs each generated program in a separate process, with limits.

Programs run only inside `allowed` (--allow_code). The limits contain mistakes;
they are not a sandbox against malicious code. This module must not know tasks
and their tests.
"""

from collections.abc import Iterator
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile

from encdec_adapt.base import errors

# Set while generated programs may run; lm-eval's tasks also read it.
_VARIABLE = 'HF_ALLOW_CODE_EVAL'
SECONDS = 10
MEGABYTES = 1024
# The new process irrevocably limits itself before it reads the program. After
# the program has ended, it writes a word unknown to the program: an early exit
# would also have status 0.
_START = """
import math, os, resource, sys
for kind, limit in (
  (resource.RLIMIT_CPU, math.ceil(float(sys.argv[1])) + 1),
  (resource.RLIMIT_AS, int(sys.argv[2]) << 20),
  (resource.RLIMIT_FSIZE, 1 << 20),
  (resource.RLIMIT_CORE, 0),
):
  resource.setrlimit(kind, (limit, limit))
def run(word, program):
  answer = os.dup(1)
  os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
  exec(compile(program, 'program', 'exec'), {'__name__': '__main__'})
  os.write(answer, word)
run(*sys.stdin.buffer.read().split(b'\\n', 1))
"""


@contextlib.contextmanager
def allowed(allow: bool) -> Iterator[None]:
  """Allows generated programs to run in this context."""
  previous = os.environ.get(_VARIABLE)
  os.environ[_VARIABLE] = '1' if allow else '0'
  try:
    yield
  finally:
    if previous is None:
      del os.environ[_VARIABLE]
    else:
      os.environ[_VARIABLE] = previous


def require_allowed() -> None:
  """Checks that generated programs may run, see `allowed`.

  Raises:
    UserError: generated programs may not run.
  """
  if os.environ.get(_VARIABLE) != '1':
    raise errors.UserError(
      'this task runs generated programs, which may do anything that you may;'
      ' give --allow_code to run them, in a container best.'
    )


def passes(program: str, **limits: float) -> bool:
  """Runs a program and returns whether it completes; see `run`."""
  return bool(run(program, **limits))


def run(
  program: str, *, seconds: float = SECONDS, megabytes: int = MEGABYTES
) -> bool | None:
  """Runs a Python program.

  Args:
    program: source code, ending with its tests.
    seconds: time limit.
    megabytes: memory limit.

  Returns:
    Whether the program completes; None on timeout.

  Raises:
    UserError: generated programs may not run.
  """
  require_allowed()
  word = secrets.token_hex(16).encode()
  with tempfile.TemporaryDirectory() as folder:
    process = subprocess.Popen(
      [sys.executable, '-I', '-c', _START, str(seconds), str(megabytes)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      cwd=folder,
      # Without the user's tokens and paths, in a session to kill as a group.
      env={'PATH': os.defpath},
      start_new_session=True,
    )
    try:
      process.stdin.write(word + b'\n' + program.encode('utf-8', 'replace'))
      process.stdin.close()
      process.wait(seconds)
    except subprocess.TimeoutExpired:
      return None
    except BrokenPipeError:
      return False
    finally:
      # Kill its children too, which may outlive it.
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
      process.wait()
    with process.stdout as answer:
      return answer.read() == word
