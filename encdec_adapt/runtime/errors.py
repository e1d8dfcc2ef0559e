"""The exceptions that mean "the user can mend this"."""


class UserError(Exception):
  """Bad input: names the thing, its value and the remedy in one paragraph.

  Mains print it without a traceback and exit with status 2, before any long
  work has started and with nothing half written.
  """


def behind(error: BaseException) -> UserError | None:
  """The `UserError` that an error is, or was raised from; None for none."""
  cause: BaseException | None = error
  while cause is not None and not isinstance(cause, UserError):
    cause = cause.__cause__
  return cause


class AbsentError(UserError):
  """Another process of the job, or its machine, did not answer in time.

  Nothing is wrong with the input: mains exit with a status on which launchers
  start the job again.
  """
