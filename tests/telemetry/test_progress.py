"""Rates and times as they are shown, on a clock of the test."""

import pytest

from encdec_adapt.telemetry import progress


def test_rate_is_of_recent_steps(clock):
  line = progress.Progress(
    1000, flops_per_step=50.0, peak=400.0, window=2, clock=clock
  )
  for step, seconds, tokens in ((11, 60, 5), (12, 1, 100), (13, 1, 300)):
    clock.now += seconds
    line.update(step, tokens)
  assert line.rates() == pytest.approx({'tokens_per_second': 200, 'mfu': 0.125})
  assert line.line('loss 2.5000', 'grad_norm 0.125') == (
    'step   13/1000  loss 2.5000  grad_norm 0.125  200 tok/s  12% of peak'
    '  16m27s left'
  )


def test_time_away_is_left_out(clock):
  line = progress.Progress(10, clock=clock)
  line.update(1, 10)
  clock.now += 500
  line.pause()
  clock.now += 2
  line.update(2, 10)
  assert line.rates() == pytest.approx({'tokens_per_second': 5})
  assert line.line('kl 1') == 'step  2/10  kl 1  5 tok/s  16s left'


def test_time_left_is_without_the_start_and_the_first_units(clock, capsys):
  show = progress.CountProgress('score', clock=clock)
  clock.now += 300  # The start, and compilation.
  show(8, 80)
  clock.now += 10
  show(16, 80)
  assert capsys.readouterr().out.splitlines() == [
    'score: 8 of 80 examples',
    'score: 16 of 80 examples  0.8/s  1m20s left',
  ]


def test_time_left_of_units_that_end_together_is_that_of_a_round(clock):
  left = progress.TimeLeft(2, clock=clock)
  shown = []
  for count, seconds in ((1, 60), (2, 0), (3, 10), (4, 0), (5, 10)):
    clock.now += seconds
    shown.append(left(count, 8))
  assert shown == ['', '', '', '  0.2/s  20s left', '  0.15/s  20s left']
