"""First parameters of an encoder-decoder, from decoder-only models.

The copy maps of Encoder-Decoder Gemma (arXiv 2504.06225, section 3): the
encoder and the decoder are the decoder-only stacks; cross-attention is
copied from the decoder's self-attention where the encoder is as wide as the
decoder ("balanced"), and drawn fresh otherwise.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import fnmatch
from typing import Any, Literal

from flax import traverse_util
import jax
from jax import numpy as jnp

from encdec_adapt.adaptation import coverage as coverage_lib
from encdec_adapt.adaptation import leaves as leaves_lib
from encdec_adapt.models import config as config_lib
from encdec_adapt.models import parameters
from encdec_adapt.runtime import errors

Params = dict[str, Any]
Source = tuple[config_lib.DecoderOnlyConfig, Params]
CrossAttention = Literal['auto', 'copy', 'fresh']
PostNormGain = Literal['one', 'zero']

# Where the parts of a decoder's cross-attention block come from, when they
# are copied from its self-attention block.
_CROSS = {
  'pre_cross_norm': 'pre_attention_norm',
  'cross_attention': 'attention',
  'post_cross_norm': 'post_attention_norm',
}
# Stored norm scales w stand for a gain 1 + w.
_GAINS = {'one': 0.0, 'zero': -1.0}


def initialise(
  target: config_lib.EncoderDecoderConfig,
  encoder_source: Source,
  decoder_source: Source | None = None,
  *,
  rng: jax.Array,
  cross_attention: CrossAttention = 'auto',
  post_norm_gain: PostNormGain = 'one',
  fresh: Sequence[str] = (),
) -> tuple[Params, coverage_lib.Coverage]:
  """Parameters of `target` from one or two decoder-only models.

  Can be traced: under `jax.jit` with `out_shardings` no replicated copy is
  made, and with ShapeDtypeStructs as parameters the result is
  ShapeDtypeStructs.

  Args:
    target: the model to fill.
    encoder_source: config and parameters that the encoder is copied from.
    decoder_source: the same for the decoder; None for the encoder's.
    rng: key of what is drawn fresh.
    cross_attention: 'copy' the decoder's self-attention with its norms, draw
      it 'fresh' (its pre-norm still copied), or 'auto': copy where the
      shapes allow.
    post_norm_gain: gain of fresh cross-attention's post-norm. 'zero' leaves
      the decoder's function unchanged until training moves it.
    fresh: shell patterns of leaves, named by layer, to draw fresh although
      they could be copied: 'encoder/*', 'decoder/layers/3/mlp/*'.

  Returns:
    Parameters, and the account of where each came from.

  Raises:
    UserError: sources that do not fit the target, with what would.
  """
  sources = {
    'encoder_source': encoder_source,
    'decoder_source': decoder_source or encoder_source,
  }
  flat = {
    name: leaves_lib.flatten_checked(name, *source)
    for name, source in sources.items()
  }
  configs = {name: source[0] for name, source in sources.items()}
  coverage = plan(
    target,
    configs['encoder_source'],
    configs['decoder_source'],
    cross_attention=cross_attention,
    post_norm_gain=post_norm_gain,
    fresh=fresh,
  )

  def fill(flat, rng):
    return _fill(target, coverage, configs, flat, rng)

  if any(
    isinstance(leaf, jax.ShapeDtypeStruct)
    for leaf in jax.tree.leaves((flat, rng))
  ):
    return jax.eval_shape(fill, flat, rng), coverage
  return fill(flat, rng), coverage


def fresh_except_embeddings(
  target: config_lib.EncoderDecoderConfig,
  encoder_source: Source,
  decoder_source: Source | None = None,
  *,
  rng: jax.Array,
) -> tuple[Params, coverage_lib.Coverage]:
  """The control with every weight fresh but the embedding tables.

  Args and Returns as `initialise`.
  """
  names = leaves_lib.leaves_of(target)
  return initialise(
    target,
    encoder_source,
    decoder_source,
    rng=rng,
    fresh=[name for name in names if '/embedder/' not in name],
  )


def from_scratch(
  target: config_lib.ModelConfig, rng: jax.Array
) -> tuple[Params, coverage_lib.Coverage]:
  """Every weight as the model's own initialisation draws it."""
  names = leaves_lib.leaves_of(target)
  account = coverage_lib.Coverage(
    target={name: leaf.shape for name, leaf in names.items()},
    filled={name: coverage_lib.Fill('fresh') for name in names},
    sources={},
    unused={},
  )
  account.check()
  return parameters.init(target, rng), account


def plan(
  target: config_lib.EncoderDecoderConfig,
  encoder_source: config_lib.DecoderOnlyConfig,
  decoder_source: config_lib.DecoderOnlyConfig | None = None,
  *,
  cross_attention: CrossAttention = 'auto',
  post_norm_gain: PostNormGain = 'one',
  fresh: Sequence[str] = (),
) -> coverage_lib.Coverage:
  """What `initialise` would do, from configs alone.

  Args, Returns and Raises as `initialise`.
  """
  decoder_source = decoder_source or encoder_source
  copies = _copies_cross(target, cross_attention, post_norm_gain)
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
    if name in redrawn:
      filled[name] = coverage_lib.Fill('fresh')
      continue
    fill = _fill_of(name, source, sources[source], copies, post_norm_gain)
    if fill is not None:
      if fill.how == 'copied':
        found = sources[source][fill.leaf]
        note = _fit(name, leaf, target, fill, found, stack)
        fill = dataclasses.replace(fill, note=note or fill.note)
      filled[name] = fill
  unused = {
    source: _unused(source, names, filled, target)
    for source, names in sources.items()
  }
  account = coverage_lib.Coverage(
    target={name: leaf.shape for name, leaf in targets.items()},
    filled=filled,
    sources={
      source: {name: leaf.shape for name, leaf in names.items()}
      for source, names in sources.items()
    },
    unused=unused,
    changes=tuple(
      change
      for stack, (name, source) in of_stack.items()
      for change in _changes(stack, target.stacks[stack], name, source)
    ),
  )
  account.check()
  return account


# --- Rules -----------------------------------------------------------------


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
  names = leaves_lib.leaves_of(target)
  block = 'decoder/layers/0'
  differing = [
    f'{part} is {list(names[f"{block}/attention/{part}"].shape)} in'
    f' self-attention and {list(names[f"{block}/cross_attention/{part}"].shape)}'
    ' in cross-attention'
    for part in ('query', 'key', 'value', 'output')
    if names[f'{block}/attention/{part}'].shape
    != names[f'{block}/cross_attention/{part}'].shape
  ]
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
  post_norm_gain: PostNormGain,
) -> coverage_lib.Fill | None:
  """The rule of one target leaf, None where no rule speaks of it."""
  parts = name.split('/')
  note = ''
  cross = [part for part in parts if part in _CROSS]
  if cross and not copies_cross:
    if cross[0] == 'cross_attention':
      return coverage_lib.Fill('fresh')
    if cross[0] == 'post_cross_norm':
      return coverage_lib.Fill(
        'constant', value=_GAINS[post_norm_gain], note=f'gain {post_norm_gain}'
      )
  leaf = '/'.join(['decoder', *(_CROSS.get(part, part) for part in parts[1:])])
  if leaf == 'decoder/head/table' and leaf not in leaves:
    leaf, note = 'decoder/embedder/table', 'the source ties its head to it'
  if leaf not in leaves:
    return None
  return coverage_lib.Fill('copied', source=source, leaf=leaf, note=note)


def _fit(
  name: str,
  leaf: leaves_lib.Leaf,
  target: config_lib.EncoderDecoderConfig,
  fill: coverage_lib.Fill,
  found: leaves_lib.Leaf,
  source: config_lib.StackConfig,
) -> str:
  """Checks shapes; returns the note on padding rows, '' if none.

  Raises:
    UserError: the shapes differ in more than a table's padding rows.
  """
  shape, have = leaf.shape, found.shape
  if shape == have and not _is_table(name):
    return ''
  stack = target.stacks[name.split('/')[0]]
  same_vocabulary = stack.vocab_size == source.vocab_size
  if _is_table(name) and shape[1:] == have[1:] and same_vocabulary:
    more = shape[0] - have[0]
    if not more:
      return ''
    return f'{abs(more)} padding rows {"added" if more > 0 else "dropped"}'
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
  stack: str,
  target: config_lib.StackConfig,
  name: str,
  source: config_lib.StackConfig,
) -> list[str]:
  """Settings that differ though the weights are the source's."""
  return [
    f'{stack}.{field.name} is {getattr(target, field.name)!r}, in {name}'
    f' {getattr(source, field.name)!r}'
    for field in dataclasses.fields(target)
    if getattr(target, field.name) != getattr(source, field.name)
  ]


def _is_table(name: str) -> bool:
  return name.endswith('/table')


# --- Carrying a plan out ---------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Origin:
  """A place in one of the trees that a target array is made of."""

  tree: str
  path: str
  index: int | None


def _fill(
  target: config_lib.EncoderDecoderConfig,
  coverage: coverage_lib.Coverage,
  configs: Mapping[str, config_lib.DecoderOnlyConfig],
  flat: Mapping[str, Mapping[str, jax.Array]],
  rng: jax.Array,
) -> Params:
  """Carries `coverage` out on flat source parameters."""
  targets = leaves_lib.leaves_of(target)
  names = {name: leaves_lib.leaves_of(c) for name, c in configs.items()}
  trees = dict(flat)
  if any(fill.how == 'fresh' for fill in coverage.filled.values()):
    trees['fresh'] = traverse_util.flatten_dict(
      parameters.init(target, rng), sep='/'
    )
  # The leaves of each stored array, in the order of its `layers` axis.
  stored: dict[str, list[str]] = {}
  for name in sorted(targets, key=lambda name: targets[name].index or 0):
    stored.setdefault(targets[name].path, []).append(name)
  params = {}
  for path, info in parameters.parameter_table(target).items():
    origins = []
    for name in stored[path]:
      fill = coverage.filled[name]
      if fill.how == 'copied':
        leaf = names[fill.source][fill.leaf]
        origins.append(_Origin(fill.source, leaf.path, leaf.index))
      elif fill.how == 'fresh':
        origins.append(_Origin('fresh', path, targets[name].index))
      else:
        origins.append(fill.value)
    layer_shape = targets[stored[path][0]].shape
    params[path] = _stored(info, layer_shape, origins, trees)
  return traverse_util.unflatten_dict(params, sep='/')


def _stored(
  info: parameters.ParamInfo,
  layer_shape: tuple[int, ...],
  origins: list[_Origin | float],
  trees: Mapping[str, Mapping[str, jax.Array]],
) -> jax.Array:
  """One stored array, from the origins of its layers."""
  whole = _whole(origins, trees, stacked=info.shape != layer_shape)
  if whole is not None:
    return _with_rows(whole, info.shape[0]).astype(info.dtype)
  layers = []
  for origin in origins:
    if isinstance(origin, _Origin):
      array = trees[origin.tree][origin.path]
      layers.append(array if origin.index is None else array[origin.index])
    else:
      layers.append(jnp.full(layer_shape, origin, info.dtype))
  # One layer may be stored with a `layers` axis of 1 or without one.
  return jnp.stack(layers).reshape(info.shape).astype(info.dtype)


def _whole(
  origins: list[_Origin | float],
  trees: Mapping[str, Mapping[str, jax.Array]],
  *,
  stacked: bool,
) -> jax.Array | None:
  """The array that the origins are all of, in order; else None.

  The usual case of equal layouts: the array passes through untouched
  instead of being cut into layers and stacked again.
  """
  first = origins[0]
  if not isinstance(first, _Origin):
    return None
  array = trees[first.tree][first.path]
  if not stacked:
    return array if first.index is None else None
  if first.index is None:
    return None
  in_order = [_Origin(first.tree, first.path, i) for i in range(len(array))]
  return array if origins == in_order else None


def _with_rows(array: jax.Array, rows: int) -> jax.Array:
  """Drops or adds (as zeros) padding rows of a vocabulary table."""
  if array.shape[0] >= rows:
    return array[:rows]
  padding = [(0, rows - array.shape[0])] + [(0, 0)] * (array.ndim - 1)
  return jnp.pad(array, padding)
