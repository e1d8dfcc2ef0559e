"""Rates of a job in its log and records, on a clock of the test."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.telemetry import compute_cost, progress
from encdec_adapt.training import job_telemetry
from encdec_adapt.training.metrics import token_metrics
from encdec_adapt.training.sections import train_section
from tests.telemetry.conftest import clock  # noqa: F401  A fixture.


@pytest.mark.parametrize('start', [None, 40])  # A new job, and a resumed one.
def test_no_rate_before_the_second_step_of_a_program(
  tmp_path,
  clock,  # noqa: F811
  monkeypatch,
  capsys,
  start,
):
  """Steps 3 and 4 begin another phase, whose program is compiled."""
  monkeypatch.setattr(
    progress, 'Progress', functools.partial(progress.Progress, clock=clock)
  )
  first = start or 0
  telemetry = job_telemetry.JobTelemetry(
    str(tmp_path),
    train_section.TrainConfig(log_every=1),
    token_metrics.TargetTokens(),
    {},
    start,
    first + 4,
    compute_cost.Cost(),
    1e9,
  )
  values = dict.fromkeys(('loss', 'weight', 'gradient_norm'), 0.0)
  values |= {'tokens': 1000.0, 'sampled_tokens': 8.0}
  values = jax.tree.map(jnp.asarray, values | {'skipped_in_row': 0})
  with telemetry:
    for step, seconds in enumerate((90.0, 2.0, 90.0, 4.0), first + 1):
      if seconds > 60:
        clock.now += seconds
        telemetry.compiled()
        seconds = 0.1  # The device has run most of the step by now.
      clock.now += seconds
      telemetry.dispatched(step, values, np.arange(2), 2 * step)
      telemetry.read()
  lines = capsys.readouterr().out.splitlines()
  rates = [None, '500 tok/s', None, '250 tok/s']
  for line, rate in zip(lines, rates, strict=True):
    assert rate in line if rate else 'tok/s' not in line
    assert ('left' in line) == bool(rate) or line == lines[-1]
  records = map(json.loads, (tmp_path / 'metrics.jsonl').open())
  times = [record for record in records if record['kind'] == 'time']
  has_rate = [
    [key for key in record if '_per_second' in key] != [] for record in times
  ]
  assert has_rate == [False, True, False, True]
