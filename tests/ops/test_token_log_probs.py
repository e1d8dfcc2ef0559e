"""Log-probabilities of tokens against dense ones, on one device and a mesh."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
import pytest

from encdec_adapt.ops import partition, vocabulary_loss
from encdec_adapt.planner import chips
from tests.ops import dense_loss
from tests.ops import test_vocabulary_loss as cases
from tests.planner import toy


def dense(hidden, table, targets, *, vocab_size, softcap, chunk, entropy):
  """All logits at once; the chunk means nothing."""
  del chunk
  scores = dense_loss.logits(
    hidden, table, vocab_size=vocab_size, softcap=softcap
  )
  log_probs = jax.nn.log_softmax(scores)
  chosen = jnp.take_along_axis(log_probs, targets[..., None], -1)[..., 0]
  entropies = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
  return (chosen, entropies) if entropy else chosen


def with_gradients(function, **options):
  """Returns values, and gradients of a sum with weights of both signs."""

  def total(hidden, table, targets, weights):
    values = function(hidden, table, targets, entropy=True, **options)
    return jnp.sum(weights * values[0] ** 2), values

  return jax.value_and_grad(total, argnums=(0, 1), has_aux=True)


@pytest.mark.parametrize('softcap', [None, 3.0])
def test_values_and_gradients_equal_dense(softcap):
  # 300 tokens in a table of 384 rows, and chunks that divide nothing.
  hidden, table, targets, _, _ = cases.make_case(
    2, 11, 8, V=384, vocab_size=300
  )
  # Weights of both signs, as advantages are.
  weights = jnp.asarray(np.random.default_rng(1).normal(size=targets.shape))
  options = dict(vocab_size=300, softcap=softcap, chunk=7)
  actual, expected = (
    jax.jit(with_gradients(function, **options))(
      hidden, table, targets, weights
    )
    for function in (vocabulary_loss.token_log_probs, dense)
  )
  # Gradients are sums of terms up to 150, where float32 has steps of 1.5e-5.
  cases.assert_same(actual, expected, rtol=1e-5, atol=5e-5)
  assert not np.any(actual[1][1][300:])


def test_without_entropies_the_log_probabilities_stand_alone():
  hidden, table, targets, _, _ = cases.make_case()
  options = dict(vocab_size=21, softcap=30.0, chunk=5)
  actual, expected = (
    jax.grad(lambda x, f=f: f(x, table, targets, **options)[0, :2].sum())(
      hidden
    )
    for f in (
      vocabulary_loss.token_log_probs,
      functools.partial(dense, entropy=False),
    )
  )
  cases.assert_same(actual, expected)


@pytest.mark.sharded
def test_a_sharded_table_equals_one_device():
  case = cases.mesh_case()[:4]
  run = with_gradients(
    vocabulary_loss.token_log_probs, vocab_size=13, softcap=5.0, chunk=3
  )
  vocab = ('fsdp', 'tensor')
  actual = cases.on_mesh((1, 2, 2, 2), run, vocab=vocab)(*case)
  cases.assert_same(actual, jax.jit(run)(*case))


@pytest.mark.aot
@toy.needs_libtpu
def test_memory_on_a_tpu_is_far_below_the_logits():
  """8 x 1024 tokens of Gemma 2 2B: 4.5 GiB, dense 41 GiB."""
  rows, length, width, vocab_size = 8, 1024, 2304, 256_128
  device = chips.devices_of(chips.parse('v5p:2x2x1'))[0]
  mesh = Mesh([device], 'x')
  one = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  rules = dict.fromkeys(('batch', 'length', 'vocab', 'embed'), ())
  shapes = [
    jax.ShapeDtypeStruct(shape, dtype, sharding=one)
    for shape, dtype in (
      ((rows, length, width), jnp.bfloat16),
      ((vocab_size, width), jnp.bfloat16),
      ((rows, length), jnp.int32),
    )
  ]

  def total(hidden, table, targets):
    return vocabulary_loss.token_log_probs(
      hidden, table, targets, vocab_size=vocab_size, softcap=30.0
    ).sum()

  def gradients(*arguments):
    with partition.use(mesh, rules):  # Products are chosen by the platform.
      return jax.grad(total, argnums=(0, 1))(*arguments)

  program = jax.jit(gradients).lower(*shapes).compile()
  logits = 4 * rows * length * vocab_size  # Bytes, 7.8 GiB.
  assert program.memory_analysis().temp_size_in_bytes < 0.6 * logits
