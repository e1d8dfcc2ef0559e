"""Special token ids that frame the rows of a batch, by side.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class SideIds:
  """Special ids of a vocabulary; several roles may share an id.

  Attributes:
    pad: padding; masked by weights and segments.
    eos: ends a document.
    bos: starts a segment: the decoder start token.
    sentinels: mark masked spans; empty unless the vocabulary is open.
    modes: mode tokens of UL2; likewise.
    ends_with_eos: T5's framing: an encoder reads `p EOS` instead of `BOS p`,
      and targets of pairs end with EOS unless truncated.
    opening: ids before such inputs and targets: the `<s>` of CodeT5 and BART.
    forced: token that decoders write first, whatever they predict (BART's
      `<s>`, the language of mBART); targets open with it. None for no such.
    closing: ids after the EOS of such inputs: the language of mBART cc25.
    omits_bos: whether a decoder reads `p` instead of `BOS p`, and BOS only
      without inputs (GPT-2, Qwen).
  """

  pad: int
  eos: int
  bos: int
  sentinels: tuple[int, ...] = dataclasses.field(default=(), compare=False)
  modes: tuple[int, ...] = dataclasses.field(default=(), compare=False)
  ends_with_eos: bool = False
  opening: tuple[int, ...] = ()
  forced: int | None = None
  closing: tuple[int, ...] = ()
  omits_bos: bool = False

  @property
  def frame_size(self) -> int:
    """Number of framing ids around an encoder's inputs."""
    return len(self.opening) + 1 + len(self.closing)

  @property
  def target_opening(self) -> tuple[int, ...]:
    """Ids before targets."""
    return self.opening if self.forced is None else (self.forced,)

  def edges(self, side: str) -> tuple[list[int], list[int]]:
    """Returns the framing ids before and after a stack's inputs."""
    if self.ends_with_eos and side == 'encoder':
      return [*self.opening], [self.eos, *self.closing]
    return [] if self.omits_bos and side == 'decoder' else [self.bos], []

  def frame(self, inputs: Iterable[int], side: str) -> list[int]:
    """Returns framed inputs of a stack.

    Args:
      inputs: ids [m] without framing.
      side: 'encoder' or 'decoder', the stack.
    """
    head, tail = self.edges(side)
    return [*head, *map(int, inputs), *tail] or [self.bos]

  def unframe(self, ids: Sequence[int], side: str) -> Sequence[int]:
    """Removes the ids that `frame` adds to inputs, if they are there."""
    # A decoder's ids may end with the EOS of an earlier text, which stays.
    head, tail = self.edges(side)
    ids = ids[len(head) :] if [*ids[: len(head)]] == head else ids
    end = len(ids) - len(tail)
    return ids[:end] if [*ids[end:]] == tail else ids


@dataclasses.dataclass(frozen=True)
class Framing:
  """Special ids that frame rows, by side.

  Attributes:
    encoder: ids of the encoder's vocabulary.
    decoder: ids of the decoder's vocabulary, shared by a teacher.
  """

  encoder: SideIds
  decoder: SideIds

  @classmethod
  def from_description(cls, described: Mapping[str, Any]) -> 'Framing':
    """Parses a description from `vocabulary_pair.Opened.describe`."""
    roles = 'pad', 'eos', 'bos'
    sides = {
      side: SideIds(
        *(tokens['special_tokens'][role]['id'] for role in roles),
        # Earlier descriptions lack these fields and this framing.
        ends_with_eos=tokens.get('ends_with_eos', False),
        opening=tuple(tokens.get('opening', ())),
        forced=tokens.get('forced'),
        closing=tuple(tokens.get('closing', ())),
        omits_bos=tokens.get('omits_bos', False),
      )
      for side, tokens in described.items()
    }
    return cls(**sides)
