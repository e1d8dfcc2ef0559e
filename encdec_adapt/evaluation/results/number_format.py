"""Grouping of runs by their names, and formats of numbers in a report."""

from collections.abc import Mapping, Sequence
import re
import statistics
from typing import Any

from encdec_adapt.models import architecture

Runs = Mapping[str, Mapping[str, Any]]

# Runs of a learning-rate sweep are named `<model>_lr_<rate>`, repetitions
# with another seed `<model>_seed<n>`.
_SWEEP = re.compile(r'(.+)_lr_[^_]+')
_SEED = re.compile(r'(.+)_seed\d+')


def model_of(name: str) -> str:
  """Returns the model of which a run is a seed or a learning rate."""
  for pattern in (_SWEEP, _SEED):
    if match := pattern.fullmatch(name):
      return match[1]
  return name


def is_sweep(name: str) -> bool:
  """Returns whether a run belongs to a learning-rate sweep."""
  return _SWEEP.fullmatch(name) is not None


def seeds(runs: Runs, model: str) -> list[str]:
  """Returns the runs of a model outside its sweep, the plain name first."""
  return sorted(
    name for name in runs if not is_sweep(name) and model_of(name) == model
  )


def seed_names(runs: Runs, model: str) -> list[str]:
  """Returns what the names in `seeds` add to the model's: '', '_seed1'."""
  return [name.removeprefix(model) for name in seeds(runs, model)]


def models(runs: Runs) -> list[str]:
  """Returns the models in the order of their first run, without sweeps."""
  return list(dict.fromkeys(model_of(n) for n in runs if not is_sweep(n)))


def has_encoder(run: Mapping[str, Any]) -> bool:
  """Returns whether the model of a run is an encoder-decoder."""
  return architecture.BY_NAME[run['kind']].encodes_prompt


def loss(value: float | None) -> str:
  """Formats a loss in nats, or a dash for None."""
  return '-' if value is None else f'{value:.3f}'


def values(losses: Sequence[float]) -> str:
  """Formats one loss, or the mean of several with their range."""
  if len(losses) == 1:
    return loss(losses[0])
  return (
    f'{statistics.fmean(losses):.3f} (mean of {len(losses)} seeds,'
    f' {min(losses):.3f} to {max(losses):.3f})'
  )


def paired_interval(
  first: Sequence[float], second: Sequence[float]
) -> tuple[float, float]:
  """Returns the 95 % interval of the mean of first - second.

  Args:
    first: values of at least two seeds.
    second: values of the same seeds, in the same order.

  Returns:
    The bounds of Student's t interval.
  """
  from scipy import stats  # jax depends on it; importing it takes a second.

  differences = [a - b for a, b in zip(first, second, strict=True)]
  mean = statistics.fmean(differences)
  error = statistics.stdev(differences) / len(differences) ** 0.5
  half = float(stats.t.ppf(0.975, len(differences) - 1)) * error
  return mean - half, mean + half


def count(value: float) -> str:
  """Formats a count with three digits, such as '1.23 M'."""
  for size, unit in ((1e9, ' G'), (1e6, ' M'), (1e3, ' k')):
    if abs(value) >= size * 0.9995:
      return f'{value / size:#.3g}'.rstrip('.') + unit
  return f'{value:.0f}'
