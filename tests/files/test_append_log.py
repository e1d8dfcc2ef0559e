"""What grows in a bucket: parts, what a kill loses, what it leaves twice."""

import pytest

from encdec_adapt.cluster import watchdog
from encdec_adapt.files import append_log, paths
from encdec_adapt.telemetry import metrics, timing


@pytest.fixture
def small(monkeypatch):
  monkeypatch.setattr(append_log, 'PART', 100)


def _write(writer, steps, kind='train'):
  for step in steps:
    writer.write(kind, step, {'loss': step / 2})


def _steps(folder, kind='train'):
  return [r['step'] for r in metrics.read_metrics(folder) if r['kind'] == kind]


def test_parts_and_what_was_not_flushed(bucket, store, small):
  path = paths.at(bucket) / 'x'
  assert not append_log.exists(path)
  file = append_log.append(path)
  for number in range(25):
    file.write(b'%09d\n' % number)
  names = [store.key(f'{bucket}/x{end}') for end in ('', '-000001')]
  assert store.names(store.key(path)) == names
  assert append_log.read(path).splitlines() == [b'%09d' % n for n in range(20)]
  file.flush()
  assert len(append_log.read(path)) == 250
  file.write(b'lost\n')
  again = append_log.append(path)
  again.write(b'new\n')
  again.close()
  assert append_log.read(path).endswith(b'000000024\nnew\n')
  append_log.replace(path, b'all\n')
  assert store.names(store.key(path)) == names[:1]
  assert append_log.read(path) == b'all\n'


def test_a_bucket_that_is_away_for_a_while_loses_nothing(
  bucket, small, monkeypatch, capsys
):
  path = paths.at(bucket) / 'x'
  file = append_log.append(path)
  real = paths.write

  def refuse(path, data):
    raise OSError('no answer')

  monkeypatch.setattr(paths, 'write', refuse)
  for number in range(15):
    file.write(b'%09d\n' % number)
  with pytest.raises(OSError, match='no answer'):
    file.flush()
  assert 'x is written later: no answer' in capsys.readouterr().err
  monkeypatch.setattr(paths, 'write', real)
  monkeypatch.setattr(append_log, 'EVERY', 0.0)
  for number in range(15, 25):
    file.write(b'%09d\n' % number)
  assert append_log.read(path).splitlines() == [b'%09d' % n for n in range(25)]


def test_metrics_are_there_after_a_flush_and_dropped_on_resume(bucket, small):
  writer = metrics.MetricWriter(bucket, -1)
  _write(writer, range(7))
  writer.flush()
  _write(writer, [7])
  # Killed here.
  assert _steps(bucket) == list(range(7))
  with metrics.MetricWriter(bucket, 5) as writer:
    assert [r['step'] for r in writer.dropped] == [6]
    assert writer.last('train') == 5
    _write(writer, [6, 7, 8])
  assert _steps(bucket) == list(range(9))
  events = paths.at(bucket) / metrics.EVENTS
  assert len(list(events.glob('events.out.tfevents.*'))) >= 2


def test_records_that_a_kill_left_twice_count_once(bucket, store, small):
  with metrics.MetricWriter(bucket, -1) as writer:
    _write(writer, range(6))
    _write(writer, [4], 'eval')
  path = paths.at(bucket) / metrics.FILE
  parts = [p for p in path.parent.glob(f'{metrics.FILE}-*')]
  assert len(parts) == 2
  # As `replace` leaves it when it is killed before it removes the parts.
  paths.write(path, append_log.read(path))
  assert _steps(bucket) == list(range(6)) and _steps(bucket, 'eval') == [4]
  with metrics.MetricWriter(bucket, 3) as writer:
    _write(writer, [4, 5])
  assert _steps(bucket) == list(range(6)) and _steps(bucket, 'eval') == []
  assert len(list(path.parent.glob(f'{metrics.FILE}-*'))) == 1


def test_starts_are_recorded_in_a_bucket(bucket):
  timing.Starts(bucket, 0)
  starts = timing.Starts(bucket, 7, [{'seconds/total': 2.0}])
  found = starts.goodput(1.0)
  assert (found['starts'], found['lost_seconds']) == (2, 2.0)


def test_a_hang_is_reported_in_the_bucket(bucket):
  ended = []
  watch = watchdog.Watchdog(bucket, 2, 0.01, end=ended.append)
  with watch:
    watch._thread.join(60)
  assert ended
  report = paths.at(f'{bucket}/{watchdog.REPORTS}/2.txt').read_text()
  assert 'process 2 hangs' in report and 'test_append_log.py' in report
