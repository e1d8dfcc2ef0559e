"""User errors: bad input or environment, reported without a traceback.

This module must not import anything of the package.
"""

from collections.abc import Iterable
import difflib


class UserError(ValueError):
  """Bad input: names key, value and remedy in one paragraph.

  Mains print it without a traceback and exit with status 2, before any long
  work and without partial output.
  """


class AbsentError(UserError):
  """A process of the job, its machine, or a bucket did not answer in time.

  The input is valid: mains exit with a status that makes launchers restart the
  job.
  """


class DivergedError(UserError):
  """Training stopped or ended with non-finite updates or losses.

  Mains exit with a separate status that launchers do not restart on.
  """


def user_error_behind(error: BaseException) -> UserError | None:
  """Returns the `UserError` that caused an exception, or None.

  Args:
    error: the exception; searched along `__cause__`.
  """
  # Only `raise from` counts: an error being handled (`__context__`) need not be
  # the cause.
  cause: BaseException | None = error
  while cause is not None and not isinstance(cause, UserError):
    cause = cause.__cause__
  return cause


def nearest(name: str, names: Iterable[str]) -> str:
  """Returns ` (did you mean 'NAME'?)` for a mistyped name, or ''."""
  matches = difflib.get_close_matches(name, list(names), 1)
  return f' (did you mean {matches[0]!r}?)' if matches else ''
