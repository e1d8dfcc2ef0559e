"""A hang is distinguished from a slow step, and ends with a report."""

import os
import subprocess
import sys
import textwrap
import time
import types

import pytest

from encdec_adapt.base import exit_status
from encdec_adapt.cluster import watchdog
from tests import tiny


@pytest.fixture
def clock(monkeypatch):
  """The time, `now`."""
  clock = types.SimpleNamespace(now=0.0)
  monkeypatch.setattr(time, 'monotonic', lambda: clock.now)
  return clock


@pytest.mark.parametrize(
  'steps, limit',
  [
    ([5, 5, 90, 5, 5], 100),  # Twenty times the median step.
    ([0.01] * 6, 10),  # The configured minimum.
    ([5, 5, 90, 5], 120),  # Too few steps for a median.
  ],
)
def test_the_limit_of_a_step(tmp_path, steps, limit, clock):
  watch = watchdog.Watchdog(tmp_path, 0, 10)
  for step, seconds in enumerate(steps):
    watch.beat(step)
    clock.now += seconds
  watch.beat(len(steps))
  assert watch.limit == limit
  clock.now += limit
  assert not watch.hangs()
  clock.now += 1
  assert watch.hangs()
  # An evaluation has a limit of its own, and is no step.
  watch.beat(len(steps), 'evaluate')
  clock.now += 119
  assert watch.limit == 120 and not watch.hangs()
  watch.beat(len(steps))
  assert watch.limit == limit


def test_parts_of_a_step_have_limits_of_their_own(tmp_path, clock):
  watch = watchdog.Watchdog(tmp_path, 0, 1)
  for step in range(6):
    for part, seconds in (('sample', 30), ('reward', 5), ('step', 1)):
      watch.beat(step, part)
      clock.now += seconds
  limits = []
  for part in ('sample', 'reward', 'step'):
    watch.beat(6, part)
    limits.append(watch.limit)
  assert limits == [600, 100, 20]


# With an argument nobody reads the standard error.
@pytest.mark.parametrize('more', [[], ['closed']])
def test_a_process_that_hangs_ends_with_the_stacks_of_its_threads(
  tmp_path, more
):
  code = """
    import os, sys, threading
    from encdec_adapt.cluster import watchdog

    def wait_forever():
      threading.Event().wait()

    if len(sys.argv) > 2:
      os.close(2)
    with watchdog.Watchdog(sys.argv[1], 3, 0.02) as watch:
      watch.beat(7)
      wait_forever()
  """
  done = subprocess.run(
    [sys.executable, '-c', textwrap.dedent(code), str(tmp_path), *more],
    capture_output=True,
    text=True,
    cwd=tiny.ROOT,
    env=tiny.environment(),
    timeout=120,
  )
  assert done.returncode == exit_status.HANG, done.stderr
  report = (tmp_path / watchdog.REPORTS / '3.txt').read_text()
  for text in [report] if more else [done.stderr, report]:
    assert 'process 3 hangs: step at step 7' in text
    assert 'last barrier of this process: none' in text
    assert 'wait_forever' in text


def test_a_job_that_ends_in_time_does_not_hang(tmp_path, monkeypatch):
  ended = []
  monkeypatch.setattr(os, '_exit', ended.append)
  with watchdog.Watchdog(tmp_path, 0, 60) as watch:
    watch.beat(1)
  assert not ended and not (tmp_path / watchdog.REPORTS).exists()
