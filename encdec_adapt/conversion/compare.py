"""Compares two models: their parameters and their predictions."""

from collections.abc import Iterator, Mapping
import dataclasses
import os

import jax
import numpy as np

from encdec_adapt.cli import errors
from encdec_adapt.conversion import loaded_model, stored_model
from encdec_adapt.models import layer_leaves, model_config

_FIRST_DRAWN = 4  # Lower ids are special in most vocabularies.


@dataclasses.dataclass(frozen=True)
class LeafDifference:
  """Difference of one parameter of two models.

  Attributes:
    leaf: name of the parameter (`models.layer_leaves`).
    shapes: shape in each model, without padding rows of tables; None where
      a model has no such parameter.
    dtypes: stored dtypes.
    largest: largest absolute difference, None where shapes differ.
  """

  leaf: str
  shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
  dtypes: tuple[str, str]
  largest: float | None

  def __str__(self) -> str:
    shapes, dtypes = (
      ' -> '.join(dict.fromkeys(map(str, pair)))
      for pair in (
        ['absent' if s is None else list(s) for s in self.shapes],
        [d for d in self.dtypes if d],
      )
    )
    value = {None: 'not comparable', 0: 'equal'}.get(
      self.largest, f'{self.largest or 0:.3e}'
    )
    return f'{self.leaf:<58} {shapes:<20} {dtypes:<12} {value}'


def diff(
  one: stored_model.StoredModel, other: stored_model.StoredModel
) -> Iterator[LeafDifference]:
  """Compares two models parameter by parameter, layer by layer.

  Args:
    one: the first model.
    other: the second; may have another config, stored in another pattern.

  Yields:
    The difference of every parameter that either has.
  """
  sides = [_Leaves(one), _Leaves(other)]
  for leaf in dict.fromkeys([*sides[0].leaves, *sides[1].leaves]):
    found = [side.read(leaf) for side in sides]
    shapes = tuple(None if a is None else a.shape for a in found)
    largest = None
    if None not in shapes and shapes[0] == shapes[1]:
      a, b = (np.asarray(array, np.float32) for array in found)
      largest = float(np.max(np.abs(a - b), initial=0.0))
    dtypes = tuple('' if a is None else str(a.dtype) for a in found)
    yield LeafDifference(leaf, shapes, dtypes, largest)


class _Leaves:
  """Parameters of a stored model by layer."""

  def __init__(self, stored: stored_model.StoredModel):
    self.leaves = layer_leaves.leaves_of(stored.model)
    self._arrays = stored.arrays()
    self._stacks = stored.model.stacks

  def read(self, name: str) -> np.ndarray | None:
    """Reads a parameter without padding rows; None if there is none."""
    if name not in self.leaves:
      return None
    leaf = self.leaves[name]
    array = self._arrays[leaf.path]
    value = np.asarray(array) if leaf.index is None else array[leaf.index]
    if name.endswith('/table'):
      value = value[: self._stacks[name.split('/')[0]].vocab_size]
    return value


def random_tokens(
  model: model_config.ModelConfig, *, rows: int, length: int, seed: int
) -> dict[str, np.ndarray]:
  """Draws random tokens [rows, length] for each stack of a model.

  Args:
    model: config with the vocabulary sizes.
    rows: number of rows.
    length: tokens of a row.
    seed: seed of the draws.
  """
  rng = np.random.default_rng(seed)
  return {
    name: rng.integers(
      min(_FIRST_DRAWN, stack.vocab_size - 1),
      stack.vocab_size,
      (rows, length),
      np.int32,
    )
    for name, stack in model.stacks.items()
  }


@dataclasses.dataclass(frozen=True)
class Agreement:
  """Agreement of two models' predictions.

  Attributes:
    tokens: number of predictions compared.
    largest: largest absolute difference of a logit.
    kl: mean over predictions of KL(one || other), in nats.
    top1: fraction of predictions with the same likeliest token.
  """

  tokens: int
  largest: float
  kl: float
  top1: float


def require_same_sizes(
  one: stored_model.StoredModel, other: stored_model.StoredModel
) -> None:
  """Raises an error if two models differ in stacks or vocabulary sizes.

  Raises:
    UserError: names the sizes.
  """
  sizes = [
    {name: stack.vocab_size for name, stack in stored.model.stacks.items()}
    for stored in (one, other)
  ]
  if sizes[0] != sizes[1]:
    raise errors.UserError(
      f'{one.path} and {other.path} have no tokens in common to be compared'
      f' on: their vocabulary sizes are {sizes[0]} and {sizes[1]}.'
    )


def verify(
  paths: tuple[str | os.PathLike[str], str | os.PathLike[str]],
  tokens: Mapping[str, np.ndarray],
  *,
  encoder_window: str | None = None,
) -> Agreement:
  """Compares the logits of two models, computed in float32.

  Args:
    paths: paths of the models.
    tokens: stack -> tokens [B, L] for both models.
    encoder_window: window rule for both, see `stored_model.with_window`; None
      for the stored rules.
  """
  logits = []
  for path in paths:
    model = loaded_model.load(path, encoder_window=encoder_window)
    with jax.default_matmul_precision('highest'):
      found = model.logits(tokens['decoder'], tokens.get('encoder'))
    logits.append(np.asarray(found).reshape(-1, found.shape[-1]))
    del model  # One model in memory at a time.
  one, other = logits
  p, q = map(_log_softmax, logits)
  return Agreement(
    tokens=len(one),
    largest=float(np.max(np.abs(one - other))),
    kl=float(np.mean(np.sum(np.exp(p) * (p - q), axis=-1))),
    top1=float(np.mean(one.argmax(-1) == other.argmax(-1))),
  )


def _log_softmax(logits: np.ndarray) -> np.ndarray:
  """Computes in float64: a KL near 0 is a difference of near numbers."""
  logits = logits.astype(np.float64)
  logits -= logits.max(-1, keepdims=True)
  return logits - np.log(np.sum(np.exp(logits), -1, keepdims=True))
