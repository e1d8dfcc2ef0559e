"""A hang is distinguished from a slow step, and ends with a report."""

import subprocess
import sys
import textwrap
import threading

import pytest

from encdec_adapt.cli import app
from encdec_adapt.cluster import watchdog
from encdec_adapt.files import paths
from tests import tiny


class Clock:
  now = 0.0

  def __call__(self):
    return self.now


@pytest.fixture
def clock():
  return Clock()


def watched(folder, clock):
  return watchdog.Watchdog(folder, 0, 10, clock=clock)


def test_the_limit_is_a_multiple_of_the_median_step(tmp_path, clock):
  watch = watched(tmp_path, clock)
  assert watch.limit == 120
  for step, seconds in enumerate([5, 5, 90, 5, 5]):
    watch.beat(step)
    # The first steps say little of what is usual.
    assert watch.limit == 120
    clock.now += seconds
  watch.beat(5)
  assert watch.limit == 100  # Twenty times a step of 5 s.
  clock.now += 100
  assert not watch.hangs()
  clock.now += 1
  assert watch.hangs()


def test_the_limit_of_short_steps_has_a_lower_bound(tmp_path, clock):
  watch = watched(tmp_path, clock)
  for step in range(6):
    watch.beat(step)
    clock.now += 0.01
  assert watch.limit == 10


def test_an_evaluation_has_its_own_limit_and_is_no_step(tmp_path, clock):
  watch = watched(tmp_path, clock)
  for step in range(5):
    watch.beat(step)
    clock.now += 20
  watch.beat(5, 'evaluate')
  clock.now += 119
  assert watch.limit == 120 and not watch.hangs()
  watch.beat(5)
  assert watch.limit == 400  # Twenty times a step of 20 s.


def test_a_process_that_hangs_ends_with_the_stacks_of_its_threads(tmp_path):
  code = """
    import sys, threading
    from encdec_adapt.cluster import watchdog

    def waits_for_nobody():
      threading.Event().wait()

    with watchdog.Watchdog(sys.argv[1], 3, 0.02) as watch:
      watch.beat(7)
      waits_for_nobody()
  """
  done = subprocess.run(
    [sys.executable, '-c', textwrap.dedent(code), str(tmp_path)],
    capture_output=True,
    text=True,
    cwd=tiny.ROOT,
    env=tiny.environment(),
    timeout=120,
  )
  assert done.returncode == app.HANG, done.stderr
  report = (tmp_path / watchdog.REPORTS / '3.txt').read_text()
  for text in (done.stderr, report):
    assert 'process 3 hangs: step at step 7' in text
    assert 'last barrier of this process: none' in text
    assert 'waits_for_nobody' in text


def test_a_file_system_that_hangs_does_not_keep_it_from_ending(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.setattr(watchdog, '_REPORT_SECONDS', 0.1)
  monkeypatch.setattr(paths, 'write', lambda *_: threading.Event().wait())
  ended = threading.Event()
  with watchdog.Watchdog(tmp_path, 0, 0.01, end=lambda _: ended.set()):
    assert ended.wait(60)
  assert 'process 0 hangs' in capsys.readouterr().err


def test_an_end_in_time_is_no_hang(tmp_path):
  ended = []
  with watchdog.Watchdog(tmp_path, 0, 60, end=ended.append) as watch:
    watch.beat(1)
  assert not ended and not (tmp_path / watchdog.REPORTS).exists()
