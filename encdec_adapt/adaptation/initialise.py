"""First parameters of an encoder-decoder, from decoder-only models.

The copy maps of Encoder-Decoder Gemma (arXiv 2504.06225, section 3): the
encoder and the decoder are the decoder-only stacks; cross-attention is
copied from the decoder's self-attention where the encoder is as wide as the
decoder ("balanced"), and drawn fresh otherwise.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from flax import traverse_util
import jax
from jax import numpy as jnp

from encdec_adapt.adaptation import coverage as coverage_lib
from encdec_adapt.adaptation import plan
from encdec_adapt.models import config as config_lib
from encdec_adapt.models import leaves as leaves_lib
from encdec_adapt.models import parameters

Params = dict[str, Any]
Source = tuple[config_lib.DecoderOnlyConfig, Params]


def initialise(
  target: config_lib.EncoderDecoderConfig,
  encoder_source: Source,
  decoder_source: Source | None = None,
  *,
  rng: jax.Array,
  cross_attention: plan.CrossAttention = 'auto',
  post_norm_gain: plan.PostNormGain = 'one',
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
  coverage = plan.make_plan(
    target,
    *configs.values(),
    cross_attention=cross_attention,
    post_norm_gain=post_norm_gain,
    fresh=fresh,
  )

  def fill(flat, rng):
    return _fill(target, coverage, configs, flat, rng)

  leaves = jax.tree.leaves((flat, rng))
  if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
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
