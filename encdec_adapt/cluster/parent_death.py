"""Worker processes that end with the process that started them.

An orphan would hold the locks of its folders, and would write there while the
same command, run again, writes too. Imports the standard library only, so that
a child can call it before anything else.
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
  """Ends this process, without cleaning up, as soon as its parent has died.

  Call it first in a process that `multiprocessing` has spawned; it does
  nothing in any other. The thread that started the process must outlive it:
  to the kernel that thread is the parent.
  """
  parent = multiprocessing.parent_process()
  if parent is None:
    return
  if sys.platform == 'linux':
    # A thread would wait for the GIL, which importing TensorFlow holds for
    # seconds.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
  if connection.wait([parent.sentinel], timeout=0):
    os._exit(1)  # It died before the line above.

  def end_after_parent() -> None:
    connection.wait([parent.sentinel])
    os._exit(1)

  threading.Thread(target=end_after_parent, daemon=True).start()
