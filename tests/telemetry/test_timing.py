"""Seconds by part of a step, and the starts of a job."""

import json

import pytest

from encdec_adapt.telemetry import timing


def test_time_is_split(clock):
  split = timing.TimeSplit(clock)
  for name, seconds in (('data', 2), ('dispatch', 1), ('data', 3)):
    with split.spent(name):
      clock.now += seconds
  with pytest.raises(KeyError), split.spent('save'):
    clock.now += 7
    raise KeyError
  clock.now += 4
  expected = dict.fromkeys(timing.PARTS, 0) | dict(data=5, dispatch=1, save=7)
  expected['total'] = 17
  assert split.take() == {f'seconds/{k}': v for k, v in expected.items()}
  assert set(split.take().values()) == {0.0}


def test_goodput_over_two_starts(tmp_path, clock):
  first = timing.Starts(tmp_path, 0, clock=clock)
  clock.now += 50
  lost = {'lost_steps': 0, 'lost_seconds': 0}
  assert first.goodput(40) == {'goodput': 0.8, 'starts': 1, **lost}
  times = [{'step': 5, 'seconds/total': 4.0}, {'step': 6, 'seconds/total': 6.0}]
  second = timing.Starts(tmp_path, 4, times, clock=clock)
  clock.now += 50
  lost = {'lost_steps': 2, 'lost_seconds': 10.0}
  assert second.goodput(30) == {'goodput': 0.3, 'starts': 2, **lost}
  lines = (tmp_path / timing.STARTS).read_text().splitlines()
  assert [json.loads(line)['step'] for line in lines] == [0, 4]
