"""A hang is told from a slow step, and ends with a report."""

import json
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


def written(watch):
  """Waits for the heartbeat that is being written."""
  watch._writing.join()


def watched(folder, clock, **options):
  options = {'factor': 10, 'least': 30, 'least_step': 10, **options}
  return watchdog.Watchdog(folder, 0, 2, clock=clock, **options)


def test_the_limit_is_a_multiple_of_the_median_step(tmp_path, clock):
  watch = watched(tmp_path, clock)
  assert watch.limit == 30
  for step, seconds in enumerate([5, 5, 90, 5, 5]):
    watch.beat(step)
    # The first steps say little of what is usual.
    assert watch.limit == 30
    clock.now += seconds
  watch.beat(5)
  assert watch.limit == 50
  clock.now += 50
  assert not watch.hangs()
  clock.now += 1
  assert watch.hangs()


def test_a_short_step_does_not_make_a_hang(tmp_path, clock):
  watch = watched(tmp_path, clock)
  for step in range(6):
    watch.beat(step)
    clock.now += 0.01
  clock.now += 9
  assert not watch.hangs()
  clock.now += 1
  assert watch.hangs()


def test_what_is_no_step_has_the_least_limit_and_no_share(tmp_path, clock):
  watch = watched(tmp_path, clock)
  for step in range(5):
    watch.beat(step)
    clock.now += 20
  watch.beat(5, 'evaluate')
  clock.now += 29
  assert watch.limit == 30 and not watch.hangs()
  watch.beat(5)
  assert watch.limit == 200  # Ten times a step, 20 s.


def test_heartbeats_are_written_now_and_then(tmp_path, clock):
  watch = watched(tmp_path, clock)
  file = tmp_path / watchdog.HEARTBEATS / '0.json'
  watch.beat(1)
  written(watch)
  watch.beat(2)
  written(watch)
  assert json.loads(file.read_text())['step'] == 1
  clock.now += 6
  watch.beat(3, 'save')
  written(watch)
  beat = json.loads(file.read_text())
  assert (beat['step'], beat['doing']) == (3, 'save')
  # One that an earlier start, with more processes, has left.
  file.with_name('2.json').write_text(file.read_text())
  (line,) = watchdog.heartbeats(tmp_path, 2)
  assert line.startswith('process 0: save at step 3, ')
  assert line.endswith(' s ago; last meeting: none')


def test_a_process_that_hangs_ends_with_the_stacks_of_its_threads(tmp_path):
  code = """
    import sys, threading
    from encdec_adapt.cluster import watchdog

    def waits_for_nobody():
      threading.Event().wait()

    least = {'least': 0.2, 'least_step': 0.1}
    with watchdog.Watchdog(sys.argv[1], 3, 4, factor=5, **least) as watch:
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
  assert 'process 3 hangs: step at step 7' in done.stderr
  report = (tmp_path / watchdog.REPORTS / '3.txt').read_text()
  assert 'waits_for_nobody' in report
  assert 'process 3: step at step 7' in report
  assert 'last meeting of this process: none' in report


def test_a_report_that_cannot_be_written_does_not_keep_it_from_ending(
  tmp_path, monkeypatch, clock, capsys
):
  ended = []
  monkeypatch.setattr(watchdog, '_PATIENCE', 0.1)
  # As a file system that does not answer.
  monkeypatch.setattr(
    watchdog, 'heartbeats', lambda *_: threading.Event().wait()
  )
  watch = watched(tmp_path, clock, end=ended.append)
  watch._end_without('process 1 (b) is gone')
  assert ended == [app.HANG]
  said = capsys.readouterr().err
  assert 'takes no report' in said and 'in _end_without' in said


def test_where_no_report_can_be_written_the_stacks_are_printed(
  tmp_path, monkeypatch, clock, capsys
):
  def full(*_):
    raise OSError('no space left on device')

  ended = []
  monkeypatch.setattr(paths, 'write', full)
  monkeypatch.setattr(threading, 'excepthook', lambda _: None)
  watch = watched(tmp_path, clock, end=ended.append)
  watch._end_without('process 1 (b) is gone')
  assert ended == [app.HANG]
  assert 'in _end_without' in capsys.readouterr().err


def test_a_damaged_sign_of_life_loses_no_report(tmp_path, clock):
  (tmp_path / watchdog.HEARTBEATS).mkdir()
  (tmp_path / watchdog.HEARTBEATS / '1.json').write_text('{"step"')
  watch = watched(tmp_path, clock, end=lambda _: None)
  watch._end_without('process 1 (b) is gone')
  report = (tmp_path / watchdog.REPORTS / '0.txt').read_text()
  assert 'cannot be read' in report and 'in _end_without' in report


def test_an_end_in_time_is_no_hang(tmp_path):
  ended = []
  with watchdog.Watchdog(
    tmp_path, 0, 1, factor=5, least=60, least_step=60, end=ended.append
  ) as watch:
    watch.beat(1)
  assert not ended and not (tmp_path / watchdog.REPORTS).exists()
