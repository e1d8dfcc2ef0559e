"""The log of a job: its printed lines with timestamps.

This module must import only `files` and errors.
"""

import contextlib
import datetime
import os
import sys
import traceback
from typing import Any

from encdec_adapt.base import errors
from encdec_adapt.files import append_log, disk, paths

FILE = 'train.log'


class JobLog(contextlib.redirect_stdout):
  """Context manager that copies standard output to WORKDIR/train.log.

  The log has every start of a job, with its command and any error. Only
  complete lines are logged, so that threads do not interleave.
  """

  def __init__(self, workdir: str | os.PathLike[str], command: str):
    """Prepares the log.

    Args:
      workdir: work directory of the job, a local folder or a bucket address.
      command: the job's command line; '' if started from Python.
    """
    super().__init__(self)
    self._path, self._command = paths.at(workdir) / FILE, command
    self._begun = ''  # An incomplete line.

  def __enter__(self) -> 'JobLog':
    self._terminal, self._file = sys.stdout, append_log.append(self._path)
    self._record(f'$ {self._command}' if self._command else 'start')
    return super().__enter__()

  def __exit__(self, kind, error, trace) -> None:
    super().__exit__(kind, error, trace)
    if isinstance(error, errors.UserError):
      self._record(f'Error: {error}')
    elif error is not None:
      self._record(*traceback.format_exception(error))
    self._file.close()

  def write(self, text: str) -> int:
    """Writes to the terminal, and complete lines to the log."""
    *lines, self._begun = (self._begun + text).split('\n')
    self._record(*lines)
    return self._terminal.write(text)

  def __getattr__(self, name: str) -> Any:
    """Delegates other stream attributes (`flush`, `isatty`) to the terminal."""
    return getattr(self._terminal, name)

  def _record(self, *lines: str) -> None:
    now = datetime.datetime.now().astimezone().isoformat(' ', 'seconds')
    text = ''.join(f'{now} {line.rstrip()}\n' for line in lines)
    with disk.writing(self._path):
      self._file.write(text.encode())
