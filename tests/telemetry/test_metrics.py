"""Metrics on disk: complete, in order, and one record per step."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.files import append_log, paths
from encdec_adapt.telemetry import metrics, trackers


def _steps(folder, kind='train'):
  return [r['step'] for r in metrics.read_metrics(folder) if r['kind'] == kind]


def _write(writer, steps, kind='train'):
  for step in steps:
    writer.write(kind, step, {'loss': step / 2})


@pytest.fixture
def small_parts(monkeypatch):
  monkeypatch.setattr(append_log, 'PART', 100)


def test_values_are_read_exactly_and_lines_are_json(tmp_path):
  third = np.float32(1) / np.float32(3)
  with metrics.MetricWriter(tmp_path, 0) as writer:
    writer.write('train', 1, {'loss': third, 'rows': 8, 'name': 'a'})
    writer.write('eval', 1, {'loss': jnp.float32(2.5), 'many': [1, 2]})
    writer.write('train', 2, {'a': math.nan, 'b': math.inf, 'c': -math.inf})

  def refuse(name):
    raise AssertionError(f'{name} is not JSON')

  for line in (tmp_path / metrics.FILE).read_text().splitlines():
    json.loads(line, parse_constant=refuse)
  *finite, last = metrics.read_metrics(tmp_path / metrics.FILE)
  assert finite == [
    {'kind': 'train', 'step': 1, 'loss': float(third), 'rows': 8, 'name': 'a'},
    {'kind': 'eval', 'step': 1, 'loss': 2.5, 'many': [1, 2]},
  ]
  assert math.isnan(last['a'])
  assert (last['b'], last['c']) == (math.inf, -math.inf)


def test_resume_drops_later_records_and_the_incomplete_line(tmp_path):
  with metrics.MetricWriter(tmp_path, 0) as writer:
    for step in range(1, 6):
      writer.write('train', step, {'loss': step})
      if step % 2 == 0:
        writer.write('eval', step, {'loss': step})
  with open(tmp_path / metrics.FILE, 'a') as file:
    file.write('{"kind": "train", "step": 6, "lo')
  assert _steps(tmp_path) == [1, 2, 3, 4, 5]
  with metrics.MetricWriter(tmp_path, 3) as writer:
    for step in (4, 5, 6):
      writer.write('train', step, {'loss': -step})
    writer.write('eval', 4, {'loss': -4})
  losses = [r['loss'] for r in metrics.read_metrics(tmp_path)]
  assert losses == [1, 2, 2, 3, -4, -5, -6, -4]
  assert _steps(tmp_path) == [1, 2, 3, 4, 5, 6]
  assert _steps(tmp_path, 'eval') == [2, 4]


def test_a_damaged_line_is_dropped_with_a_warning(tmp_path, capsys):
  (tmp_path / metrics.FILE).write_text(
    '{"kind": "train", "step": 1}\n\0\0\0\n{"kind": "train", "step": 2}\n'
  )
  with metrics.MetricWriter(tmp_path, 2):
    assert 'line 2 is not a record' in capsys.readouterr().err
  assert _steps(tmp_path) == [1, 2]
  assert capsys.readouterr().err == ''


def test_a_folder_that_cannot_be_written(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(errors.UserError, match='cannot be written'):
    metrics.MetricWriter(tmp_path / 'file', 0)


def test_flushed_records_in_a_bucket_survive_a_kill(small_parts, bucket):
  writer = metrics.MetricWriter(bucket, -1, tracked=['tensorboard'])
  _write(writer, range(7))
  writer.flush()
  _write(writer, [7])  # Killed here.
  assert _steps(bucket) == list(range(7))
  with metrics.MetricWriter(bucket, 5, tracked=['tensorboard']) as writer:
    assert [r['step'] for r in writer.dropped] == [6]
    _write(writer, [6, 7, 8])
  assert _steps(bucket) == list(range(9))
  events = paths.at(bucket) / trackers.EVENTS
  assert len(list(events.glob('events.out.tfevents.*'))) >= 2


def test_records_duplicated_by_a_kill_count_once(small_parts, bucket):
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
