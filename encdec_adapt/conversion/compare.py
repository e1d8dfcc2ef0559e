"""Compares two models: their parameters and their predictions."""

from collections.abc import Iterator
import dataclasses
import json
import os

import jax
import numpy as np

from encdec_adapt.cli import errors
from encdec_adapt.conversion import loaded_model, stored_model
from encdec_adapt.files import paths as paths_lib
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
    self._arrays = {array.path: array for array in stored.arrays()}
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


@dataclasses.dataclass(frozen=True)
class Rows:
  """Tokens that two models are compared on, padded on the right.

  Attributes:
    decoder: tokens fed to the decoder, [B, T].
    decoder_mask: True at tokens, [B, T].
    encoder: tokens fed to the encoder, [B, S]; None for decoder-only models.
    encoder_mask: True at tokens, [B, S].
  """

  decoder: np.ndarray
  decoder_mask: np.ndarray
  encoder: np.ndarray | None = None
  encoder_mask: np.ndarray | None = None


def random_rows(
  model: model_config.ModelConfig, *, rows: int, length: int, seed: int
) -> Rows:
  """Draws rows of random tokens.

  Args:
    model: config with the vocabulary sizes.
    rows: B.
    length: S and T.
    seed: seed of the draws.
  """
  rng = np.random.default_rng(seed)

  def draw(stack: model_config.StackConfig) -> np.ndarray:
    low = min(_FIRST_DRAWN, stack.vocab_size - 1)
    return rng.integers(low, stack.vocab_size, (rows, length), np.int32)

  real = np.ones((rows, length), bool)
  tokens = {name: draw(stack) for name, stack in model.stacks.items()}
  if 'encoder' not in tokens:
    return Rows(tokens['decoder'], real)
  return Rows(tokens['decoder'], real, tokens['encoder'], real)


def read_rows(path: str, model: model_config.ModelConfig) -> Rows:
  """Reads rows from a file with one JSON value per line.

  Args:
    path: file; each line is a list of ids, or for an encoder-decoder an
      object with the lists `encoder` and `decoder`.
    model: config with the vocabulary sizes.

  Raises:
    UserError: the file cannot be read, or a line has no such ids.
  """
  try:
    lines = paths_lib.at(path).read_text(encoding='utf-8').splitlines()
  except (OSError, UnicodeDecodeError) as error:
    raise errors.UserError(f'--tokens={path} cannot be read ({error}).') from (
      error
    )
  rows = [
    _read_row(line, f'--tokens={path}, line {number}', model)
    for number, line in enumerate(lines, 1)
    if line.strip()
  ]
  if not rows:
    raise errors.UserError(f'--tokens={path} has no line with tokens.')
  sides = {name: _padded([row[name] for row in rows]) for name in model.stacks}
  return Rows(*sides['decoder'], *sides.get('encoder', ()))


def _read_row(
  line: str, where: str, model: model_config.ModelConfig
) -> dict[str, list[int]]:
  try:
    row = json.loads(line)
  except ValueError as error:
    raise errors.UserError(f'{where} is not JSON ({error}).') from error
  if len(model.stacks) == 1 and isinstance(row, list):
    row = {'decoder': row}
  if not isinstance(row, dict) or row.keys() != set(model.stacks):
    raise errors.UserError(
      f'{where}: write a list of ids for a decoder-only model, and an object'
      ' with the lists "encoder" and "decoder" for an encoder-decoder.'
    )
  for name, ids in row.items():
    size = model.stacks[name].vocab_size
    bad = [
      i
      for i in (ids if isinstance(ids, list) else [ids])
      if type(i) is not int or not 0 <= i < size
    ]
    if not ids or bad:
      raise errors.UserError(
        f'{where}: {bad[0] if bad else ids!r} of {name} is not an id below'
        f' {size}.'
      )
  return row


def _padded(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
  longest = max(map(len, rows))
  tokens = np.zeros((len(rows), longest), np.int32)
  mask = np.zeros(tokens.shape, bool)
  for i, row in enumerate(rows):
    tokens[i, : len(row)] = row
    mask[i, : len(row)] = True
  return tokens, mask


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
  """Refuses two models with other stacks or vocabulary sizes.

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
  rows: Rows,
  *,
  encoder_window: str | None = None,
) -> Agreement:
  """Compares the logits of two models, computed in float32.

  Args:
    paths: paths of the models.
    rows: tokens for both.
    encoder_window: window rule for both, see `stored_model.with_window`; None
      for the stored rules.
  """
  logits = []
  for path in paths:
    model = loaded_model.load(path, encoder_window=encoder_window)
    with jax.default_matmul_precision('highest'):
      found = model.logits(
        rows.decoder, rows.encoder, rows.encoder_mask, rows.decoder_mask
      )
    logits.append(np.asarray(found)[rows.decoder_mask])
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
