"""Two models side by side: their parameters, and what they predict."""

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

_FIRST_DRAWN = 4  # Ids below are special in most vocabularies.


@dataclasses.dataclass(frozen=True)
class LeafDifference:
  """One parameter of two models.

  Attributes:
    leaf: its name (`models.layer_leaves`).
    shapes: in either model; None where it has no such parameter. Padding
      rows of tables are not looked at.
    dtypes: as stored.
    largest: largest absolute difference, None where shapes differ.
  """

  leaf: str
  shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
  dtypes: tuple[str, str]
  largest: float | None

  @property
  def same(self) -> bool:
    """Whether all values are equal."""
    return self.largest == 0

  def line(self) -> str:
    """The leaf as a line of text."""
    shapes, dtypes = (
      ' -> '.join(dict.fromkeys(map(str, pair)))
      for pair in (
        ['absent' if s is None else list(s) for s in self.shapes],
        [d for d in self.dtypes if d],
      )
    )
    if self.largest is None:
      value = 'not comparable'
    else:
      value = 'equal' if self.same else f'{self.largest:.3e}'
    return f'{self.leaf:<58} {shapes:<20} {dtypes:<12} {value}'


def diff(
  one: stored_model.StoredModel, other: stored_model.StoredModel
) -> Iterator[LeafDifference]:
  """Compares two models parameter by parameter, layer by layer.

  Args:
    one: the first model.
    other: the second; may be another one, stored in another pattern.

  Yields:
    Every parameter that either has.
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
  """A model's parameters by layer."""

  def __init__(self, source: stored_model.StoredModel):
    self.leaves = layer_leaves.leaves_of(source.model)
    self._arrays = {array.path: array for array in source.arrays()}
    self._stacks = source.model.stacks

  def read(self, leaf: str) -> np.ndarray | None:
    """A parameter, without padding rows; None if there is none."""
    if leaf not in self.leaves:
      return None
    where = self.leaves[leaf]
    array = self._arrays[where.path]
    value = np.asarray(array) if where.index is None else array[where.index]
    if leaf.endswith('/table'):
      value = value[: self._stacks[leaf.split('/')[0]].vocab_size]
    return value


@dataclasses.dataclass(frozen=True)
class Rows:
  """Tokens that two models are compared on, padded on the right.

  Attributes:
    decoder: [B, T], as fed to the decoder.
    decoder_mask: True at tokens.
    encoder: [B, S], None for decoder-only models.
    encoder_mask: True at tokens.
  """

  decoder: np.ndarray
  decoder_mask: np.ndarray
  encoder: np.ndarray | None = None
  encoder_mask: np.ndarray | None = None


def random_rows(
  model: model_config.ModelConfig, *, rows: int, length: int, seed: int
) -> Rows:
  """Rows of random tokens.

  Args:
    model: whose vocabularies they are of.
    rows: B.
    length: S and T.
    seed: of the draws.
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
  """Rows of a file: one JSON value per line.

  Args:
    path: each line is a list of ids, or for an encoder-decoder an object
      with the lists `encoder` and `decoder`.
    model: whose vocabularies they are of.

  Raises:
    UserError: the file cannot be read, or a line is not what it should be.
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
    if not isinstance(ids, list) or not ids:
      raise errors.UserError(f'{where}: {name} is no list with ids.')
    for token in ids:
      if type(token) is not int or not 0 <= token < size:
        raise errors.UserError(
          f'{where}: {token!r} of {name} is no id below {size}.'
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
  """How alike two models predict.

  Attributes:
    tokens: predictions compared.
    largest: largest absolute difference of a logit.
    kl: mean over predictions of KL(one || other), in nats.
    top1: share of predictions whose likeliest token is the same.
  """

  tokens: int
  largest: float
  kl: float
  top1: float


def require_alike(
  one: stored_model.StoredModel, other: stored_model.StoredModel
) -> None:
  """Refuses two models that cannot read the same tokens.

  Raises:
    UserError: says what differs.
  """
  sizes = [
    {name: stack.vocab_size for name, stack in source.model.stacks.items()}
    for source in (one, other)
  ]
  if sizes[0] != sizes[1]:
    raise errors.UserError(
      f'{one.path} reads {_describe(sizes[0])}, {other.path}'
      f' {_describe(sizes[1])}: they have no tokens in common to be compared'
      ' on.'
    )


def verify(
  paths: tuple[str | os.PathLike[str], str | os.PathLike[str]],
  rows: Rows,
  *,
  encoder_window: str | None = None,
) -> Agreement:
  """Compares the logits of two models, computed in float32.

  Args:
    paths: of the models.
    rows: tokens that both read.
    encoder_window: of both, see `source.with_window`; None for the rule of
      each.
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
  """In float64: a KL near zero is a difference of almost equal numbers."""
  logits = logits.astype(np.float64)
  logits -= logits.max(-1, keepdims=True)
  return logits - np.log(np.sum(np.exp(logits), -1, keepdims=True))


def _describe(sizes: dict[str, int]) -> str:
  return ' and '.join(f'{size} {name} tokens' for name, size in sizes.items())
