"""A process dies with its parent, even while it is busy."""

import ctypes
import multiprocessing
import os
import pathlib
import subprocess
import sys
import time

import pytest

from encdec_adapt.cluster import parent_death

pytestmark = pytest.mark.multiproc

# Not `tests.tiny`, which imports more than a child needs.
ROOT = pathlib.Path(__file__).resolve().parents[2]


def hold_the_gil(pipe):
  """Blocks Python's threads, as a long call into a library does."""
  parent_death.end_with_parent()
  pipe.send(None)
  ctypes.PyDLL(None).sleep(120)


def begin_late(pipe):
  """Starts to watch after its parent's death."""
  sys.platform = 'darwin'
  pipe.send(None)
  while os.getppid() == multiprocessing.parent_process().pid:
    time.sleep(0.01)
  parent_death.end_with_parent()
  print('still alive')


def start(name):
  """Starts a child and waits for it; prints a line when it is ready."""
  context = multiprocessing.get_context('spawn')
  ours, theirs = context.Pipe()
  process = context.Process(target=globals()[name], args=(theirs,))
  process.start()
  ours.recv()
  print('ready', flush=True)
  process.join()


@pytest.mark.parametrize('name', ['hold_the_gil', 'begin_late'])
def test_a_child_dies_with_its_parent(name):
  program = 'from tests.cluster import test_parent_death as t; t.start'
  parent = subprocess.Popen(
    [sys.executable, '-c', f'{program}({name!r})'],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    text=True,
  )
  assert parent.stdout.readline() == 'ready\n'
  parent.kill()
  parent.wait()
  # Ends when the last process that could write to the pipe is gone.
  began = time.monotonic()
  assert parent.stdout.read() == ''
  assert time.monotonic() - began < 60
