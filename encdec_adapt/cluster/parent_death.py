"""Processes that end with the one that started them.

An orphan would hold the locks of its folders, and would write there while the
same command, given again, writes too.
"""

import ctypes
import multiprocessing
from multiprocessing import connection
import os
import signal
import sys
import threading

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG; source: linux/prctl.h.


def end_with_parent() -> None:
  """Ends this process, without cleaning up, as soon as its parent has died.

  To be called first in a process that `multiprocessing` has spawned; does
  nothing in any other. The thread that started it has to wait for it: to the
  kernel it is the parent.
  """
  parent = multiprocessing.parent_process()
  if parent is None:
    return
  if sys.platform == 'linux':
    # A thread would wait for the GIL, which importing TensorFlow holds for
    # seconds.
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
  if connection.wait([parent.sentinel], timeout=0):
    os._exit(1)
  threading.Thread(
    target=_end_after, args=(parent,), name='end-with-parent', daemon=True
  ).start()


def _end_after(parent: multiprocessing.process.BaseProcess) -> None:
  connection.wait([parent.sentinel])
  os._exit(1)
