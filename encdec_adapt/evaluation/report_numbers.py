"""How a report groups runs and writes numbers. Imports nothing of ours."""

from collections.abc import Mapping, Sequence
import math
import re
from typing import Any

Runs = Mapping[str, Mapping[str, Any]]

# Runs of a learning-rate sweep are named `<model>_lr_<rate>`, repetitions
# with another seed `<model>_seed<n>`.
_SWEEP = re.compile(r'(.+)_lr_[^_]+')
_SEED = re.compile(r'(.+)_seed\d+')


def model_of(name: str) -> str:
  """Name of the model that a run is a seed or a learning rate of."""
  for pattern in (_SWEEP, _SEED):
    if match := pattern.fullmatch(name):
      return match[1]
  return name


def is_sweep(name: str) -> bool:
  """Whether a run belongs to a learning-rate sweep."""
  return _SWEEP.fullmatch(name) is not None


def seeds(runs: Runs, model: str) -> list[str]:
  """Runs of a model that differ in their seed only, the plain name first."""
  return sorted(
    name for name in runs if not is_sweep(name) and model_of(name) == model
  )


def models(runs: Runs) -> list[str]:
  """Models in the order of their first run, sweeps left out."""
  return list(dict.fromkeys(model_of(n) for n in runs if not is_sweep(n)))


def has_encoder(run: Mapping[str, Any]) -> bool:
  """Whether a run is of an encoder-decoder."""
  return run['kind'] == 'encoder_decoder'


def loss(value: float | None) -> str:
  """A loss in nats; a dash where there is none."""
  return '-' if value is None else f'{value:.3f}'


def values(losses: Sequence[float]) -> str:
  """One loss, or the mean of several with their range."""
  if len(losses) == 1:
    return loss(losses[0])
  return (
    f'{mean(losses):.3f} (mean of {len(losses)} seeds, {min(losses):.3f} to'
    f' {max(losses):.3f})'
  )


def mean(losses: Sequence[float]) -> float:
  """Arithmetic mean."""
  return math.fsum(losses) / len(losses)


def count(value: float) -> str:
  """A number of things with three digits, such as '1.23 M'."""
  for size, unit in ((1e9, ' G'), (1e6, ' M'), (1e3, ' k')):
    if abs(value) >= size * 0.9995:
      return f'{value / size:#.3g}'.rstrip('.') + unit
  return f'{value:.0f}'


def scientific(value: float) -> str:
  """A large number as a mantissa of three digits and an exponent."""
  if not value:
    return '0'
  mantissa, exponent = f'{value:.2e}'.split('e')
  return f'{mantissa}e{int(exponent)}'
