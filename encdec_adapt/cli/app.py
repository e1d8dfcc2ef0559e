"""The frame of every main: bad input ends in one paragraph and a status."""

from collections.abc import Callable, Sequence
import sys
from typing import Any, NoReturn

from absl import app, flags

from encdec_adapt.cli import errors

# Statuses of a process besides 0 and Python's 1 for an unexpected exception.
USER_ERROR = 2
# EX_TEMPFAIL: told to stop, saved; the same command continues. Launchers
# restart on it.
RESTART = 75
# Ended by its watchdog, or because another process of the job is missing.
# Launchers restart on it too.
HANG = 76


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
  """Calls `function(argument)`; on bad input, exits with its `status`."""
  try:
    return function(argument)
  except (errors.UserError, flags.Error) as error:
    sys.stdout.flush()
    print(f'Error: {" ".join(str(error).split())}', file=sys.stderr, flush=True)
    sys.exit(status(error))


def status(error: BaseException) -> int:
  """What a process ends with that an error leaves."""
  if isinstance(error, SystemExit):
    return error.code if isinstance(error.code, int) else int(bool(error.code))
  if isinstance(error, errors.PeerError):
    return error.status
  if isinstance(error, errors.AbsentError):
    return HANG
  return USER_ERROR if isinstance(error, (errors.UserError, flags.Error)) else 1
