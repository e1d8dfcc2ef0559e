"""Exit statuses, and user errors without a traceback.

This module must not import anything of the package but errors.
"""

from collections.abc import Callable
import os
import select
import sys
from typing import Any, TextIO

from absl import flags

from encdec_adapt.base import errors

# Exit statuses besides 0 and Python's 1 for an unexpected exception; launchers
# restart on all but the first two, and nobody presses Ctrl-C there. The table
# of all is in launch/README.md.
USER_ERROR = 2
# The losses of a job are not finite: the same command diverges again.
DIVERGED = 3
# EX_TEMPFAIL: stopped by a signal and saved; the same command resumes.
RESTART = 75
# 128 + SIGINT, as shells report it: stopped by Ctrl-C.
INTERRUPTED = 130
# Ended by the watchdog, or another process of the job did not answer in time.
HANG = 76
# 128 + SIGPIPE: the reader of standard output has ended, such as `| head`.
CLOSED_OUTPUT = 141
# SIGABRT: jax aborts a process when another process of the job is missing or
# has died.
ABORT = 134


def guard(function: Callable[..., Any], *arguments: Any) -> Any:
  """Calls a function; prints a user error as a paragraph and exits.

  There is no traceback, and the exit status is that of the error. Ctrl-C ends
  with a line, too, and an output that nobody reads without one.
  """
  try:
    return function(*arguments)
  except BrokenPipeError:
    if _has_reader(sys.stdout):
      raise  # Another pipe broke.
    # Python flushes the output once more at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(CLOSED_OUTPUT)
  except KeyboardInterrupt:
    sys.stdout.flush()
    print('interrupted', file=sys.stderr, flush=True)
    sys.exit(INTERRUPTED)
  except (errors.UserError, flags.Error) as error:
    # Output first, where both streams go into the same file.
    sys.stdout.flush()
    print(f'Error: {" ".join(str(error).split())}', file=sys.stderr, flush=True)
    sys.exit(status(error))


def _has_reader(output: TextIO) -> bool:
  poll = select.poll()
  poll.register(output.fileno(), 0)  # Polls for errors only.
  return not poll.poll(0)


def status(error: BaseException) -> int:
  """Returns the exit status of a process that ends with an exception."""
  # As Python does: a text or an object as code means failure.
  if isinstance(error, SystemExit):
    return error.code if isinstance(error.code, int) else int(bool(error.code))
  if isinstance(error, errors.AbsentError):
    return HANG
  if isinstance(error, errors.DivergedError):
    return DIVERGED
  return USER_ERROR if isinstance(error, (errors.UserError, flags.Error)) else 1
