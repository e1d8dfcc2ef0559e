"""Architectures: how each kind of model reads batches, prompts and contexts.

`ModelConfig.architecture` is the architecture of a model. Training, evaluation,
inference and planning call it instead of checking types. Each stack reads the
fields of one side of a batch (`objectives.framing`): `{side}_tokens`,
`{side}_segments`, `{side}_positions`.

| architecture    | stack   | side in batches of pairs | without inputs |
|-----------------|---------|--------------------------|----------------|
| encoder-decoder | encoder | encoder                  |                |
|                 | decoder | decoder                  |                |
| causal decoder  | decoder | teacher                  | decoder        |
| prefix decoder  | decoder | teacher                  | decoder        |
| encoder         | decoder | encoder                  |                |
| pair classifier | both    | encoder                  |                |

The teacher's row holds the inputs of a pair, then its targets. A single stack
with a head over whole texts (`heads`) reads the encoder side (`reader`),
whatever the role of its stack.

Batches may have a group of G completions for each of P prompts: fields of
decoder, teacher and targets are then [P, G, L]. An encoder reads each prompt
once, [P, S]; the teacher's rows repeat it.

Configs and models import this module, which imports neither.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np

from encdec_adapt.base import errors

Batch = Mapping[str, Array]
Tokens = Int[Array, 'B L']
Fields = Sequence[Array]  # Tokens, segments and positions of a stack.
Params = Mapping[str, Any]
# Models are typed `Any`, as their modules import this module.
Ids = Sequence[int | np.integer] | np.ndarray


class ScoringInput(NamedTuple):
  """A context and its continuation, framed for scoring.

  Attributes:
    source: encoder tokens; empty if the decoder reads the context.
    tokens: decoder tokens.
    prefix: number of context tokens among the decoder tokens.
  """

  source: tuple[int, ...]
  tokens: list[int]
  prefix: int


@dataclasses.dataclass(frozen=True)
class Architecture:
  """Base class, and decoders that read inputs and targets in one row.

  Attributes:
    name: `config.model.kind`.
    role: self-attention of the decoder stack.
    prompt_stack: name of the stack that reads prompts.
    has_encoder: whether `encode` returns states of whole texts.
    generates: whether it predicts next tokens, to generate text and score
      continuations.
    predicts_inputs: whether it can also be trained on the inputs of a pair.
    rows: supported contents of training rows: the sides filled by an objective
      ('pair', 'decoder', 'encoder'), or the rows of a `reader`.
    sides_of_pairs: stack -> side it reads in batches of pairs.
    sides_of_texts: stack -> side it reads in batches without inputs.
  """

  name: str
  role: str
  prompt_stack: str = 'decoder'
  has_encoder: bool = False
  generates: bool = True
  predicts_inputs: bool = False
  rows: tuple[str, ...] = ('pair',)
  # Class attributes, because fields cannot default to a dict.
  sides_of_pairs: ClassVar[Mapping[str, str]] = {'decoder': 'teacher'}
  sides_of_texts: ClassVar[Mapping[str, str]] = {'decoder': 'decoder'}

  @property
  def encodes_prompt(self) -> bool:
    """Whether it is a pair, whose encoder reads prompts."""
    return self.prompt_stack == 'encoder'

  @property
  def is_encoder(self) -> bool:
    """Whether its only stack reads whole texts."""
    return self.has_encoder and not self.encodes_prompt

  def require_generation(self, model: str, remedy: str) -> None:
    """Checks that the model predicts next tokens.

    Args:
      model: name of the model, the subject of the message.
      remedy: what to do instead, the end of the message.

    Raises:
      UserError: it is encoder-only, or its head predicts no tokens.
    """
    if not self.generates:
      raise errors.UserError(
        f'{model} predicts no next tokens (it is encoder-only, or has a head'
        f' for labels, rewards or embeddings) and generates no text; {remedy}.'
      )

  def require_encoder(self) -> None:
    """Checks that the model has an encoder.

    Raises:
      UserError: it is decoder-only.
    """
    if not self.has_encoder:
      raise errors.UserError(
        'decoder-only models have no encoder, whose states are read here; use'
        ' an encoder-decoder or an encoder-only model.'
      )

  def require_prompt_scores(self) -> None:
    """Checks that the model gives probabilities to the tokens of its prompt.

    Raises:
      UserError: it is not a causal decoder.
    """
    if not self.predicts_inputs:
      raise errors.UserError(
        f'{self.name} models give no probability to their prompt;'
        ' `python -m encdec_adapt.evaluate` scores texts.'
      )

  @property
  def framing_side(self) -> str:
    """Side that frames prompts; see `special_ids.SideIds.edges`."""
    # A single stack over whole texts is also named 'decoder'.
    return 'encoder' if self.has_encoder else 'decoder'

  def sides(self, has_inputs: bool) -> Mapping[str, str]:
    """Returns the side of a batch each stack reads, by stack.

    Args:
      has_inputs: whether the batch has the encoder's fields.
    """
    return self.sides_of_pairs if has_inputs else self.sides_of_texts

  def inputs_side(self, has_inputs: bool) -> str:
    """Returns the side of a batch read by the prompt's stack; see `sides`."""
    return self.sides(has_inputs)[self.prompt_stack]

  def positions(self, prompt: int, generated: int) -> dict[str, int]:
    """Returns the positions of each stack for a prompt and its continuation."""
    return {'decoder': prompt + generated}

  def source(
    self, model: Any, params: Params, fields: Fields, **options: Any
  ) -> tuple[Array, ...]:
    """Computes the encoder arguments of `model.decode`.

    Args:
      model: the model (`models.build`).
      params: parameters of the model.
      fields: tokens, segments and positions of the encoder.
      **options: `routing` and `dropout` of `base_model.BaseModel.run_stack`.

    Returns:
      The encoder's states and segments; () without cross-attention.
    """
    del model, params, fields, options
    return ()

  def states(
    self,
    model: Any,
    params: Params,
    fields: Mapping[str, Fields],
    **options: Any,
  ) -> Float[Array, 'B L D']:
    """Computes the states that logits are computed from.

    Args:
      model: the model.
      params: parameters of the model.
      fields: tokens, segments and positions of each stack, by name.
      **options: as for `source`, and `prefix` of
        `base_model.BaseModel.decode`.
    """
    source = self.source(model, params, fields.get('encoder', ()), **options)
    rows = len(fields['decoder'][0])
    if source and rows > len(source[0]):  # Shared by a group.
      source = [jnp.repeat(x, rows // len(x), axis=0) for x in source]
    hidden = model.decode(params, *fields['decoder'], *source, **options)
    return model.pool(hidden, fields['decoder'][1])

  def predict(
    self, model: Any, params: Params, batch: Batch, **options: Any
  ) -> Float[Array, 'B T D']:
    """Computes the hidden states that predict `batch['targets']`.

    Args:
      model: the model.
      params: parameters of the model.
      batch: fields of `objectives.framing`; [P, G, L] for groups.
      **options: as for `source`.

    Returns:
      The states; for groups, B is P * G, prompt by prompt.
    """
    batch = _flat(batch)
    hidden = self._read(model, params, batch, **options)
    if self.sides('encoder_tokens' in batch)['decoder'] != 'teacher':
      return hidden
    # The row of a pair has more positions than targets: gather the targets'
    # positions, to align them with an encoder-decoder's.
    return jnp.take_along_axis(
      hidden, batch['teacher_index'][..., None], axis=1
    )  # [B, T, D]

  def read_answers(
    self, model: Any, params: Params, batch: Batch, **options: Any
  ) -> Float[Array, 'B D']:
    """Computes the states at the last token of each answer.

    Args:
      model: the model.
      params: parameters of the model.
      batch: fields of `objectives.framing`; rows hold a single pair, with room
        for BOS before its targets in the decoder's row.
      **options: as for `source`.

    Returns:
      The states; for groups, B is P * G, prompt by prompt.
    """
    batch = _flat(batch)
    side = self.sides('encoder_tokens' in batch)['decoder']
    if side == 'decoder':
      batch |= _with_last_target(batch)
    hidden = self._read(model, params, batch, **options)
    # Rows of padding have no last token.
    last = jnp.maximum(jnp.sum(batch[f'{side}_segments'] > 0, axis=1) - 1, 0)
    return jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]

  def _read(
    self, model: Any, params: Params, batch: Batch, **options: Any
  ) -> Float[Array, 'B L D']:
    """Computes the decoder's states of a batch without groups."""
    sides = self.sides('encoder_tokens' in batch)
    fields = {
      stack: [batch[f'{side}_{x}'] for x in ('tokens', 'segments', 'positions')]
      for stack, side in sides.items()
    }
    # Only rows of pairs have inputs, hence the option `prefix`.
    if sides['decoder'] == 'teacher':
      options['prefix'] = self.prefix(batch)
    return self.states(model, params, fields, **options)

  def prefix(self, batch: Batch) -> Int[Array, 'B R'] | None:
    """Returns 1 at the bidirectional positions of the teacher's row."""
    del batch
    return None

  def scoring_input(
    self, context: Ids, continuation: Ids, bos: int
  ) -> ScoringInput:
    """Frames a continuation for scoring.

    Args:
      context: framed token ids.
      continuation: token ids.
      bos: first token of a decoder without the context.
    """
    del bos
    # The last token is only predicted, not read.
    tokens = [*context, *continuation[:-1]]
    return ScoringInput((), tokens, len(context))

  def prefill(
    self, model: Any, params: Params, fields: Fields, bos: Int[Array, ''] | int
  ) -> tuple[dict[str, Any], Int[Array, 'B n']]:
    """Computes the cache entries of prompts.

    Args:
      model: the model.
      params: parameters of the model.
      fields: tokens, segments (1 at tokens, 0 at padding) and positions of the
        prompts.
      bos: first token of a decoder without the prompt.

    Returns:
      Arguments of `kv_cache.insert`, and the decoder's tokens. The last token
      is the input of the first `model.decode_step`.
    """
    del bos
    tokens, segments, _ = fields
    counts = jnp.sum(segments, axis=1)
    entries = model.prefill(params, *fields)
    last = jnp.take_along_axis(tokens, counts[:, None] - 1, axis=1)
    # Replaces padding by the last token: repetition penalties must not apply to
    # padding.
    tokens = jnp.where(segments > 0, tokens, last)
    return {'prompt': entries, 'lengths': counts}, tokens


@dataclasses.dataclass(frozen=True)
class PrefixDecoder(Architecture):
  """A decoder with bidirectional attention over the inputs of a pair."""

  name: str = 'prefix_decoder'
  role: str = 'prefix'

  def prefix(self, batch: Batch) -> Int[Array, 'B R']:
    """Returns 1 at the framed inputs."""
    return inputs_of(batch)


@dataclasses.dataclass(frozen=True)
class Encoder(Architecture):
  """A bidirectional stack for masked tokens, or a `reader`."""

  name: str = 'encoder_only'
  role: str = 'bidirectional'
  has_encoder: bool = True
  generates: bool = False
  rows: tuple[str, ...] = ('encoder',)
  sides_of_pairs: ClassVar[Mapping[str, str]] = {'decoder': 'encoder'}
  sides_of_texts: ClassVar[Mapping[str, str]] = sides_of_pairs

  def encode(
    self, model: Any, params: Params, fields: Fields, **options: Any
  ) -> Float[Array, 'B S D']:
    """Computes the states of texts; arguments as for `source`."""
    return model.decode(params, *fields, **options)


@dataclasses.dataclass(frozen=True)
class EncoderDecoder(Architecture):
  """An encoder of the inputs and a decoder with cross-attention."""

  name: str = 'encoder_decoder'
  role: str = 'causal'
  prompt_stack: str = 'encoder'
  has_encoder: bool = True
  rows: tuple[str, ...] = ('pair', 'passages')
  sides_of_pairs: ClassVar[Mapping[str, str]] = {
    'encoder': 'encoder',
    'decoder': 'decoder',
  }

  def positions(self, prompt: int, generated: int) -> dict[str, int]:
    """Returns prompt positions for the encoder, generated for the decoder."""
    return {'encoder': prompt, 'decoder': generated}

  def encode(
    self, model: Any, params: Params, fields: Fields, **options: Any
  ) -> Float[Array, 'B S E']:
    """Computes the encoder's states; arguments as for `source`."""
    return model.encode(params, *fields, **options)

  def source(
    self, model: Any, params: Params, fields: Fields, **options: Any
  ) -> tuple[Array, ...]:
    """Computes the encoder's states; returns them with their segments."""
    return self.encode(model, params, fields, **options), fields[1]

  def scoring_input(
    self, context: Ids, continuation: Ids, bos: int
  ) -> ScoringInput:
    """Frames the context for the encoder, the continuation for the decoder."""
    return ScoringInput(tuple(context), [bos, *continuation[:-1]], 0)

  def prefill(
    self, model: Any, params: Params, fields: Fields, bos: Int[Array, ''] | int
  ) -> tuple[dict[str, Any], Int[Array, 'B n']]:
    """Encodes prompts; the decoder starts from BOS."""
    encoded, segments = self.source(model, params, fields)
    # Projected once for all steps; the states themselves are not kept.
    cross = model.prefill_cross(params, encoded)
    tokens = jnp.full((len(segments), 1), bos)
    return {'cross': cross, 'encoder_segments': segments}, tokens


@dataclasses.dataclass(frozen=True)
class PairClassifier(EncoderDecoder):
  """A pair whose stacks both read a whole text, to classify it.

  The decoder reads the text shifted right by one, after its last token, which
  is the EOS of vocabularies that end inputs with one (BART: transformers 5.24,
  `BartForSequenceClassification`).
  """

  generates: bool = False
  rows: tuple[str, ...] = ('labels',)
  sides_of_pairs: ClassVar[Mapping[str, str]] = {
    'encoder': 'encoder',
    'decoder': 'encoder',
  }
  sides_of_texts: ClassVar[Mapping[str, str]] = sides_of_pairs

  def positions(self, prompt: int, generated: int) -> dict[str, int]:
    """Returns the positions of the text, for both stacks."""
    return {'encoder': prompt, 'decoder': prompt}

  def _read(
    self, model: Any, params: Params, batch: Batch, **options: Any
  ) -> Float[Array, 'B L D']:
    names = 'tokens', 'segments', 'positions'
    text = [batch[f'encoder_{x}'] for x in names]
    fields = {'encoder': text, 'decoder': (model.rotate(*text), *text[1:])}
    return self.states(model, params, fields, **options)


# The only kind whose states at the inputs do not see the tokens to predict.
CAUSAL_DECODER = Architecture(
  'decoder_only',
  'causal',
  predicts_inputs=True,
  rows=('pair', 'decoder'),
)
PREFIX_DECODER = PrefixDecoder()
ENCODER = Encoder()
ENCODER_DECODER = EncoderDecoder()
PAIR_CLASSIFIER = PairClassifier()
_SINGLE_STACK = (CAUSAL_DECODER, PREFIX_DECODER, ENCODER)
BY_NAME = {kind.name: kind for kind in (*_SINGLE_STACK, ENCODER_DECODER)}
GENERATING = tuple(kind for kind in BY_NAME.values() if kind.generates)


def of_stack(role: str) -> Architecture:
  """Returns the architecture of a single stack with the given role."""
  return next(kind for kind in _SINGLE_STACK if kind.role == role)


def reader(stack: Architecture, rows: str) -> Architecture:
  """Returns the architecture of a single stack over whole texts.

  Args:
    stack: architecture of the stack; gives the name.
    rows: contents of the training rows.
  """
  return dataclasses.replace(ENCODER, name=stack.name, rows=(rows,))


def names(kinds: Sequence[Architecture]) -> str:
  """Returns the joined names of architectures, for messages."""
  return ' and '.join(kind.name for kind in kinds)


def inputs_of(batch: Batch) -> Int[Array, 'B R']:
  """Returns 1 at framed inputs of pairs in the teacher's row, else 0."""
  # By exclusion: the batch has the positions predicting targets, one before
  # each target, but no lengths of inputs.
  rows = jnp.arange(len(batch['targets']))[:, None]
  targets = batch['teacher_index'] + 1
  is_target = jnp.zeros_like(batch['teacher_segments'])
  # `max`, because padding targets point to index 0 + 1, which may be a target.
  is_target = is_target.at[rows, targets].max(
    jnp.int32(batch['decoder_segments'] > 0)
  )
  return jnp.int32((batch['teacher_segments'] > 0) & (is_target == 0))


def _flat(batch: Batch) -> dict[str, Array]:
  return {name: x.reshape(-1, x.shape[-1]) for name, x in batch.items()}


def _with_last_target(batch: Batch) -> dict[str, Array]:
  """Returns the decoder's fields extended by the last target.

  Decoder inputs are the targets shifted right, so they lack the last target.
  """
  tokens, segments = batch['decoder_tokens'], batch['decoder_segments']
  shifted = batch['targets'][:, :-1], segments[:, :-1]
  tokens, segments = (
    jnp.concatenate([x[:, :1], y], axis=1)
    for x, y in zip((tokens, segments), shifted, strict=True)
  )
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  return {
    'decoder_tokens': tokens,
    'decoder_segments': segments,
    'decoder_positions': positions,
  }
