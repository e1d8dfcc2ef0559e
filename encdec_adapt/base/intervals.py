"""Intervals of steps in configuration keys.

0 is off, a number below 1 is a fraction of the job's steps, and a number from 1
on is a number of steps. This module must not import anything of the package.
"""

import math


def problem(value: float, above: float | None = None) -> str:
  """Returns the error in an interval, or '' if it is valid.

  Args:
    value: the interval, a finite number.
    above: 0 if the interval cannot be off, otherwise None.
  """
  lowest = 0 if above is None else 1
  if 0 < value < 1 or value == math.floor(value) >= lowest:
    return ''
  off = '0, ' if above is None else ''
  return f'it must be {off}a share of the steps below 1, or a number of steps'


def steps(value: float, total: int, multiple: int = 1) -> int:
  """Returns an interval in steps; 0 for off.

  Args:
    value: the interval.
    total: steps of the job; 0 if still unknown.
    multiple: a fraction is rounded down to a multiple of this, at least 1.
  """
  if value >= 1 or not value:
    return int(value)
  # 0.29 * 100 is slightly below 29.
  return max(1, int(value * total + 1e-6) // multiple) * multiple
