"""What an adaptation does, decided from configs alone: the copy rules."""

from collections.abc import Mapping, Sequence
import dataclasses
import fnmatch
import math
from typing import Literal

from encdec_adapt.adaptation import coverage as coverage_lib
from encdec_adapt.adaptation import steps as steps_lib
from encdec_adapt.cli import errors
from encdec_adapt.models import block, layer_leaves, model_config, parameters

CrossAttention = Literal['auto', 'copy', 'fresh']
PostNormGain = Literal['one', 'zero']

# Gain of a fresh cross-attention's post-norm.
_GAINS = {'one': 1.0, 'zero': 0.0}
# Leaves of attention that have key/value heads.
_KEYS_VALUES = ('key', 'value', 'key_bias', 'value_bias')
_TABLE = 'decoder/embedder/table'
_HEAD = 'decoder/head/table'


@dataclasses.dataclass(frozen=True)
class _Side:
  """One stack of the target, and the model that it is made of.

  Attributes:
    stack: its name, 'encoder' or 'decoder'.
    target: its config.
    source: name of its source.
    config: of the source's only stack.
    leaves: of the source.
  """

  stack: str
  target: model_config.StackConfig
  source: str
  config: model_config.StackConfig
  leaves: Mapping[str, layer_leaves.Leaf]

  @property
  def remedy(self) -> str:
    """How a target that does not fit is mended."""
    return (
      'Build the target from its sources with models.config.encoder_decoder'
      f' (config.model.{self.stack} is the shape of the source), or choose a'
      ' source of its shape.'
    )


def make_plan(
  target: model_config.EncoderDecoderConfig,
  encoder_source: model_config.DecoderOnlyConfig,
  decoder_source: model_config.DecoderOnlyConfig | None = None,
  *,
  cross_attention: CrossAttention = 'auto',
  post_norm_gain: PostNormGain = 'one',
  fresh: Sequence[str] = (),
) -> coverage_lib.Coverage:
  """Decides how each leaf of `target` is filled.

  Args:
    target: as of `initialise.initialise`, like the options.
    encoder_source: config of the encoder's source.
    decoder_source: of the decoder's; None for the encoder's.
    cross_attention: see there.
    post_norm_gain: see there.
    fresh: see there.

  Returns:
    The checked account.

  Raises:
    UserError: sources that do not fit the target, with what would.
  """
  sources = {
    'encoder': encoder_source,
    'decoder': decoder_source or encoder_source,
  }
  sides = {
    stack: _Side(
      stack,
      target.stacks[stack],
      f'{stack}_source',
      source.decoder,
      layer_leaves.leaves_of(source),
    )
    for stack, source in sources.items()
  }
  copies = _copies_cross(target, cross_attention, post_norm_gain)
  offset = 1.0 if target.decoder.norm_gain == 'one_plus' else 0.0
  gain = coverage_lib.Fill(
    'constant',
    value=_GAINS[post_norm_gain] - offset,
    note=f'gain {post_norm_gain}',
  )
  targets = layer_leaves.leaves_of(target)
  redrawn = _matching(fresh, targets)
  for side in sides.values():
    _check_layers(side)
  filled = {}
  for name, leaf in targets.items():
    side = sides[name.split('/')[0]]
    fill = coverage_lib.Fill('fresh')
    if name not in redrawn:
      fill = _fill_of(name, side, copies, gain)
    if fill.how == 'copied':
      fill = dataclasses.replace(fill, steps=_steps(name, leaf, side, fill))
    filled[name] = fill
  account = coverage_lib.Coverage(
    target=_shapes(targets),
    filled=filled,
    sources={side.source: _shapes(side.leaves) for side in sides.values()},
    unused={
      side.source: _unused(side, filled, target) for side in sides.values()
    },
    changes=_changes(target, sides.values()),
    padding=parameters.padding(target),
  )
  account.check()
  return account


def all_but_embeddings(target: model_config.EncoderDecoderConfig) -> list[str]:
  """What is `fresh` where only the embedding tables are copied."""
  names = layer_leaves.leaves_of(target)
  return [name for name in names if '/embedder/' not in name]


def _shapes(
  names: Mapping[str, layer_leaves.Leaf],
) -> dict[str, tuple[int, ...]]:
  return {name: leaf.shape for name, leaf in names.items()}


def _copies_cross(
  target: model_config.EncoderDecoderConfig,
  cross_attention: CrossAttention,
  post_norm_gain: PostNormGain,
) -> bool:
  """Whether cross-attention is copied from self-attention."""
  if cross_attention not in ('auto', 'copy', 'fresh'):
    raise errors.UserError(
      f"cross_attention is {cross_attention!r}; it is 'auto', 'copy' or"
      " 'fresh'."
    )
  if post_norm_gain not in _GAINS:
    raise errors.UserError(
      f"post_norm_gain is {post_norm_gain!r}; it is 'one' or 'zero'."
    )
  decoder = target.decoder
  if decoder.cross_merged:
    if cross_attention != 'auto' or post_norm_gain != 'one':
      raise errors.UserError(
        f'cross_attention={cross_attention!r} and'
        f' post_norm_gain={post_norm_gain!r} are of cross-attention with'
        ' weights of its own, and merged attention (cross_merged) reads the'
        " encoder with self-attention's; leave them at 'auto' and 'one'."
      )
    return False
  if post_norm_gain != 'one' and not decoder.post_norms:
    raise errors.UserError(
      f'post_norm_gain={post_norm_gain!r} needs a decoder with norms after'
      " cross-attention, and this one has none; leave it at 'one'."
    )
  differing = _differing(target)
  if cross_attention == 'copy' and differing:
    raise errors.UserError(
      "cross_attention='copy' needs an encoder as wide as the decoder, and"
      f' the widths are {target.encoder.width} and {target.decoder.width}:'
      f" {', '.join(differing)}. Use cross_attention='fresh' (or 'auto') with"
      ' a warm-up in which only cross-attention moves.'
    )
  copies = cross_attention != 'fresh' and not differing
  if copies and post_norm_gain != 'one':
    raise errors.UserError(
      f'post_norm_gain={post_norm_gain!r} is for fresh cross-attention, and'
      f' cross_attention={cross_attention!r} copies it (its post-norm too).'
      " Set cross_attention='fresh', or leave post_norm_gain at 'one'."
    )
  return copies


def _differing(target: model_config.EncoderDecoderConfig) -> list[str]:
  """Kernels whose shapes differ in self- and cross-attention."""
  decoder = target.decoder
  names = layer_leaves.leaves_of(target)
  layer = next(
    i
    for i in range(decoder.layers)
    if decoder.reads_encoder(decoder.layer_kind(i))
  )
  differing = []
  for part in ('query', 'key', 'value', 'output'):
    own, cross = (
      list(names[f'decoder/layers/{layer}/{module}/{part}'].shape)
      for module in ('attention', 'cross_attention')
    )
    if own != cross:
      differing.append(
        f'{part} is {own} in self-attention and {cross} in cross-attention'
      )
  return differing


def _fill_of(
  name: str, side: _Side, copies_cross: bool, post_norm: coverage_lib.Fill
) -> coverage_lib.Fill:
  """The rule of one target leaf.

  Raises:
    UserError: the source has no such leaf.
  """
  parts = name.split('/')
  cross = [part for part in parts if part in block.CROSS]
  if cross and not copies_cross:
    if cross[0] == 'cross_attention':
      return coverage_lib.Fill('fresh')
    if cross[0] == 'post_cross_norm':
      return post_norm
  own = [block.CROSS.get(part, part) for part in parts[1:]]
  leaf, note = '/'.join(['decoder', *own]), ''
  if leaf == _HEAD and leaf not in side.leaves:
    leaf, note = _TABLE, 'the source ties its head to it'
  elif leaf == 'decoder/embedder/eoi' and leaf not in side.leaves:
    leaf, note = _TABLE, 'what the token was embedded as'
  if leaf not in side.leaves:
    raise errors.UserError(
      f'{name} of the target has no counterpart in {side.source}:'
      f' {_differences(side)}. {side.remedy}'
    )
  return coverage_lib.Fill('copied', source=side.source, leaf=leaf, note=note)


def _differences(side: _Side) -> str:
  """The fields in which a stack differs from its source."""
  found = _changed_fields(side)
  return '; '.join(found) or 'though their configs are alike'


def _steps(
  name: str, leaf: layer_leaves.Leaf, side: _Side, fill: coverage_lib.Fill
) -> tuple[steps_lib.Step, ...]:
  """What makes the source's leaf the target's.

  Raises:
    UserError: the shapes differ in what no step changes.
  """
  shape, have = leaf.shape, side.leaves[fill.leaf].shape
  target, source = side.target, side.config
  if fill.leaf.endswith('/table') and shape[-1:] == have[-1:]:
    done = _table_steps(name, side, have[0])
    if name.endswith('/eoi'):
      scale = math.sqrt(source.width) if source.scale_embeddings else 1.0
      done += (steps_lib.Row(target.eoi_token, scale),)
    return done
  if name.endswith('/eoi') and target.eoi_token != source.eoi_token:
    raise errors.UserError(
      f"{side.stack}.eoi_token is {target.eoi_token}, and {side.source}'s is"
      f' {source.eoi_token}: its vector is of another token. {side.remedy}'
    )
  if shape == have:
    return ()
  if name.rpartition('/')[2] in _KEYS_VALUES:
    times, rest = divmod(target.kv_heads, source.kv_heads)
    if rest or not times:
      raise errors.UserError(
        f'{side.stack}.kv_heads is {target.kv_heads}, no multiple of the'
        f' {source.kv_heads} of {side.source}. Key/value heads are repeated,'
        ' never joined: choose a multiple that divides'
        f' {side.stack}.heads ({target.heads}).'
      )
    if (*have[:-2], times * have[-2], have[-1]) == shape:
      return (steps_lib.RepeatHeads(times),)
  raise errors.UserError(
    f'{name} has shape {list(shape)}, and {fill.leaf} of {fill.source} has'
    f' {list(have)}. {side.remedy} Or draw the leaf fresh with'
    f' fresh=({name!r},).'
  )


def _table_steps(
  name: str, side: _Side, source_rows: int
) -> tuple[steps_lib.Step, ...]:
  """What fits a table's rows to the target's.

  Raises:
    UserError: the target has fewer tokens.
  """
  target, source = side.target, side.config
  if target.vocab_size < source.vocab_size:
    raise errors.UserError(
      f'{name}: {side.stack}.vocab_size is {target.vocab_size}, and'
      f' {side.source} has {source.vocab_size} tokens. A vocabulary can be'
      f' extended, not cut: set it to {source.vocab_size} or more.'
    )
  same = target.vocab_size == source.vocab_size
  if same and target.table_rows == source_rows:
    return ()
  fitted = steps_lib.FitTable(
    source.vocab_size, target.vocab_size, source_rows, target.table_rows
  )
  return (fitted,)


def _check_layers(side: _Side) -> None:
  if side.target.layers != side.config.layers:
    raise errors.UserError(
      f"the target's {side.stack} has {side.target.layers} layers and"
      f' {side.source} has {side.config.layers}; build the target from its'
      ' sources with models.config.encoder_decoder, or choose a source with'
      f' {side.target.layers} layers.'
    )


def _matching(
  patterns: Sequence[str], names: Mapping[str, layer_leaves.Leaf]
) -> set[str]:
  """Leaves that any pattern matches; each pattern must match one."""
  if isinstance(patterns, str):
    raise errors.UserError(
      f'fresh is the text {patterns!r}; it is a sequence of patterns:'
      f' ({patterns!r},).'
    )
  matched = set()
  for pattern in patterns:
    found = fnmatch.filter(names, pattern)
    if not found:
      raise errors.UserError(
        f'fresh pattern {pattern!r} matches no parameter; they are named like'
        f' {next(iter(names))!r} and'
        f' {next(n for n in names if "/layers/" in n)!r}.'
      )
    matched.update(found)
  return matched


def _unused(
  side: _Side,
  filled: Mapping[str, coverage_lib.Fill],
  target: model_config.EncoderDecoderConfig,
) -> dict[str, str]:
  """Reasons for the leaves of a source that fill nothing.

  Raises:
    UserError: there is none: the target's function would not be the source's.
  """
  used = {fill.leaf for fill in filled.values() if fill.source == side.source}
  reasons = {}
  for name in side.leaves:
    if name in used:
      continue
    own = side.stack + name.removeprefix('decoder')
    if own in filled and filled[own].how == 'fresh':
      reasons[name] = f'{own} is drawn fresh'
    elif side.stack == 'encoder' and name == _HEAD:
      reasons[name] = 'an encoder has no head'
    elif (
      side.stack == 'encoder'
      and target.shared_table
      and name.startswith('decoder/embedder/')
    ):
      reasons[name] = "the encoder reads the decoder's table"
    elif name == _HEAD:
      raise errors.UserError(
        f'{side.source} has a head of its own, and the target ties its head to'
        ' its embedding table, which would predict something else. Set'
        f' {side.stack}.tied_head to False.'
      )
    else:
      raise errors.UserError(
        f'{name} of {side.source} has no counterpart in the target:'
        f' {_differences(side)}. {side.remedy}'
      )
  return reasons


def _changes(
  target: model_config.EncoderDecoderConfig, sides: Sequence[_Side]
) -> tuple[str, ...]:
  """Settings that differ though the weights are the source's."""
  lines = [line for side in sides for line in _changed_fields(side)]
  if target.shared_table:
    lines.append("the encoder reads the decoder's embedding table")
  return tuple(lines)


def _changed_fields(side: _Side) -> list[str]:
  return [
    f'{side.stack}.{field} is {ours!r}, in {side.source} {theirs!r}'
    for field, ours in vars(side.target).items()
    if ours != (theirs := getattr(side.config, field))
  ]
