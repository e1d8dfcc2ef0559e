"""A process dies with its parent, whatever it is at."""

import ctypes
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from encdec_adapt.cluster import parent_death

pytestmark = pytest.mark.multiproc

# Not `tests.tiny`, which imports more than a child needs.
ROOT = pathlib.Path(__file__).resolve().parents[2]


def hold_the_gil(pipe):
  """As a library does that is at work for long."""
  parent_death.end_with_parent()
  pipe.send(None)
  ctypes.PyDLL(None).sleep(120)


def sleep_on_another_system(pipe):
  """Where no kernel sends a signal."""
  sys.platform = 'darwin'
  parent_death.end_with_parent()
  pipe.send(None)
  time.sleep(120)


def begin_late(pipe):
  """Its parent is dead before it begins to watch."""
  sys.platform = 'darwin'
  pipe.send(None)
  while os.getppid() == multiprocessing.parent_process().pid:
    time.sleep(0.01)
  parent_death.end_with_parent()
  print('lives on')


def start(name):
  """A parent: prints its child's id once that is at work, and waits for it."""
  context = multiprocessing.get_context('spawn')
  ours, theirs = context.Pipe()
  process = context.Process(target=globals()[name], args=(theirs,))
  process.start()
  ours.recv()
  print(process.pid, flush=True)
  process.join()


@pytest.mark.parametrize(
  'name, number',
  [
    ('hold_the_gil', signal.SIGKILL),
    ('sleep_on_another_system', signal.SIGKILL),
    ('begin_late', signal.SIGKILL),
  ],
)
def test_a_child_dies_with_its_parent(name, number):
  program = 'from tests.cluster import test_parent_death as t; t.start'
  parent = subprocess.Popen(
    [sys.executable, '-c', f'{program}({name!r})'],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    text=True,
  )
  assert int(parent.stdout.readline())
  parent.send_signal(number)
  assert parent.wait() == -number
  # Ends when the last process that could write there is gone.
  began = time.monotonic()
  assert parent.stdout.read() == ''
  assert time.monotonic() - began < 60
