"""What is done to a leaf of a source on its way into the new model.

Each step is a function of one array, of NumPy or of JAX alike. Axes are
counted from the end, so that an array with a leading `layers` axis is changed
at once.
"""

import dataclasses
import types
from typing import Any

Array = Any


@dataclasses.dataclass(frozen=True)
class RepeatHeads:
  """Each key/value head several times in a row.

  Query head i reads key/value head i // (N / K), so that the attention with
  more heads computes what it did with fewer.

  Attributes:
    times: how often each head is there, at least 2.
  """

  times: int

  def apply(self, array: Array, xp: types.ModuleType) -> Array:
    """Of a kernel [.., D, K, H] or a bias [.., K, H]."""
    return xp.repeat(array, self.times, axis=-2)

  def describe(self) -> str:
    """What was done, as a phrase."""
    return f'each key/value head {self.times} times'


@dataclasses.dataclass(frozen=True)
class FitTable:
  """A token table with more tokens, and with other padding rows.

  A new token's row is the mean of the source's tokens' (Hewitt 2021,
  "Initializing New Word Embeddings for Pretrained Language Models"): its
  logit is the mean of theirs, which bounds how far predictions move.

  Attributes:
    tokens: of the source's vocabulary.
    vocabulary: tokens of the target's, at least as many.
    source_rows: rows of the source's table, padding included.
    rows: rows of the target's.
  """

  tokens: int
  vocabulary: int
  source_rows: int
  rows: int

  def apply(self, array: Array, xp: types.ModuleType) -> Array:
    """Of a table [V, D]."""
    new = self.vocabulary - self.tokens
    if not new:
      kept = array[: self.rows]
      return xp.pad(kept, [(0, self.rows - kept.shape[0]), (0, 0)])
    kept = array[: self.tokens]
    mean = xp.mean(kept, axis=0, keepdims=True, dtype=xp.float32)
    padding = xp.zeros((self.rows - self.vocabulary, mean.shape[1]), xp.float32)
    return xp.concatenate([kept, xp.repeat(mean, new, axis=0), padding])

  def describe(self) -> str:
    """What was done, as a phrase."""
    new = self.vocabulary - self.tokens
    if new:
      return f'{new} new tokens, the mean of the {self.tokens}'
    more = self.rows - self.source_rows
    return f'{abs(more)} padding rows {"added" if more > 0 else "dropped"}'


@dataclasses.dataclass(frozen=True)
class Row:
  """A row of a token table as the states that it becomes.

  Attributes:
    token: which.
    scale: what embeddings are multiplied by.
  """

  token: int
  scale: float

  def apply(self, array: Array, xp: types.ModuleType) -> Array:
    """Of a table [V, D]: a vector [D]."""
    return array[self.token].astype(xp.float32) * xp.float32(self.scale)

  def describe(self) -> str:
    """What was done, as a phrase."""
    return f'row {self.token} times {self.scale:.6g}'


Step = RepeatHeads | FitTable | Row
