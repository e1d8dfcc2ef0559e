"""The configuration section `model`: a model as keys, and back.

Knows the keys of this section only; `encdec_adapt.config` checks them against
those of other sections.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

from encdec_adapt.base import errors, keys
from encdec_adapt.models import architecture as architectures
from encdec_adapt.models import embedding_head, model_config
from encdec_adapt.ops import masks

# Keys of a stack with a head, and their values in an encoder, which has none.
OF_HEAD = {'tied_head': True, 'scaled_head': False}


@dataclasses.dataclass(frozen=True)
class ModelSection:
  """Keys of `config.model` except those of its two stacks."""

  kind: str = keys.key(
    'decoder_only',
    "'encoder_decoder'; or one stack, config.model.decoder: 'decoder_only'"
    " (causal), 'prefix_decoder' (bidirectional over the inputs of a pair),"
    " 'encoder_only' (bidirectional).",
    one_of=tuple(architectures.BY_NAME),
  )
  causal_encoder: bool = keys.key(
    False, "Causal attention in the encoder (the paper's ablation)."
  )
  cross_merged: bool = keys.key(
    False,
    "One attention over both stacks' keys, as T5Gemma 2, instead of two; the"
    ' stacks are then equally wide.',
  )
  cross_layers: str = keys.key(
    'all',
    "Decoder layers that read the encoder: 'all' or 'global'.",
    one_of=('all', 'global'),
  )
  shared_table: bool = keys.key(
    False, "The encoder reads the decoder's embedding table (T5Gemma 2)."
  )
  window_rule: str = keys.key(
    'exclusive',
    "Local window of the encoder: 'exclusive' |q-k| < W, as the authors' code;"
    " 'inclusive' |q-k| <= W, as transformers 5.23 with eager attention; or"
    " 'centered', W keys around the query (T5Gemma 2).",
    one_of=masks.WINDOW_RULES,
  )
  eoi_token: int | None = keys.key(
    None,
    'Token with an embedding of its own (T5Gemma 2); -1 for none.',
    at_least=0,
    none=-1,
  )
  embedding: str = keys.key(
    '',
    "A single stack that embeds texts: 'pooling=mean,projections=3072+768,"
    "dimensions=256+128' (mean, last or first; widths after the pooled states;"
    " leading parts that are vectors too). '': it predicts tokens.",
  )
  vocab_multiple: int = keys.key(
    128,
    'Embedding tables are padded to a multiple of this many rows, so that'
    ' they divide over the mesh; padding rows never get probability.',
    at_least=1,
  )

  def __post_init__(self):
    keys.check(self, 'config.model.')


def defaults() -> dict[str, Any]:
  """Returns the default values of the section, stacks included."""
  # A ConfigDict would make one section of a dictionary that both share.
  encoder, decoder = (keys.defaults(model_config.StackConfig) for _ in range(2))
  encoder = {k: v for k, v in encoder.items() if k not in OF_HEAD}
  stacks = {'encoder': encoder, 'decoder': decoder}
  return {**keys.defaults(ModelSection), **stacks}


def model_from_section(values: Mapping[str, Any]) -> model_config.ModelConfig:
  """Builds the model that a section describes.

  Args:
    values: value of every key, with 'encoder' and 'decoder' as mappings.

  Raises:
    UserError: names the key, its value and its bounds.
  """
  section = keys.make(ModelSection, values)
  architecture = architectures.BY_NAME[section.kind]
  if section.embedding and section.kind in (
    'encoder_decoder',
    'prefix_decoder',
  ):
    raise errors.UserError(
      f'{embedding_head.LABEL} is {section.embedding!r} with config.model.kind'
      f' {section.kind}; set the kind to encoder_only or decoder_only, which'
      " config.init.mode='adapt' starts from a stack of a pair."
    )
  common = dict(
    vocab_multiple=section.vocab_multiple,
    eoi_token=section.eoi_token,
    role=architecture.role,
  )
  # Only for stacks that are read from both sides: causal ones of equal shape
  # stay equal, however the key is set.
  rule = {'window_rule': section.window_rule}
  if not architecture.encodes_prompt:
    common |= rule if architecture.has_encoder else {}
    head = embedding_head.parse(section.embedding)
    values = values['decoder']
    decoder = _stack('decoder', values, embedding=head, **common)
    return model_config.DecoderOnlyConfig(decoder)
  decoder = _stack('decoder', values['decoder'], **common)
  keys_of_encoder = {**OF_HEAD, **values['encoder']}
  encoder = _stack('encoder', keys_of_encoder, **rule, **common)
  try:
    return model_config.encoder_decoder(
      encoder,
      decoder,
      causal_encoder=section.causal_encoder,
      shared_table=section.shared_table,
      cross_merged=section.cross_merged,
      cross_layers=section.cross_layers,
    )
  except errors.UserError as error:
    raise errors.UserError(f'config.model: {error}') from error


def _stack(side: str, values: Mapping[str, Any], **fields: Any):
  try:
    return keys.make(model_config.StackConfig, values, **fields)
  except errors.UserError as error:
    raise errors.UserError(f'config.model.{side}: {error}') from error


def section_from_model(model: model_config.ModelConfig) -> dict[str, Any]:
  """Returns the values of the section's keys that describe a model.

  A decoder-only model leaves the encoder's keys out.
  """
  decoder = model.stacks['decoder']
  pair = model.architecture.encodes_prompt
  # The rule of an encoder-only model is its single stack's.
  encoder = model.encoder if pair else decoder
  section = ModelSection(
    kind=model.architecture.name,
    causal_encoder=pair and encoder.role == 'causal',
    cross_merged=decoder.cross_merged,
    cross_layers=decoder.cross_layers,
    shared_table=pair and model.shared_table,
    window_rule=encoder.window_rule,
    eoi_token=decoder.eoi_token,
    embedding=embedding_head.spell(decoder.embedding),
    vocab_multiple=decoder.vocab_multiple,
  )
  stacks = {side: keys.values_of(stack) for side, stack in model.stacks.items()}
  # No key of an encoder, which has no head (`defaults`).
  if pair:
    for key in OF_HEAD:
      del stacks['encoder'][key]
  return {**keys.values_of(section), **stacks}
