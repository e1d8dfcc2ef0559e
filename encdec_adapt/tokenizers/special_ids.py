"""Special token ids that frame the rows of a batch, by side.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class SideIds:
  """Special ids of a vocabulary; some have one id for several of these.

  Attributes:
    pad: fills rows up; weights and segments mask it.
    eos: ends a document.
    bos: starts a segment.
  """

  pad: int
  eos: int
  bos: int


@dataclasses.dataclass(frozen=True)
class Framing:
  """Special ids that rows are framed with, by side.

  Attributes:
    encoder: of the encoder's vocabulary.
    decoder: of the decoder's, which a teacher reads too.
  """

  encoder: SideIds
  decoder: SideIds

  @classmethod
  def from_description(cls, described: Mapping[str, Any]) -> 'Framing':
    """From what `vocabularies.Opened.describe` gives."""
    roles = [field.name for field in dataclasses.fields(SideIds)]
    sides = {
      side: SideIds(*(one['special_tokens'][role]['id'] for role in roles))
      for side, one in described.items()
    }
    return cls(**sides)
