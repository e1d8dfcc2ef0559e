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
# restart on all but the first two (Ctrl-C does not occur there). See the table
# in launch/README.md.
USER_ERROR = 2
# Non-finite losses: the same command would diverge again.
DIVERGED = 3
# EX_TEMPFAIL: stopped by a signal and saved; repeating the command resumes.
RESTART = 75
# 128 + SIGINT, as shells report it: stopped by Ctrl-C.
INTERRUPTED = 130
# Ended by the watchdog, or a peer process did not answer in time.
HANG = 76
# 128 + SIGPIPE: the reader of standard output, such as `| head`, has exited.
CLOSED_OUTPUT = 141
# SIGABRT: jax aborts a process if a peer is missing or has died.
ABORT = 134


def guard(function: Callable[..., Any], *arguments: Any) -> Any:
  """Calls a function; prints user errors as a paragraph and exits.

  Exits without a traceback, with the status of the error. Ctrl-C prints one
  line, and a closed standard output nothing.
  """
  try:
    return function(*arguments)
  except BrokenPipeError:
    if _has_reader(sys.stdout):
      raise  # Another pipe broke.
    # Python flushes standard output again at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(CLOSED_OUTPUT)
  except KeyboardInterrupt:
    sys.stdout.flush()
    print('interrupted', file=sys.stderr, flush=True)
    sys.exit(INTERRUPTED)
  except (errors.UserError, flags.Error) as error:
    # Flush output first, in case both streams go into the same file.
    sys.stdout.flush()
    print(f'Error: {" ".join(str(error).split())}', file=sys.stderr, flush=True)
    sys.exit(status(error))


def _has_reader(output: TextIO) -> bool:
  poll = select.poll()
  poll.register(output.fileno(), 0)  # Polls for errors only.
  return not poll.poll(0)


def status(error: BaseException) -> int:
  """Returns the exit status for an exception."""
  # Like Python: a non-integer code means failure.
  if isinstance(error, SystemExit):
    return error.code if isinstance(error.code, int) else int(bool(error.code))
  if isinstance(error, errors.AbsentError):
    return HANG
  if isinstance(error, errors.DivergedError):
    return DIVERGED
  return USER_ERROR if isinstance(error, (errors.UserError, flags.Error)) else 1
