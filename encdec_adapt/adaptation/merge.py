"""Averages of checkpoints: one model from several of the same shape."""

from collections.abc import Sequence

import numpy as np

from encdec_adapt.cli import errors


def check_weights(weights: Sequence[float], models: int) -> None:
  """Refuses weights that are not an average.

  Raises:
    UserError: their number is not that of the models, or their sum not 1.
  """
  if len(weights) != models:
    raise errors.UserError(
      f'{len(weights)} weights are given for {models} models; give one each.'
    )
  total = sum(weights)
  if not abs(total - 1) < 1e-6:
    raise errors.UserError(
      f'the weights sum to {total:g}; an average needs weights that sum to 1.'
    )


def average(
  arrays: Sequence[np.ndarray], weights: Sequence[float]
) -> np.ndarray:
  """The weighted sum of arrays of one shape, in float32."""
  total = np.zeros(arrays[0].shape, np.float32)
  for array, weight in zip(arrays, weights, strict=True):
    total += np.float32(weight) * np.asarray(array, np.float32)
  return total
