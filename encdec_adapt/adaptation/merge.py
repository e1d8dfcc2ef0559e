"""Weighted averages of the parameters of models of one shape."""

from collections.abc import Sequence

import numpy as np

from encdec_adapt.cli import errors


def check_weights(weights: Sequence[float], models: int) -> None:
  """Checks that there is a weight for each model and that they sum to 1.

  Raises:
    UserError: names the numbers or the sum.
  """
  if len(weights) != models:
    raise errors.UserError(
      f'{len(weights)} weights are given for {models} models; give one each.'
    )
  if not abs(sum(weights) - 1) < 1e-6:
    raise errors.UserError(
      f'the weights sum to {sum(weights):g}; an average needs weights that sum'
      ' to 1.'
    )


def average(
  arrays: Sequence[np.ndarray], weights: Sequence[float]
) -> np.ndarray:
  """Returns the weighted sum of arrays of one shape, in float32."""
  total = np.zeros(arrays[0].shape, np.float32)
  for array, weight in zip(arrays, weights, strict=True):
    total += np.float32(weight) * np.asarray(array, np.float32)
  return total
