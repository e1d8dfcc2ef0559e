"""What an adaptation does, decided from configs alone: the copy rules."""

from collections.abc import Mapping, Sequence
import dataclasses
import fnmatch
from typing import Literal

from encdec_adapt.adaptation import coverage as coverage_lib
from encdec_adapt.models import block
from encdec_adapt.models import config as config_lib
from encdec_adapt.models import leaves as leaves_lib
from encdec_adapt.runtime import errors

CrossAttention = Literal['auto', 'copy', 'fresh']
PostNormGain = Literal['one', 'zero']

# Gain of a fresh cross-attention's post-norm.
_GAINS = {'one': 1.0, 'zero': 0.0}


def make_plan(
  target: config_lib.EncoderDecoderConfig,
  encoder_source: config_lib.DecoderOnlyConfig,
  decoder_source: config_lib.DecoderOnlyConfig | None = None,
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
  decoder_source = decoder_source or encoder_source
  copies = _copies_cross(target, cross_attention, post_norm_gain)
  offset = 1.0 if target.decoder.norm_gain == 'one_plus' else 0.0
  gain = coverage_lib.Fill(
    'constant',
    value=_GAINS[post_norm_gain] - offset,
    note=f'gain {post_norm_gain}',
  )
  targets = leaves_lib.leaves_of(target)
  redrawn = _matching(fresh, targets)
  sources = {
    'encoder_source': leaves_lib.leaves_of(encoder_source),
    'decoder_source': leaves_lib.leaves_of(decoder_source),
  }
  of_stack = {
    'encoder': ('encoder_source', encoder_source.decoder),
    'decoder': ('decoder_source', decoder_source.decoder),
  }
  for stack, (name, source) in of_stack.items():
    _check_layers(stack, target.stacks[stack], name, source)
  filled = {}
  for name, leaf in targets.items():
    source, stack = of_stack[name.split('/')[0]]
    fill = coverage_lib.Fill('fresh')
    if name not in redrawn:
      fill = _fill_of(name, source, sources[source], copies, gain)
    if fill is not None:
      found = sources[source].get(fill.leaf)
      filled[name] = _fitted(name, leaf, target, fill, found, stack)
  account = coverage_lib.Coverage(
    target=_shapes(targets),
    filled=filled,
    sources={source: _shapes(names) for source, names in sources.items()},
    unused={
      source: _unused(source, names, filled, target)
      for source, names in sources.items()
    },
    changes=_changes(target, of_stack),
  )
  account.check()
  return account


def _shapes(
  names: Mapping[str, leaves_lib.Leaf],
) -> dict[str, tuple[int, ...]]:
  return {name: leaf.shape for name, leaf in names.items()}


def _copies_cross(
  target: config_lib.EncoderDecoderConfig,
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
  if post_norm_gain != 'one' and not decoder.post_norms:
    raise errors.UserError(
      f'post_norm_gain={post_norm_gain!r} needs a decoder with norms after'
      " cross-attention, and this one has none; leave it at 'one'."
    )
  if decoder.cross_merged or target.shared_table:
    raise errors.UserError(
      'adaptation to merged attention or a shared embedding table is not'
      ' available; set config.model.cross_merged and shared_table to False.'
    )
  names = leaves_lib.leaves_of(target)
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


def _fill_of(
  name: str,
  source: str,
  leaves: Mapping[str, leaves_lib.Leaf],
  copies_cross: bool,
  post_norm: coverage_lib.Fill,
) -> coverage_lib.Fill | None:
  """The rule of one target leaf, None where no rule speaks of it."""
  parts = name.split('/')
  note = ''
  cross = [part for part in parts if part in block.CROSS]
  if cross and not copies_cross:
    if cross[0] == 'cross_attention':
      return coverage_lib.Fill('fresh')
    if cross[0] == 'post_cross_norm':
      return post_norm
  own = [block.CROSS.get(part, part) for part in parts[1:]]
  leaf = '/'.join(['decoder', *own])
  if leaf == 'decoder/head/table' and leaf not in leaves:
    leaf, note = 'decoder/embedder/table', 'the source ties its head to it'
  if leaf not in leaves:
    return None
  return coverage_lib.Fill('copied', source=source, leaf=leaf, note=note)


def _fitted(
  name: str,
  leaf: leaves_lib.Leaf,
  target: config_lib.EncoderDecoderConfig,
  fill: coverage_lib.Fill,
  found: leaves_lib.Leaf | None,
  source: config_lib.StackConfig,
) -> coverage_lib.Fill:
  """Checks the shape of a copy; returns it, padding rows noted.

  Raises:
    UserError: the shapes differ in more than a table's padding rows.
  """
  if found is None:  # Nothing is copied.
    return fill
  shape, have = leaf.shape, found.shape
  stack = target.stacks[name.split('/')[0]]
  same_vocabulary = stack.vocab_size == source.vocab_size
  if not _is_table(name):
    if shape == have:
      return fill
  elif shape[1:] == have[1:] and same_vocabulary:
    more = shape[0] - have[0]
    if not more:
      return fill
    what = 'added' if more > 0 else 'dropped'
    note = f'{abs(more)} padding rows {what}'
    return dataclasses.replace(
      fill, note=f'{fill.note}; {note}' if fill.note else note
    )
  vocabulary = (
    f' (vocabularies of {stack.vocab_size} and {source.vocab_size} tokens)'
    if _is_table(name) and not same_vocabulary
    else ''
  )
  raise errors.UserError(
    f'{name} has shape {list(shape)}, and {fill.leaf} of {fill.source} has'
    f' {list(have)}{vocabulary}. Build the target from the sources with'
    ' models.config.encoder_decoder, choose a source of its shape, or draw'
    f' the leaf fresh with fresh=({name!r},).'
  )


def _check_layers(
  stack: str,
  target: config_lib.StackConfig,
  name: str,
  source: config_lib.StackConfig,
) -> None:
  if target.layers != source.layers:
    raise errors.UserError(
      f"the target's {stack} has {target.layers} layers and {name} has"
      f' {source.layers}; build the target from its sources with'
      ' models.config.encoder_decoder, or choose a source with'
      f' {target.layers} layers.'
    )


def _matching(
  patterns: Sequence[str], names: Mapping[str, leaves_lib.Leaf]
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
  source: str,
  names: Mapping[str, leaves_lib.Leaf],
  filled: Mapping[str, coverage_lib.Fill],
  target: config_lib.EncoderDecoderConfig,
) -> dict[str, str]:
  """Reasons for the leaves of a source that fill nothing."""
  stack = source.removesuffix('_source')
  used = {fill.leaf for fill in filled.values() if fill.source == source}
  reasons = {}
  for name in names:
    if name in used:
      continue
    own = stack + name.removeprefix('decoder')
    if own in filled and filled[own].how == 'fresh':
      reasons[name] = f'{own} is drawn fresh'
    elif name == 'decoder/head/table' and stack == 'encoder':
      reasons[name] = 'an encoder has no head'
    elif name == 'decoder/head/table' and target.decoder.tied_head:
      reasons[name] = "the target's head is tied to its embedding table"
  return reasons


def _changes(
  target: config_lib.EncoderDecoderConfig,
  of_stack: Mapping[str, tuple[str, config_lib.StackConfig]],
) -> tuple[str, ...]:
  """Settings that differ though the weights are the source's."""
  return tuple(
    f'{stack}.{field} is {ours!r}, in {name} {theirs!r}'
    for stack, (name, source) in of_stack.items()
    for field, ours in vars(target.stacks[stack]).items()
    if ours != (theirs := getattr(source, field))
  )


def _is_table(name: str) -> bool:
  return name.endswith('/table')
