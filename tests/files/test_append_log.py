"""Append-only files in a bucket: parts, kills, outages, and resumed metrics."""

import pytest

from encdec_adapt.files import append_log, paths
from encdec_adapt.telemetry import metrics


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
  monkeypatch.setattr(append_log, 'PART', 100)


def _write(writer, steps, kind='train'):
  for step in steps:
    writer.write(kind, step, {'loss': step / 2})


def _steps(folder, kind='train'):
  return [r['step'] for r in metrics.read_metrics(folder) if r['kind'] == kind]


def test_full_parts_are_uploaded_and_the_rest_by_flush(bucket, store):
  path = paths.at(bucket) / 'x'
  file = append_log.append(path)
  for number in range(25):
    file.write(b'%09d\n' % number)
  names = [store.key(f'{bucket}/x{end}') for end in ('', '-000001')]
  assert store.names(store.key(path)) == names
  assert append_log.read(path).splitlines() == [b'%09d' % n for n in range(20)]
  file.flush()
  assert len(append_log.read(path)) == 250
  file.write(b'lost\n')
  resumed = append_log.append(path)
  resumed.write(b'new\n')
  resumed.close()
  assert append_log.read(path).endswith(b'000000024\nnew\n')
  append_log.replace(path, b'all\n')
  assert store.names(store.key(path)) == names[:1]
  assert append_log.read(path) == b'all\n'


def test_an_outage_of_the_bucket_loses_nothing(bucket, monkeypatch, capsys):
  path = paths.at(bucket) / 'x'
  file = append_log.append(path)

  def refuse(path, data):
    raise OSError('no answer')

  with monkeypatch.context() as outage:
    outage.setattr(paths, 'write', refuse)
    for number in range(15):
      file.write(b'%09d\n' % number)
    with pytest.raises(OSError, match='no answer'):
      file.flush()
  assert 'x is written later: no answer' in capsys.readouterr().err
  monkeypatch.setattr(append_log, 'EVERY', 0.0)
  for number in range(15, 25):
    file.write(b'%09d\n' % number)
  assert append_log.read(path).splitlines() == [b'%09d' % n for n in range(25)]


def test_flushed_metrics_survive_a_kill_and_resume_drops_later_ones(bucket):
  writer = metrics.MetricWriter(bucket, -1)
  _write(writer, range(7))
  writer.flush()
  _write(writer, [7])  # Killed here.
  assert _steps(bucket) == list(range(7))
  with metrics.MetricWriter(bucket, 5) as writer:
    assert [r['step'] for r in writer.dropped] == [6]
    _write(writer, [6, 7, 8])
  assert _steps(bucket) == list(range(9))
  events = paths.at(bucket) / metrics.EVENTS
  assert len(list(events.glob('events.out.tfevents.*'))) >= 2


def test_records_duplicated_by_a_kill_count_once(bucket):
  with metrics.MetricWriter(bucket, -1) as writer:
    _write(writer, range(6))
    _write(writer, [4], 'eval')
  path = paths.at(bucket) / metrics.FILE
  parts = f'{metrics.FILE}-*'
  assert len(list(path.parent.glob(parts))) == 2
  # `replace` leaves this if it is killed before it removes the parts.
  paths.write(path, append_log.read(path))
  assert _steps(bucket) == list(range(6)) and _steps(bucket, 'eval') == [4]
  with metrics.MetricWriter(bucket, 3) as writer:
    _write(writer, [4, 5])
  assert _steps(bucket) == list(range(6)) and _steps(bucket, 'eval') == []
  assert len(list(path.parent.glob(parts))) == 1
