"""Ends worker processes with their parent.

An orphan would hold the locks of its folders, and write to them concurrently
with a repeated command. Imports only the standard library, so that a child can
call it first.
"""

import ctypes
import multiprocessing
from multiprocessing import connection
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1  # Source: linux/prctl.h.


def end_with_parent() -> None:
  """Ends this process, without cleanup, as soon as its parent dies.

  Call first in a process spawned by `multiprocessing`; does nothing in other
  processes. The starting thread must outlive the process: for the kernel, that
  thread is the parent.
  """
  parent = multiprocessing.parent_process()
  if parent is None:
    return
  if sys.platform == 'linux':
    # A watching thread would wait for the GIL, held for seconds by TensorFlow's
    # import.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
  if connection.wait([parent.sentinel], timeout=0):
    os._exit(1)  # The parent died before the line above.

  def end_after_parent() -> None:
    connection.wait([parent.sentinel])
    os._exit(1)

  threading.Thread(target=end_after_parent, daemon=True).start()
