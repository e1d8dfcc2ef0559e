"""Intervals of steps, as keys of the configuration state them.

0 is off, a number below 1 a share of the steps of the job, and from 1 on it is
a number of steps. This module must not import anything of the package.
"""

import math

PROBLEM = (
  'it must be 0, a share of the steps below 1, or a whole number of them'
)


def problem(value: float) -> str:
  """Returns the error in an interval, or '' if it is right."""
  is_share = 0 <= value < 1
  return '' if is_share or value == math.floor(value) > 0 else PROBLEM


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
