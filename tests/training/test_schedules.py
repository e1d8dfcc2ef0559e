"""Learning rates at points that can be worked out by hand."""

import pytest

from encdec_adapt.training import schedules


def _rates(config, steps, points):
  schedule = schedules.make_schedule(config, steps)
  return [float(schedule(step, count)) for step, count in points]


@pytest.mark.parametrize(
  'kind, expected',
  [
    # Warm-up of 2 steps, 10 in all: the decay spans steps 2 to 10.
    ('constant', [0.5, 1.0, 1.0, 1.0, 1.0]),
    ('linear', [0.5, 1.0, 1.0, 0.55, 0.1]),
    ('cosine', [0.5, 1.0, 1.0, 0.55, 0.1]),
  ],
)
def test_decay(kind, expected):
  config = schedules.ScheduleConfig(kind, 1.0, 2, end_fraction=0.1)
  points = [(0, 0), (1, 1), (2, 2), (6, 6), (10, 10)]
  assert _rates(config, 10, points) == pytest.approx(expected)


def test_rsqrt_is_flat_and_then_falls_with_the_root():
  config = schedules.ScheduleConfig('rsqrt', 0.01, 0, rsqrt_steps=100)
  assert _rates(
    config, 1000, [(0, 0), (100, 100), (400, 400)]
  ) == pytest.approx([0.01, 0.01, 0.005])


def test_warmup_goes_by_the_groups_count_and_decay_by_the_step():
  config = schedules.ScheduleConfig('linear', 1.0, 4, end_fraction=0.0)
  # Thawed at step 14: first update, halfway through the decay.
  assert _rates(config, 24, [(14, 0)]) == pytest.approx([0.25 * 0.5])


@pytest.mark.parametrize('steps, warmup', [(0, 11), (10, 1), (11, 11)])
def test_a_warmup_longer_than_the_job_is_shortened(steps, warmup):
  assert schedules.ScheduleConfig('cosine', 1.0, 11).warmup(steps) == warmup
