"""Transforms of source leaves for the new model.

Each transform maps an array to an array, in NumPy or JAX. Axes are counted from
the end, so that stacked layers (a leading `layers` axis) are transformed at
once.
"""

import dataclasses
import types
from typing import Any

Array = Any


@dataclasses.dataclass(frozen=True)
class RepeatHeads:
  """Repeats each key/value head.

  Query head i uses key/value head i // (N / K), so attention with repeated
  heads computes the same function.

  Attributes:
    times: copies of each head, at least 2.
  """

  times: int

  def apply(self, array: Array, xp: types.ModuleType) -> Array:
    """Repeats the heads of a kernel [.., D, K, H] or a bias [.., K, H]."""
    return xp.repeat(array, self.times, axis=-2)

  def describe(self) -> str:
    """Describes the transform for the report."""
    return f'each key/value head {self.times} times'


@dataclasses.dataclass(frozen=True)
class FitTable:
  """Resizes a token table to another vocabulary size and padding.

  A new token gets the mean of the source's rows (Hewitt 2021, "Initializing New
  Word Embeddings for Pretrained Language Models"): its logit is their mean
  logit, which bounds the change of predictions.

  Attributes:
    tokens: vocabulary size of the source.
    vocabulary: vocabulary size of the target, at least `tokens`.
    source_rows: rows of the source's table, padding included.
    rows: rows of the target's table, padding included.
  """

  tokens: int
  vocabulary: int
  source_rows: int
  rows: int

  def apply(self, array: Array, xp: types.ModuleType) -> Array:
    """Resizes a table [V, D], or a bias of logits [V]."""
    new = self.vocabulary - self.tokens
    if not new:
      # Only padding changes: keep the stored rows and dtype.
      table = array[: self.rows]
      others = [(0, 0)] * (table.ndim - 1)
      return xp.pad(table, [(0, self.rows - table.shape[0]), *others])
    # Remove padding first, as it would bias the mean towards zero.
    table = array[: self.tokens]
    # bf16 cannot accumulate the rows of a vocabulary.
    mean = xp.mean(table, axis=0, keepdims=True, dtype=xp.float32)
    padding = self.rows - self.vocabulary
    padding = xp.zeros((padding, *mean.shape[1:]), xp.float32)
    return xp.concatenate([table, xp.repeat(mean, new, axis=0), padding])

  def describe(self) -> str:
    """Describes the transform for the report."""
    new = self.vocabulary - self.tokens
    if new:
      return f'{new} new tokens, the mean of the {self.tokens}'
    more = self.rows - self.source_rows
    return f'{abs(more)} padding rows {"added" if more > 0 else "dropped"}'


@dataclasses.dataclass(frozen=True)
class TakeRow:
  """Extracts the embedding of a token from a table.

  Attributes:
    token: token id.
    scale: the model's scale of embeddings.
  """

  token: int
  scale: float

  def apply(self, array: Array, xp: types.ModuleType) -> Array:
    """Maps a table [V, D] to a vector [D]."""
    # The model scales the table's rows, but not this vector. In fp32, so that
    # only the cast to the stored dtype rounds.
    return array[self.token].astype(xp.float32) * xp.float32(self.scale)

  def describe(self) -> str:
    """Describes the transform for the report."""
    return f'row {self.token} times {self.scale:.6g}'


Transform = RepeatHeads | FitTable | TakeRow
