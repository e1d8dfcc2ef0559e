"""Traces of the requested steps, and no others."""

import os
import signal

import jax
import pytest

from encdec_adapt.telemetry import profiling


@pytest.fixture
def events(monkeypatch):
  """Starts (+) and ends (-) of traces, and steps."""
  events = []
  for name, event in (('start_trace', '+'), ('stop_trace', '-')):
    monkeypatch.setattr(
      jax.profiler, name, lambda *_, event=event: events.append(event)
    )
  return events


def run(profiler, steps, events=None, asks_at=None):
  """Runs a loop of steps; a signal comes during step `asks_at`."""
  with profiler:
    for step in range(steps):
      profiler.begin_step(step)
      if events is not None:
        events.append(str(step))
      if step == asks_at:
        os.kill(os.getpid(), signal.SIGUSR1)
      profiler.end_step(step, None)


@pytest.mark.parametrize(
  'first, steps, expected', [(1, 2, '0+12w-3'), (0, 0, '0123')]
)
def test_configured_steps_are_traced(tmp_path, events, first, steps, expected):
  writing = lambda step: events.append('w')  # noqa: E731
  profiler = profiling.Profiler(tmp_path, None, first, steps, writing=writing)
  run(profiler, 4, events)
  assert ''.join(events) == expected


def test_a_signal_traces_the_next_steps(tmp_path, events):
  profiler = profiling.Profiler(tmp_path, None, 0, 0)
  with profiling.listening():
    run(profiler, 6, events, asks_at=1)
    assert ''.join(events) == '01+234-5'
    os.kill(os.getpid(), signal.SIGUSR1)  # Before the loop.
    run(profiler, 4, events)
  assert ''.join(events)[8:] == '+012-3'


def test_a_real_trace_is_written(tmp_path):
  run(profiling.Profiler(tmp_path, 3, 0, 1), 1)
  folder = tmp_path / profiling.FOLDER
  assert os.listdir(folder) == ['process_3']
  assert list(folder.glob('**/*.xplane.pb'))
