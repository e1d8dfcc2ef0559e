"""Special token ids that frame the rows of a batch, by side.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class SideIds:
  """Special ids of a vocabulary; several roles may share an id.

  Attributes:
    pad: fills rows; masked by weights and segments.
    eos: ends a document.
    bos: starts a segment.
    sentinels: stand for hidden spans; known where the vocabulary is open.
    modes: mode tokens of UL2; likewise.
  """

  pad: int
  eos: int
  bos: int
  sentinels: tuple[int, ...] = dataclasses.field(default=(), compare=False)
  modes: tuple[int, ...] = dataclasses.field(default=(), compare=False)


@dataclasses.dataclass(frozen=True)
class Framing:
  """Special ids that frame rows, by side.

  Attributes:
    encoder: ids of the encoder's vocabulary.
    decoder: ids of the decoder's vocabulary, which a teacher also reads.
  """

  encoder: SideIds
  decoder: SideIds

  @classmethod
  def from_description(cls, described: Mapping[str, Any]) -> 'Framing':
    """Parses a description by `vocabularies.Opened.describe`."""
    roles = 'pad', 'eos', 'bos'
    sides = {
      side: SideIds(*(tokens['special_tokens'][role]['id'] for role in roles))
      for side, tokens in described.items()
    }
    return cls(**sides)
