"""The one exception that means "the user can mend this"."""


class UserError(Exception):
  """Bad input: names the thing, its value and the remedy in one paragraph.

  Mains print it without a traceback and exit with status 2, before any long
  work has started and with nothing half written.
  """
