"""The copy rules: how to fill each weight, from configs alone.

The copy maps of Encoder-Decoder Gemma (arXiv 2504.06225, section 3): encoder
and decoder are the decoder-only stacks; cross-attention is copied from the
decoder's self-attention if encoder and decoder have the same width
("balanced"), and fresh otherwise.

A single-stack model may start from a stack of a pair: a decoder from the
decoder (Wang et al. 2022, appendix E.4), an encoder-only model from the
encoder. A stack with fewer layers than its source copies layers of the same
kind (local or global), spaced as evenly as the kinds allow: every other layer
if it has half of them and all are alike.
"""

from collections.abc import Collection, Mapping
import dataclasses
import functools
import math
from typing import Literal

from encdec_adapt.adaptation import coverage as coverage_lib
from encdec_adapt.adaptation import transforms as transforms_lib
from encdec_adapt.base import errors
from encdec_adapt.models import block, layer_leaves, model_config, parameters

CrossAttention = Literal['auto', 'copy', 'fresh']
PostNormGain = Literal['one', 'zero']

# Gains of the post-norm of fresh cross-attention. Zero disables the residual
# branch, so that the decoder initially computes its source's function.
_GAINS = {'one': 1.0, 'zero': 0.0}
# Attention leaves with key/value heads.
_KEYS_VALUES = ('key', 'value', 'key_bias', 'value_bias')


@dataclasses.dataclass(frozen=True)
class _Side:
  """A stack of the target and its source.

  Attributes:
    stack: 'encoder' or 'decoder'.
    target: config of the target's stack.
    source: name of the source in the report.
    source_stack: the stack of the source that fills it.
    config: config of that stack.
    leaves: leaves of the source.
    shared_parts: what the encoder reads of the decoder's tables.
  """

  stack: str
  target: model_config.StackConfig
  source: str
  source_stack: str
  config: model_config.StackConfig
  leaves: Mapping[str, layer_leaves.Leaf]
  shared_parts: tuple[str, ...]

  @functools.cached_property
  def layers(self) -> tuple[int, ...]:
    """The source layer of each layer.

    Raises:
      UserError: the source has too few layers.
    """
    count, total = self.target.layers, self.config.layers
    if count == total:  # Ignore the pattern: most kinds differ only in masks.
      return tuple(range(count))

    def choices(slot: int, first: int, stop: int) -> list[int]:
      kind = self.target.layer_kind(slot)
      return [
        i for i in range(first, stop) if self.config.layer_kind(i) == kind
      ]

    # From the end: the last layer with enough layers left for the others.
    latest = [total]
    for slot in reversed(range(count)):
      if not (fitting := choices(slot, 0, latest[0])):
        raise self.misfit(
          f"the target's {self.stack} has {count} layers and {self.source} has"
          f' {total}: layers can be left out, each of its kind (pattern) and in'
          ' order, and not added.'
        )
      latest.insert(0, fitting[-1])
    layers = [-1]
    for slot in range(count):
      fitting = choices(slot, layers[-1] + 1, latest[slot] + 1)
      ideal = slot * total / count
      layers.append(min(fitting, key=lambda i: (abs(i - ideal), -i)))
    return tuple(layers[1:])

  @property
  def head(self) -> str:
    """Name of the source's head; only untied sources have it."""
    return f'{self.source_stack}/head/table'

  @property
  def table(self) -> str:
    """Name of the source's embedding table."""
    name = f'{self.source_stack}/embedder/table'
    # A shared table is stored with the decoder.
    return name if name in self.leaves else 'decoder/embedder/table'

  @property
  def changed_fields(self) -> list[str]:
    """Config fields different from the source."""
    return [
      f'{self.stack}.{field} is {ours!r}, in {self.source} {theirs!r}'
      for field, ours in vars(self.target).items()
      if ours != (theirs := getattr(self.config, field))
    ]

  def misfit(self, problem: str) -> errors.UserError:
    """Returns the error for a source that does not fit its target."""
    return errors.UserError(
      f'{problem} Build the target from its sources with'
      ' models.model_config.encoder_decoder (config.model.'
      f'{self.stack} is the shape of the source), or choose a source of its'
      ' shape.'
    )


def make_plan(
  target: model_config.ModelConfig,
  encoder_source: model_config.ModelConfig,
  decoder_source: model_config.DecoderOnlyConfig | None = None,
  *,
  cross_attention: CrossAttention = 'auto',
  post_norm_gain: PostNormGain = 'one',
  fresh: Collection[str] = (),
) -> coverage_lib.Coverage:
  """Plans how to fill each leaf of `target`.

  Args:
    target: the model to fill.
    encoder_source: config of the encoder's source, or of a single-stack model's
      source, which may be a pair.
    decoder_source: config of the decoder's source; None for the encoder's.
    cross_attention: 'copy' the decoder's self-attention with its norms, make it
      'fresh' (still copying the pre-norm), or 'auto': copy if the shapes allow.
    post_norm_gain: gain of the post-norm of fresh cross-attention. 'zero'
      initially preserves the decoder's function.
    fresh: leaves, named by layer, to initialize instead of copy, such as
      'decoder/layers/3/mlp/up'.

  Returns:
    The coverage report: every leaf of `target` is filled, and every leaf of a
    source is used or listed as unused.

  Raises:
    UserError: the sources do not fit the target; names a remedy.
  """
  sources = {
    'encoder': encoder_source,
    'decoder': decoder_source or encoder_source,
  }
  sides = {}
  for name, stack in target.stacks.items():
    source = sources[name]
    source_stack = model_config.source_stack(target, source)
    sides[name] = _Side(
      name,
      stack,
      f'{name}_source',
      source_stack,
      source.stacks[source_stack],
      layer_leaves.leaves_of(source),
      target.shared_parts,
    )
    _check_positions(sides[name])
  copies = _copies_cross(target, cross_attention, post_norm_gain)
  # Gemma's norms store the gain minus 1.
  offset = 1.0 if target.decoder.norm_gain == 'one_plus' else 0.0
  gain = coverage_lib.Fill(
    'constant',
    value=_GAINS[post_norm_gain] - offset,
    note=f'gain {post_norm_gain}',
  )
  targets = layer_leaves.leaves_of(target)
  filled = {}
  for name, leaf in targets.items():
    # The first part of a leaf's name is its stack.
    side = sides[name.split('/')[0]]
    fill = coverage_lib.Fill('fresh')
    if name not in fresh:
      fill = _fill_of(name, side, copies, gain)
    if fill.how == 'copied':
      transforms = _transforms(name, leaf, side, fill)
      fill = dataclasses.replace(fill, transforms=transforms)
    filled[name] = fill
  changes = [line for side in sides.values() for line in side.changed_fields]
  for side in sides.values():
    if len(side.layers) < side.config.layers:
      layers = ', '.join(map(str, side.layers))
      changes.append(f'the {side.stack} has layers {layers} of {side.source}')
  if target.shared_table:
    changes.append("the encoder reads the decoder's embedding table")
  if 'layer_inputs/table' in target.shared_parts:
    changes.append("the encoder reads the decoder's second table")
  return coverage_lib.Coverage(
    target=_shapes(targets),
    filled=filled,
    sources={side.source: _shapes(side.leaves) for side in sides.values()},
    unused={side.source: _unused(side, filled) for side in sides.values()},
    changes=tuple(changes),
    padding=parameters.padding(target),
  )


def all_but_embeddings(target: model_config.EncoderDecoderConfig) -> list[str]:
  """Returns the leaves for `fresh` to copy only embeddings."""
  names = layer_leaves.leaves_of(target)
  tables = '/embedder/', '/layer_inputs/table'
  return [name for name in names if not any(x in name for x in tables)]


def _shapes(
  leaves: Mapping[str, layer_leaves.Leaf],
) -> dict[str, tuple[int, ...]]:
  return {name: leaf.shape for name, leaf in leaves.items()}


def _check_positions(side: _Side) -> None:
  """Checks that buckets of a relative bias keep their distances."""
  roles = side.config.role, side.target.role
  if side.config.relative and len({x == 'bidirectional' for x in roles}) == 2:
    raise errors.UserError(
      f'{side.source} is {roles[0]} with positions.kind'
      f' {side.config.positions.kind!r}, and the {side.stack} of the target is'
      f' {roles[1]}: the buckets of its bias would mean other distances. Choose'
      ' a source with rotary positions.'
    )


def _copies_cross(
  target: model_config.ModelConfig,
  cross_attention: CrossAttention,
  post_norm_gain: PostNormGain,
) -> bool:
  """Returns whether cross-attention is copied from self-attention.

  Raises:
    UserError: an option has no effect on this model, or is impossible.
  """
  decoder = target.decoder
  # Refuse options without effect: runs that compare their values would train
  # the same model twice.
  if decoder.cross_merged or decoder.cross_width is None:
    if cross_attention != 'auto' or post_norm_gain != 'one':
      raise errors.UserError(
        f'cross_attention={cross_attention!r} and'
        f' post_norm_gain={post_norm_gain!r} need cross-attention with weights'
        ' of its own: merged attention (cross_merged) reads the encoder with'
        " self-attention's, and a model of a single stack has none; leave them"
        " at 'auto' and 'one'."
      )
    return False
  if post_norm_gain != 'one' and not decoder.post_norms:
    raise errors.UserError(
      f'post_norm_gain={post_norm_gain!r} needs a decoder with norms after'
      " cross-attention, and this one has none; leave it at 'one'."
    )
  # With equal widths, key and value kernels of self- and cross-attention have
  # the same shapes; the other kernels always have the decoder's width.
  fits = target.encoder.width == decoder.width
  if cross_attention == 'copy' and not fits:
    raise errors.UserError(
      "cross_attention='copy' needs an encoder as wide as the decoder, and"
      f' the widths are {target.encoder.width} and {decoder.width}. Use'
      " cross_attention='fresh' (or 'auto') with a warm-up in which only"
      ' cross-attention moves.'
    )
  copies = cross_attention != 'fresh' and fits
  if copies and post_norm_gain != 'one':
    raise errors.UserError(
      f'post_norm_gain={post_norm_gain!r} is for fresh cross-attention, and'
      f' cross_attention={cross_attention!r} copies it (its post-norm too).'
      " Set cross_attention='fresh', or leave post_norm_gain at 'one'."
    )
  return copies


def _fill_of(
  name: str, side: _Side, copies_cross: bool, post_norm: coverage_lib.Fill
) -> coverage_lib.Fill:
  parts = name.split('/')
  if not copies_cross and 'cross_attention' in parts:
    return coverage_lib.Fill('fresh')
  # Self-attention's post-norm gains do not fit the outputs of fresh kernels.
  # The pre-norm is still copied: it normalizes the same states.
  if not copies_cross and 'post_cross_norm' in parts:
    is_bias = parts[-1] == 'bias'
    return coverage_lib.Fill('constant', value=0.0) if is_bias else post_norm
  # Cross-attention and its norms are copied from self-attention.
  source_parts = [block.CROSS.get(part, part) for part in parts[1:]]
  leaf, note = '/'.join([side.source_stack, *source_parts]), ''
  if (layer := layer_leaves.layer_of(name)) is not None:
    leaf = layer_leaves.with_layer(leaf, str(side.layers[layer]))
  # The source may derive a leaf from its table, or store it with its decoder.
  if leaf == side.head and leaf not in side.leaves:
    leaf, note = side.table, 'the source ties its head to it'
  elif source_parts[0] == 'embedder' and leaf not in side.leaves:
    leaf = side.table.replace('table', '/'.join(source_parts[1:]))
    if leaf.endswith('/eoi') and leaf not in side.leaves:
      leaf, note = side.table, 'the embedding of the token'
  elif source_parts == ['layer_inputs', 'table'] and leaf not in side.leaves:
    leaf = 'decoder/layer_inputs/table'  # A shared table.
  if leaf not in side.leaves and source_parts[0] == 'embedding':
    return coverage_lib.Fill('fresh')
  if leaf not in side.leaves:
    raise side.misfit(
      f'{name} of the target has no counterpart in {side.source}:'
      f' {"; ".join(side.changed_fields)}.'
    )
  return coverage_lib.Fill('copied', source=side.source, leaf=leaf, note=note)


def _transforms(
  name: str, leaf: layer_leaves.Leaf, side: _Side, fill: coverage_lib.Fill
) -> tuple[transforms_lib.Transform, ...]:
  shape, source_shape = leaf.shape, side.leaves[fill.leaf].shape
  target, source = side.target, side.config
  is_bias = fill.leaf.endswith('/logits_bias')
  if is_bias or (
    fill.leaf.endswith('/table') and shape[-1:] == source_shape[-1:]
  ):
    transforms = _table_transforms(name, side, source_shape[0])
    # After extending the table, as the token may be new.
    if name.endswith('/eoi'):
      scale = math.sqrt(source.width) if source.scale_embeddings else 1.0
      transforms += (transforms_lib.TakeRow(target.eoi_token, scale),)
    return transforms
  if name.endswith('/eoi') and target.eoi_token != source.eoi_token:
    raise side.misfit(
      f"{side.stack}.eoi_token is {target.eoi_token}, and {side.source}'s is"
      f' {source.eoi_token}: its vector belongs to another token.'
    )
  if shape == source_shape:
    return ()
  if name.rpartition('/')[2] in _KEYS_VALUES:
    kind = target.layer_kind(layer_leaves.layer_of(name))
    target, source = target.of_kind(kind), source.of_kind(kind)
    times, remainder = divmod(target.kv_heads, source.kv_heads)
    key = 'kv_heads'
    if kind == 'global' and side.target.global_kv_heads:
      key = 'global_kv_heads'
    if remainder or not times:
      raise errors.UserError(
        f'{side.stack}.{key} is {target.kv_heads}, no multiple of the'
        f' {source.kv_heads} of {side.source}. Key/value heads are repeated,'
        ' never joined: choose a multiple that divides'
        f' {side.stack}.heads ({target.heads}).'
      )
    # Heads are the second last axis. If another axis differs too, repeating
    # does not help, and the error below shows both shapes.
    *leading, heads, head_dim = source_shape
    if (*leading, times * heads, head_dim) == shape:
      return (transforms_lib.RepeatHeads(times),)
  raise side.misfit(
    f'{name} has shape {list(shape)}, and {fill.leaf} of {fill.source} has'
    f' {list(source_shape)}.'
  )


def _table_transforms(
  name: str, side: _Side, source_rows: int
) -> tuple[transforms_lib.Transform, ...]:
  target, source = side.target, side.config
  if target.vocab_size < source.vocab_size:
    raise errors.UserError(
      f'{name}: {side.stack}.vocab_size is {target.vocab_size}, and'
      f' {side.source} has {source.vocab_size} tokens. A vocabulary can be'
      f' extended, not cut: set it to {source.vocab_size} or more.'
    )
  # Rows include padding to `vocab_multiple`.
  same = target.vocab_size == source.vocab_size
  if same and target.table_rows == source_rows:
    return ()
  return (
    transforms_lib.FitTable(
      source.vocab_size, target.vocab_size, source_rows, target.table_rows
    ),
  )


def _unused(
  side: _Side, filled: Mapping[str, coverage_lib.Fill]
) -> dict[str, str]:
  """Returns unused leaf of a source -> reason.

  Raises:
    UserError: a leaf has no reason, so the target would not compute its
      source's function.
  """
  used = {fill.leaf for fill in filled.values() if fill.source == side.source}
  encodes, reasons = side.stack == 'encoder', {}
  for name in side.leaves:
    stack, *parts = name.split('/')
    if name in used:
      continue
    if stack != side.source_stack:
      reasons[name] = f'the target has no {stack}'
      continue
    layer, counterpart = layer_leaves.layer_of(name), name
    if layer is not None:
      if layer not in side.layers:
        reasons[name] = (
          f'the {side.stack} has {side.target.layers} of its'
          f' {side.config.layers} layers'
        )
        continue
      number = side.layers.index(layer)
      counterpart = layer_leaves.with_layer(name, str(number))
    counterpart = side.stack + counterpart.removeprefix(stack)
    if counterpart in filled and filled[counterpart].how == 'fresh':
      reasons[name] = f'{counterpart} is drawn fresh'
    elif block.CROSS.keys() & {*parts}:
      reasons[name] = 'the target has no cross-attention'
    elif encodes and parts[0] in side.config.head.modules:
      reasons[name] = 'an encoder has no head'
    elif encodes and '/'.join(parts) in side.shared_parts:
      reasons[name] = "the encoder reads the decoder's table"
    elif (
      not side.target.head.predicts_tokens
      and parts[0] in side.config.head.modules
    ):
      reasons[name] = f'the target has a head of {side.target.head.kind}'
    elif name == side.head:
      raise errors.UserError(
        f'{side.source} has a head of its own, and the target ties its head to'
        ' its embedding table, which would predict something else. Set'
        ' head.tied to False.'
      )
    else:
      raise side.misfit(
        f'{name} of {side.source} has no counterpart in the target:'
        f' {"; ".join(side.changed_fields)}.'
      )
  return reasons
