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
    encoder_source: config and parameters to copy the encoder from.
    decoder_source: the same for the decoder; None for the encoder's.
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
  sources = {
    'encoder_source': encoder_source,
    'decoder_source': decoder_source or encoder_source,
  }
  flat = {
    name: layer_leaves.flatten_checked(name, *source)
    for name, source in sources.items()
  }
  configs = {name: source[0] for name, source in sources.items()}
  coverage = weight_plan.make_plan(
    target,
    *configs.values(),
    cross_attention=cross_attention,
    post_norm_gain=post_norm_gain,
    fresh=fresh,
  )
  recipes = recipes_lib.make_recipes(target, coverage, configs)
  draws = any(fill.how == 'fresh' for fill in coverage.filled.values())

  def fill(flat, rng):
    trees = dict(flat)
    if draws:
      trees[recipes_lib.FRESH] = traverse_util.flatten_dict(
        parameters.init(target, rng), sep='/'
      )
    made = {path: recipe.make(trees, jnp) for path, recipe in recipes.items()}
    return traverse_util.unflatten_dict(made, sep='/')

  leaves = jax.tree.leaves((flat, rng))
  if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
    return jax.eval_shape(fill, flat, rng), coverage
  return fill(flat, rng), coverage


def from_scratch(
  target: model_config.ModelConfig, rng: jax.Array
) -> tuple[Params, coverage_lib.Coverage]:
  """Draws every weight by the model's own initialisation."""
  leaves = layer_leaves.leaves_of(target)
  coverage = coverage_lib.Coverage(
    target={name: leaf.shape for name, leaf in leaves.items()},
    filled={name: coverage_lib.Fill('fresh') for name in leaves},
    sources={},
    unused={},
    padding=parameters.padding(target),
  )
  return parameters.init(target, rng), coverage
