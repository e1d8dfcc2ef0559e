"""Heads: outputs computed from the states of a stack.

| head        | `config.model.head.kind` | parameters               | reads   |
|-------------|--------------------------|--------------------------|---------|
| `Tokens`    | tokens                   | `head/table` if not tied | its own |
| `Labels`    | labels                   | `head/..`, its layer     | texts   |
| `Reward`    | reward                   | `head/table`             | pairs   |
| `Embedding` | embedding                | `embedding/..`           | texts   |

A head is a field of the decoder's stack; it defines its parameters, outputs and
architecture. The encoder of a pair has the base class `Head`, without
parameters and outputs. A single stack over whole texts reads them as an
encoder, whatever its attention; both stacks of a pair read texts to classify.

Data only: `layers` declares the parameters, `embedding_head` computes vectors.
"""

import dataclasses
from typing import ClassVar

from encdec_adapt.base import errors
from encdec_adapt.models import architecture as architectures

POOLINGS = ('mean', 'last', 'first')
_SECTION = 'config.model.head'


@dataclasses.dataclass(frozen=True)
class Head:
  """Base of all heads, and the absent head of an encoder.

  Attributes:
    kind: `config.model.head.kind`; '' for no head.
    module: module of its output table in the stack; '' for none.
    fresh: modules without weights in other heads; initialised newly.
    predicts_tokens: whether its outputs are tokens.
    models: supported values of `config.model.kind`.
  """

  kind: str = dataclasses.field(default='', init=False)
  module: ClassVar[str] = ''
  fresh: ClassVar[tuple[str, ...]] = ()
  predicts_tokens: ClassVar[bool] = False
  models: ClassVar[tuple[str, ...]] = ()

  @property
  def layer(self) -> str:
    """Module between the states and the table; '' for none."""
    return ''

  @property
  def bias(self) -> str:
    """Module with the bias of the logits; '' for no bias."""
    return self.layer

  @property
  def fixed_bias(self) -> bool:
    """Whether the bias of the logits is never trained."""
    return False

  @property
  def modules(self) -> tuple[str, ...]:
    """Names of its modules in the stack."""
    names = self.module, self.layer, self.bias
    return tuple(dict.fromkeys(filter(None, names)))

  def outputs(self, vocab_size: int) -> int:
    """Returns the number of logits per state."""
    return 0

  def sizes(self, width: int) -> tuple[int, ...]:
    """Returns the sizes of a text's vector and of its Matryoshka parts.

    Args:
      width: width D of the stack.
    """
    return ()

  def architecture(
    self, stack: architectures.Architecture
  ) -> architectures.Architecture:
    """Returns the architecture of a model, given that of its stacks."""
    return stack

  def replaces(self, source: 'Head') -> 'Head':
    """Returns the head that replaces the head of a generative model.

    Args:
      source: the model's head; most heads return it unchanged.
    """
    return source


@dataclasses.dataclass(frozen=True)
class Tokens(Head):
  """Logits over the vocabulary.

  Attributes:
    tied: whether the embedding table is also the output table.
    scaled: whether to multiply states by 1 / sqrt(width) first (T5).
    transform: whether states pass a layer and a norm first, and logits have a
      bias (BERT).
    fixed_bias: whether logits have a bias that is never trained (BART).
  """

  kind: str = dataclasses.field(default='tokens', init=False)
  predicts_tokens: ClassVar[bool] = True
  models: ClassVar[tuple[str, ...]] = tuple(architectures.BY_NAME)

  tied: bool = True
  scaled: bool = False
  transform: bool = False
  fixed_bias: bool = False

  @property
  def module(self) -> str:
    """Module of the output table; '' if tied."""
    return '' if self.tied else 'head'

  @property
  def layer(self) -> str:
    """Module between the states and the table; '' for none."""
    return 'transform' if self.transform else ''

  @property
  def bias(self) -> str:
    """Module with the bias of the logits; '' for no bias."""
    return 'bias' if self.fixed_bias else self.layer

  def outputs(self, vocab_size: int) -> int:
    """Returns the vocabulary size."""
    return vocab_size


@dataclasses.dataclass(frozen=True)
class Labels(Head):
  """Logits over the labels of a classifier.

  Attributes:
    labels: number of labels.
    pooled: states that the labels of a text are read from, one of `POOLINGS`;
      '' for that of each labelled token. A pair has 'last'.
    layer: module between the states and the table, which has a bias then:
      'pooler', a layer and tanh (BERT, BART), or 'transform', that of a masked
      LM (ModernBERT); '' for none.
  """

  kind: str = dataclasses.field(default='labels', init=False)
  module: ClassVar[str] = 'head'
  fresh: ClassVar[tuple[str, ...]] = ('head',)
  models: ClassVar[tuple[str, ...]] = (
    'decoder_only',
    'encoder_only',
    'encoder_decoder',
  )

  labels: int = 2
  pooled: str = ''
  layer: str = ''

  def __post_init__(self):
    if self.labels < 2:
      raise errors.UserError(
        f'{_SECTION}.labels is {self.labels}; a classifier has at least 2.'
      )

  @property
  def bias(self) -> str:
    """Module with the bias of the logits; '' for no bias."""
    return 'head' if self.layer else ''

  def outputs(self, vocab_size: int) -> int:
    """Returns the number of labels."""
    return self.labels

  def replaces(self, source: Head) -> Head:
    """Returns this head, which a pair also gets."""
    return self

  def architecture(
    self, stack: architectures.Architecture
  ) -> architectures.Architecture:
    """Returns the architecture of a reader of labelled texts.

    Raises:
      UserError: the head of a pair reads other states than the last.
    """
    if not stack.encodes_prompt:
      return architectures.reader(stack, 'labels')
    if self.pooled != 'last':
      raise errors.UserError(
        f'{_SECTION}.pooled is {self.pooled!r}, and a pair classifies whole'
        " texts, with 'last'; words (objective tag) are labelled by a single"
        ' stack: set config.model.kind, or leave out pair=1.'
      )
    return architectures.PAIR_CLASSIFIER


@dataclasses.dataclass(frozen=True)
class Reward(Head):
  """A single output, the score of an answer, without soft-cap.

  Attributes:
    tied: `Tokens.tied` of the source language model, which Hugging Face folders
      record.
  """

  kind: str = dataclasses.field(default='reward', init=False)
  module: ClassVar[str] = 'head'
  fresh: ClassVar[tuple[str, ...]] = ('head',)
  models: ClassVar[tuple[str, ...]] = tuple(
    x.name for x in architectures.GENERATING
  )

  tied: bool = True

  def outputs(self, vocab_size: int) -> int:
    """Returns 1."""
    return 1

  def replaces(self, source: Head) -> Head:
    """Returns a reward head that records whether the token head was tied."""
    if isinstance(source, Reward):
      return source
    return Reward(tied=not source.module)

  def architecture(
    self, stack: architectures.Architecture
  ) -> architectures.Architecture:
    """Returns the architecture without generation, for pairs only."""
    return dataclasses.replace(stack, generates=False, rows=('pair',))


@dataclasses.dataclass(frozen=True)
class Embedding(Head):
  """Text embedding: pooled states, projected and normalised.

  Attributes:
    pooling: one of `POOLINGS`.
    projections: widths after the pooled states.
    dimensions: sizes of leading parts that are also vectors (Matryoshka).
    temperature: initial value of the learned temperature; 0 for none.
  """

  kind: str = dataclasses.field(default='embedding', init=False)
  module: ClassVar[str] = 'embedding'
  models: ClassVar[tuple[str, ...]] = ('decoder_only', 'encoder_only')

  pooling: str = 'mean'
  projections: tuple[int, ...] = ()
  dimensions: tuple[int, ...] = ()
  temperature: float = 0.0

  def __post_init__(self):
    for name in ('projections', 'dimensions'):
      sizes = getattr(self, name)
      if not all(isinstance(x, int) and x > 0 for x in sizes):
        raise errors.UserError(
          f'{_SECTION}.{name} is {sizes}; it must be a tuple of integers above'
          ' 0, such as (3072, 768).'
        )

  def sizes(self, width: int) -> tuple[int, ...]:
    """Returns the size E of a vector and the sizes of its parts.

    Args:
      width: width D of the stack.

    Raises:
      UserError: a part is not smaller than the vector.
    """
    size = (width, *self.projections)[-1]
    if max(self.dimensions, default=0) >= size:
      raise errors.UserError(
        f'{_SECTION}.dimensions is {self.dimensions}, and a vector has {size}'
        ' numbers; leave out parts that are not smaller.'
      )
    return (size, *self.dimensions)

  def architecture(
    self, stack: architectures.Architecture
  ) -> architectures.Architecture:
    """Returns the architecture of an encoder of texts."""
    return architectures.reader(stack, 'texts')


BY_KIND: dict[str, type[Head]] = {
  head().kind: head for head in (Tokens, Labels, Reward, Embedding)
}


def resolve_pooling(head: Head, pooling: str | None) -> str:
  """Returns the pooling of a model's states.

  Args:
    head: the head of the model.
    pooling: one of `POOLINGS`; None for the head's, or else 'mean'.

  Raises:
    UserError: the pooling is unknown, or differs from the embedding head's.
  """
  trained = head.pooling if isinstance(head, Embedding) else ''
  pooling = pooling or trained or 'mean'
  if trained and trained != pooling:
    raise errors.UserError(
      f'pooling is {pooling!r}, and the embedding model pools by'
      f' {trained!r}; leave it out.'
    )
  if pooling not in POOLINGS:
    raise errors.UserError(
      f'pooling is {pooling!r}; it must be {" or ".join(POOLINGS)}.'
    )
  return pooling


def classifies(head: Head) -> bool:
  """Returns whether other libraries load a head as a sequence classifier."""
  return isinstance(head, (Labels, Reward))
