"""Intervals of steps, as keys of the configuration state them.

0 is off, a number below 1 a share of the steps of the job, and from 1 on it is
a number of steps. This module must not import anything of the package.
"""

import math


def problem(value: float, above: float | None = None) -> str:
  """Returns the error in an interval, or '' if it is right.

  Args:
    value: the interval, a finite number.
    above: 0 where it cannot be off, else None.
  """
  lowest = 0 if above is None else 1
  if 0 < value < 1 or value == math.floor(value) >= lowest:
    return ''
  off = '0, ' if above is None else ''
  return f'it must be {off}a share of the steps below 1, or a number of steps'


def steps(value: float, total: int, multiple: int = 1) -> int:
  """Returns the steps between two runs; 0 if there are none.

  Args:
    value: the interval.
    total: steps of the job; 0 while they are open.
    multiple: a share is rounded down to a multiple of this, but above 0.
  """
  if value >= 1 or not value:
    return int(value)
  # A share such as 0.29 of 100 is a little less than 29.
  return max(1, int(value * total + 1e-6) // multiple) * multiple
