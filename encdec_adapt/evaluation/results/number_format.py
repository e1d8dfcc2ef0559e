"""Formats of numbers in tables and findings: losses, means of seeds, counts.

This module imports nothing from the package.
"""

from collections.abc import Sequence
import statistics


def loss(value: float | None) -> str:
  """Formats a loss in nats; a dash for None."""
  return '-' if value is None else f'{value:.3f}'


def values(losses: Sequence[float]) -> str:
  """Formats a loss, or the mean and range of several seeds' losses."""
  if len(losses) == 1:
    return loss(losses[0])
  return (
    f'{statistics.fmean(losses):.3f} (mean of {len(losses)} seeds,'
    f' {min(losses):.3f} to {max(losses):.3f})'
  )


def count(value: float) -> str:
  """Formats a count with three digits, such as '1.23 M'."""
  for size, unit in ((1e9, ' G'), (1e6, ' M'), (1e3, ' k')):
    # 999.5 k and more become '1.00 M'; as thousands, they would round to
    # '1.00e+03 k'.
    if abs(value) >= size * 0.9995:
      # '#' keeps trailing zeros ('1.00') and the point of '123.'.
      return f'{value / size:#.3g}'.rstrip('.') + unit
  return f'{value:.0f}'
