"""The configuration section `model`: converts models to keys and back.

Has only the keys of this section; `encdec_adapt.config` checks them against
other sections.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

from encdec_adapt.base import errors, keys
from encdec_adapt.models import architecture as architectures
from encdec_adapt.models import heads, model_config
from encdec_adapt.ops import masks

_HEAD = 'config.model.head.'


@dataclasses.dataclass(frozen=True)
class HeadSection:
  """Keys of `config.model.head`: the options of each kind (`heads`)."""

  kind: str = keys.key(
    'tokens',
    "What the model computes of its states: 'tokens'; 'labels' (a classifier),"
    " which a labelled objective sets; 'reward', which the loss of this name"
    " sets; or 'embedding', the vector of a text, of a single stack.",
    one_of=tuple(heads.BY_KIND),
  )
  tied: bool = keys.key(True, 'tokens: the embedding table gives the logits.')
  scaled: bool = keys.key(
    False, 'tokens: multiply states by 1 / sqrt(width) before (T5).'
  )
  transform: bool = keys.key(
    False,
    'tokens: a layer and a norm before the table, and a bias of the logits'
    ' (BERT).',
  )
  fixed_bias: bool = keys.key(
    False, 'tokens: a bias of the logits that is never trained (BART).'
  )
  labels: int = keys.key(
    0, 'labels: their number, that of the objective.', at_least=0
  )
  pooled: str = keys.key(
    '',
    "labels: states of a text that its label is read from; '' for those of the"
    ' labelled tokens.',
    one_of=('', *heads.POOLINGS),
  )
  layer: str = keys.key(
    '',
    "labels: 'pooler', a layer and tanh (BERT), or 'transform', a layer and a"
    " norm (ModernBERT), before the table, which has a bias then; '' for"
    ' neither.',
    one_of=('', 'pooler', 'transform'),
  )
  pooling: str = keys.key(
    'mean', 'embedding: states of a text.', one_of=heads.POOLINGS
  )
  projections: tuple[int, ...] = keys.key(
    (), 'embedding: widths after the pooled states, such as (3072, 768).'
  )
  dimensions: tuple[int, ...] = keys.key(
    (), 'embedding: leading parts that are vectors too, such as (256, 128).'
  )
  temperature: float = keys.key(
    0.0,
    'embedding: initial value of a temperature that is a parameter, which the'
    ' loss sets; 0 for none.',
    at_least=0,
  )

  def __post_init__(self):
    keys.check(self, _HEAD)
    values, defaults = keys.values_of(self), keys.defaults(type(self))
    for name in ('kind', *_options(self.kind)):
      values[name] = defaults[name]
    reason = f'{_HEAD}kind is {self.kind!r}'
    keys.require_defaults(values, defaults, _HEAD, reason)

  def check(self, head: heads.Head) -> None:
    """Checks that loss and objective of a job imply this head.

    Args:
      head: head of the model; may have replaced the default, tokens.

    Raises:
      UserError: an option differs.
    """
    if self.kind == 'tokens':
      return
    stated, values = keys.values_of(self), keys.values_of(self.of(head))
    for name, default in keys.defaults(type(self)).items():
      if stated[name] not in (default, values[name]):
        raise errors.UserError(
          f'{_HEAD}{name} is {stated[name]!r}, and config.loss and'
          f' config.data.objective give the model {values[name]!r}; set it to'
          f' {default!r}, or change them.'
        )

  def before_training(self) -> 'HeadSection':
    """Returns the section before changes by loss and objective."""
    if self.pooled or self.layer:  # The recipe keeps both, not their number.
      return dataclasses.replace(self, labels=2)
    if self.kind in ('labels', 'reward'):
      return HeadSection(tied=self.tied)
    return dataclasses.replace(self, temperature=0.0)

  @classmethod
  def of(cls, head: heads.Head) -> 'HeadSection':
    """Returns the section of a head."""
    options = {name: getattr(head, name) for name in _options(head.kind)}
    return cls(kind=head.kind, **options)

  @property
  def head(self) -> heads.Head:
    """The head of this section."""
    options = {name: getattr(self, name) for name in _options(self.kind)}
    return heads.BY_KIND[self.kind](**options)


def head_in_force(values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the keys of section `head` in use for its kind.

  Args:
    values: value of every key of the section.
  """
  names = 'kind', *_options(values['kind'])
  return {name: values[name] for name in names}


def _options(kind: str) -> list[str]:
  fields = dataclasses.fields(heads.BY_KIND[kind])
  return [field.name for field in fields if field.init]


@dataclasses.dataclass(frozen=True)
class ModelSection:
  """Keys of `config.model`, without its two stacks."""

  kind: str = keys.key(
    'decoder_only',
    "'encoder_decoder'; or one stack, config.model.decoder: 'decoder_only'"
    " (causal), 'prefix_decoder' (bidirectional over an example's inputs),"
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
    False,
    "The encoder reads the decoder's embedding table (T5Gemma 2); equal second"
    ' tables (Gemma 4) are always shared.',
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
  vocab_multiple: int = keys.key(
    128,
    'Embedding tables are padded to a multiple of this many rows, so that'
    ' they divide over the mesh; padding rows never get probability.',
    at_least=1,
  )

  head: HeadSection = keys.section(HeadSection)

  def __post_init__(self):
    keys.check(self, 'config.model.')


def defaults() -> dict[str, Any]:
  """Returns the default values of the section, including stacks."""
  # Separate dicts: a ConfigDict would turn a shared dict into a shared section.
  stacks = {
    side: keys.defaults(model_config.StackConfig)
    for side in ('encoder', 'decoder')
  }
  return {**keys.defaults(ModelSection), **stacks}


def model_from_section(values: Mapping[str, Any]) -> model_config.ModelConfig:
  """Builds the model of a section.

  Args:
    values: value of every key, with 'encoder' and 'decoder' as mappings.

  Raises:
    UserError: an invalid value; names the key, its value and its bounds.
  """
  section = keys.make(ModelSection, values)
  architecture = architectures.BY_NAME[section.kind]
  head = section.head.head
  if section.kind not in head.models:
    raise errors.UserError(
      f'config.model.head.kind is {head.kind!r} with config.model.kind'
      f' {section.kind}; set the latter to {" or ".join(head.models)}. A single'
      " stack starts from one of a pair by config.init.mode='adapt'."
    )
  common = dict(
    vocab_multiple=section.vocab_multiple,
    eoi_token=section.eoi_token,
    role=architecture.role,
  )
  # Only for bidirectional stacks: causal stacks of equal shape stay equal
  # whatever the key.
  rule = {'window_rule': section.window_rule}
  if not architecture.encodes_prompt:
    common |= rule if architecture.has_encoder else {}
    decoder = _stack('decoder', values['decoder'], head=head, **common)
    model = model_config.DecoderOnlyConfig(decoder)
    return model_config.with_head(model, head)
  decoder = _stack('decoder', values['decoder'], head=head, **common)
  encoder = _stack('encoder', values['encoder'], **rule, **common)
  try:
    pair = model_config.encoder_decoder(
      encoder,
      decoder,
      causal_encoder=section.causal_encoder,
      shared_table=section.shared_table,
      cross_merged=section.cross_merged,
      cross_layers=section.cross_layers,
    )
    return model_config.with_head(pair, head)
  except errors.UserError as error:
    raise errors.UserError(f'config.model: {error}') from error


def _stack(side: str, values: Mapping[str, Any], **fields: Any):
  try:
    return keys.make(model_config.StackConfig, values, **fields)
  except errors.UserError as error:
    raise errors.UserError(f'config.model.{side}: {error}') from error


def section_from_model(model: model_config.ModelConfig) -> dict[str, Any]:
  """Returns the section of a model: values by key.

  Decoder-only models omit the encoder's keys.
  """
  decoder = model.stacks['decoder']
  pair = model.architecture.encodes_prompt
  # Encoder-only models have the rule in their single stack.
  encoder = model.encoder if pair else decoder
  section = ModelSection(
    kind=model.architecture.name,
    causal_encoder=pair and encoder.role == 'causal',
    cross_merged=decoder.cross_merged,
    cross_layers=decoder.cross_layers,
    shared_table=model.shared_table,
    window_rule=encoder.window_rule,
    eoi_token=decoder.eoi_token,
    head=HeadSection.of(decoder.head),
    vocab_multiple=decoder.vocab_multiple,
  )
  stacks = {side: keys.values_of(stack) for side, stack in model.stacks.items()}
  return {**keys.values_of(section), **stacks}
