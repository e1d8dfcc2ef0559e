"""Toy models that tests adapt, and their adaptation."""

from flax import traverse_util
import jax
from jax import numpy as jnp
import numpy as np

from encdec_adapt.adaptation import recipes, weight_plan
from encdec_adapt.models import layer_leaves, model_config, parameters
from tests import toy_models

STACK = toy_models.stack(
  layers=3, width=8, mlp_width=12, head_dim=4, vocab_size=11, query_scale=4.0
)
RNG = jax.random.key(7)


def make(stack, seed=0):
  """A decoder-only model in which no two arrays are alike, norms too."""
  config = model_config.DecoderOnlyConfig(stack)
  return config, toy_models.params(config, seed, scale=0.3)


def adapt(target, *given, **options):
  """Parameters of the target, and a report that covers each leaf once."""
  configs = [config for config, _ in given]
  coverage = weight_plan.make_plan(target, *configs, **options)
  assert coverage.filled.keys() == coverage.target.keys()
  for source, shapes in coverage.sources.items():
    named = [*coverage.used(source), *coverage.unused[source]]
    assert sorted(named) == sorted(shapes)

  @jax.jit  # Many small programs are slow to compile.
  def fill(trees, rng):
    pairs = zip(configs, trees, strict=True)
    return recipes.fill(target, coverage, *pairs, rng=rng)

  made = fill([params for _, params in given], RNG)
  flat = traverse_util.flatten_dict(made, sep='/')
  table = parameters.parameter_table(target)
  assert {path: (x.shape, x.dtype) for path, x in flat.items()} == {
    path: (info.shape, info.dtype) for path, info in table.items()
  }
  return made, coverage


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
