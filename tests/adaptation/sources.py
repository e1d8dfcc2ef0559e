"""Toy models that tests adapt."""

from flax import traverse_util
import jax
from jax import numpy as jnp
import numpy as np

from encdec_adapt.models import layer_leaves, model_config, parameters

STACK = model_config.StackConfig(
  layers=3,
  width=8,
  mlp_width=12,
  heads=4,
  kv_heads=2,
  head_dim=4,
  vocab_size=11,
  window=4,
  query_scale=4.0,
)
RNG = jax.random.key(7)


def make(stack, seed=0):
  """A decoder-only model in which no two arrays are alike, norms too."""
  config = model_config.DecoderOnlyConfig(stack)
  rng = np.random.default_rng(seed)
  flat = {
    path: jnp.asarray(0.3 * rng.normal(size=info.shape), info.dtype)
    for path, info in parameters.parameter_table(config).items()
  }
  return config, traverse_util.unflatten_dict(flat, sep='/')


def by_name(config, params):
  """Leaf name to array, cut out of the stored parameters."""
  flat = traverse_util.flatten_dict(params, sep='/')
  return {
    name: np.asarray(
      flat[leaf.path] if leaf.index is None else flat[leaf.path][leaf.index]
    )
    for name, leaf in layer_leaves.leaves_of(config).items()
  }


def quick_init(config, rng):
  """In the place of `parameters.init`, which takes 15 s to compile."""
  first = jnp.sum(jax.random.key_data(rng)).astype(jnp.float32)
  flat = {}
  for i, (path, info) in enumerate(parameters.parameter_table(config).items()):
    count = jnp.arange(np.prod(info.shape), dtype=info.dtype)
    flat[path] = jnp.sin(count + 10 * i + first).reshape(info.shape)
  return traverse_util.unflatten_dict(flat, sep='/')
