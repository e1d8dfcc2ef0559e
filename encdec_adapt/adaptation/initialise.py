"""Initial parameters of an encoder-decoder, from decoder-only models.

The copy maps of Encoder-Decoder Gemma (arXiv 2504.06225, section 3): the
encoder and the decoder are the decoder-only stacks; cross-attention is
copied from the decoder's self-attention where the encoder is as wide as the
decoder ("balanced"), and drawn fresh otherwise.
"""

from collections.abc import Collection
from typing import Any

from flax import traverse_util
import jax
from jax import numpy as jnp

from encdec_adapt.adaptation import coverage as coverage_lib
from encdec_adapt.adaptation import recipes as recipes_lib
from encdec_adapt.adaptation import weight_plan
from encdec_adapt.models import layer_leaves, model_config, parameters

Params = dict[str, Any]
Source = tuple[model_config.DecoderOnlyConfig, Params]


def initialise(
  target: model_config.EncoderDecoderConfig,
  encoder_source: Source,
  decoder_source: Source | None = None,
  *,
  rng: jax.Array,
  cross_attention: weight_plan.CrossAttention = 'auto',
  post_norm_gain: weight_plan.PostNormGain = 'one',
  fresh: Collection[str] = (),
) -> tuple[Params, coverage_lib.Coverage]:
  """Makes parameters of `target` from one or two decoder-only models.

  Can be traced: under `jax.jit` with `out_shardings` no replicated copy is
  made, and with ShapeDtypeStructs as parameters the result is
  ShapeDtypeStructs.

  Args:
    target: the model to fill.
    encoder_source: config and parameters of the encoder's source.
    decoder_source: config and parameters of the decoder's source; None for the
      encoder's.
    rng: key for the fresh parameters.
    cross_attention: 'copy' the decoder's self-attention with its norms, draw
      it 'fresh' (its pre-norm still copied), or 'auto': copy where the
      shapes allow.
    post_norm_gain: gain of the post-norm of fresh cross-attention. 'zero'
      leaves the decoder's function unchanged until training moves it.
    fresh: leaves, named by layer, to draw fresh although they could be
      copied, such as 'decoder/layers/3/mlp/up'.

  Returns:
    The parameters and the coverage report.

  Raises:
    UserError: the sources do not fit the target; names a remedy.
  """
  configs = [encoder_source[0], (decoder_source or encoder_source)[0]]
  coverage = weight_plan.make_plan(
    target,
    *configs,
    cross_attention=cross_attention,
    post_norm_gain=post_norm_gain,
    fresh=fresh,
  )
  params = fill(target, coverage, encoder_source, decoder_source, rng=rng)
  return params, coverage


def fill(
  target: model_config.EncoderDecoderConfig,
  coverage: coverage_lib.Coverage,
  encoder_source: Source,
  decoder_source: Source | None = None,
  *,
  rng: jax.Array,
) -> Params:
  """Makes the parameters that a plan describes; see `initialise`.

  Args:
    target: the model to fill.
    coverage: the plan, made by `weight_plan.make_plan` for these sources.
    encoder_source: config and parameters of the encoder's source.
    decoder_source: config and parameters of the decoder's source; None for the
      encoder's.
    rng: key of the fresh parameters.
  """
  sources = {
    'encoder_source': encoder_source,
    'decoder_source': decoder_source or encoder_source,
  }
  flat = {
    name: layer_leaves.flatten_checked(name, *source)
    for name, source in sources.items()
  }
  configs = {name: source[0] for name, source in sources.items()}
  recipes = recipes_lib.make_recipes(target, coverage, configs)
  draws = any(fill.how == 'fresh' for fill in coverage.filled.values())

  def make(flat, rng):
    trees = dict(flat)
    if draws:
      trees[recipes_lib.FRESH] = traverse_util.flatten_dict(
        parameters.init(target, rng), sep='/'
      )
    made = {path: recipe.make(trees, jnp) for path, recipe in recipes.items()}
    return traverse_util.unflatten_dict(made, sep='/')

  leaves = jax.tree.leaves((flat, rng))
  if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
    return jax.eval_shape(make, flat, rng)
  return make(flat, rng)


def coverage_from_scratch(
  target: model_config.ModelConfig,
) -> coverage_lib.Coverage:
  """Returns the coverage of a model whose every weight is drawn fresh."""
  names = layer_leaves.leaves_of(target)
  coverage = coverage_lib.Coverage(
    target={name: leaf.shape for name, leaf in names.items()},
    filled={name: coverage_lib.Fill('fresh') for name in names},
    sources={},
    unused={},
    padding=parameters.padding(target),
  )
  return coverage
