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


class PeerError(UserError):
  """Another process of the job failed, which this one stops with.

  Attributes:
    status: of that process, and so of this one.
  """

  def __init__(self, message: str, status: int):
    """Names the process and what it says."""
    super().__init__(message)
    self.status = status


class AbsentError(UserError):
  """Another process of the job, or its machine, did not answer in time.

  Nothing is wrong with the input: mains exit with a status on which launchers
  start the job again.
  """
