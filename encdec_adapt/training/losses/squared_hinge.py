"""Squared hinge preference loss, the example of CONTRIBUTING."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from encdec_adapt.training.losses import preference


@dataclasses.dataclass(frozen=True)
class SquaredHinge(preference.Scaled):
  """Squared hinge on log-ratios, max(0, 1 - m)^2 (GPO, arXiv:2402.05749)."""

  name: ClassVar[str] = 'squared_hinge'

  def margin_loss(self, margins):
    return jnp.square(jax.nn.relu(1 - margins))
