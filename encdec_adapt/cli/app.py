"""Entry point of every main: exit statuses, user errors without traceback."""

from collections.abc import Callable, Sequence
import sys
from typing import Any, NoReturn

from absl import app, flags

from encdec_adapt.cli import errors

# Exit statuses besides 0 and Python's 1 for an unexpected exception; launchers
# restart on all but the first.
USER_ERROR = 2
# EX_TEMPFAIL: stopped by a signal and saved; the same command resumes.
RESTART = 75
# Ended by the watchdog, or another process of the job did not answer.
HANG = 76
# SIGABRT: jax aborts a process when another one of the job is missing or has
# died.
ABORT = 134


def run(
  main: Callable[[Sequence[str]], int | None],
  *,
  parse_flags: Callable[[Sequence[str]], Any] = flags.FLAGS,
) -> NoReturn:
  """Parses flags, runs `main` and exits with its status.

  A `UserError` from either, or a bad flag, is printed to standard error as
  one paragraph without a traceback, and the status is `USER_ERROR`.

  Args:
    main: takes the arguments left over by the flags, program name first;
      returns a status or None for 0.
    parse_flags: takes `sys.argv`, returns the arguments left over.
  """
  app.run(
    lambda arguments: guard(main, arguments),
    flags_parser=lambda argv: guard(parse_flags, argv),
  )


def guard(function: Callable[[Any], Any], argument: Any) -> Any:
  """Calls `function(argument)`; prints a user error and exits."""
  try:
    return function(argument)
  except (errors.UserError, flags.Error) as error:
    sys.stdout.flush()
    print(f'Error: {" ".join(str(error).split())}', file=sys.stderr, flush=True)
    sys.exit(status(error))


def status(error: BaseException) -> int:
  """Returns the exit status of a process that ends with an exception."""
  if isinstance(error, SystemExit):
    return error.code if isinstance(error.code, int) else int(bool(error.code))
  if isinstance(error, errors.AbsentError):
    return HANG
  return USER_ERROR if isinstance(error, (errors.UserError, flags.Error)) else 1
