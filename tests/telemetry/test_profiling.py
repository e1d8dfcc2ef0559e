"""Traces of the steps that were asked for, and no others."""

import functools
import os
import signal

import jax
import pytest

from encdec_adapt.telemetry import profiling


@pytest.fixture
def traced(monkeypatch):
  """Steps at which a trace was started (+) and stopped (-)."""
  found = []
  monkeypatch.setattr(
    jax.profiler, 'start_trace', lambda folder: found.append('+')
  )
  monkeypatch.setattr(jax.profiler, 'stop_trace', lambda: found.append('-'))
  return found


def run(profiler, steps, at=None, then=lambda: None):
  seen = []
  with profiler:
    for step in range(steps):
      profiler.before(step)
      seen.append(step)
      if step == at:
        then()
      profiler.after(step, None)
  return seen


@pytest.mark.parametrize(
  'first, steps, expected', [(2, 2, '..+..-..'), (0, 0, '......')]
)
def test_the_steps_of_the_configuration(
  tmp_path, traced, first, steps, expected
):
  profiler = profiling.Profiler(tmp_path, None, first, steps)
  with profiler:
    for step in range(6):
      profiler.before(step)
      traced.append('.')
      profiler.after(step, None)
  assert ''.join(traced) == expected


def test_it_is_said_before_a_trace_is_written(tmp_path, traced):
  run(profiling.Profiler(tmp_path, None, 1, 2, writing=traced.append), 4)
  assert traced == ['+', 2, '-']


def test_a_signal_traces_the_next_steps(tmp_path, traced):
  ask = functools.partial(os.kill, os.getpid(), signal.SIGUSR1)
  profiler = profiling.Profiler(tmp_path, None, 0, 0)
  with profiling.listening():
    run(profiler, 3)
    assert not traced
    run(profiler, 6, at=1, then=ask)
    assert traced == ['+', '-']
    # One that comes before the loop is of its first steps.
    ask()
    run(profiler, 6)
    assert traced == ['+', '-'] * 2


def test_a_trace_that_cannot_be_written_ends_nothing(
  tmp_path, monkeypatch, capsys
):
  def refuse(*args):
    raise OSError('the disk is full')

  for ending in ('start_trace', 'stop_trace'):
    monkeypatch.setattr(jax.profiler, 'start_trace', lambda folder: None)
    monkeypatch.setattr(jax.profiler, 'stop_trace', lambda: None)
    monkeypatch.setattr(jax.profiler, ending, refuse)
    run(profiling.Profiler(tmp_path, None, 0, 2), 6)
    # Also where the loop ends before.
    run(profiling.Profiler(tmp_path, None, 0, 9), 6)
  said = capsys.readouterr()
  assert said.err.count('OSError: the disk is full') == 4 and not said.out


@pytest.mark.parametrize('process, folder', [(None, ''), (3, 'process_3')])
def test_a_real_trace_is_written(tmp_path, process, folder):
  run(profiling.Profiler(tmp_path, process, 0, 1), 1)
  assert list((tmp_path / profiling.FOLDER / folder).glob('**/*.xplane.pb'))
  assert process is None or os.listdir(tmp_path / profiling.FOLDER) == [folder]
