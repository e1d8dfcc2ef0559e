"""What the tests of both vocabulary losses share: meshes and comparison."""

import itertools

import jax
import numpy as np
import pytest

from encdec_adapt.ops import partition
from tests.ops import attention_cases

# Every mesh of eight devices; some in the default run.
DEFAULT = [(1, 8, 1, 1), (2, 2, 1, 2), (1, 2, 2, 2)]
MESHES = [
  pytest.param(shape, marks=[] if shape in DEFAULT else pytest.mark.slow)
  for shape in itertools.product((1, 2, 4, 8), repeat=4)
  if np.prod(shape) == 8
]
RULES = {'batch': ('replica', 'fsdp'), 'length': 'sequence'}


def assert_same(actual, expected, *, rtol=2e-5, atol=3e-5):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(
      np.asarray(a, np.float32), np.asarray(b, np.float32), rtol, atol
    ),
    actual,
    expected,
  )


def on_mesh(shape, function, **rules):
  """Jits `function` with a partition of this mesh active."""
  mesh = attention_cases.make_mesh(shape)

  @jax.jit
  def run(*arguments):
    with partition.use(mesh, {**RULES, **rules}):
      return function(*arguments)

  return run
