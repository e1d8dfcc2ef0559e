"""The one-pass cross-entropy against the dense one, alone and on meshes."""

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.ops import vocabulary_loss
from tests.ops import dense_loss
from tests.ops.loss_cases import MESHES, assert_same, on_mesh


def make_case(B=2, T=7, D=8, V=24, vocab_size=21, dtype=jnp.float32, seed=0):
  """Hidden states, table, targets and unequal weights with zeros."""
  # Drawn by numpy: jax would compile a program per shape.
  rng = np.random.default_rng(seed)
  hidden = jnp.asarray(rng.normal(size=(B, T, D)), dtype)
  table = jnp.asarray(2 * rng.normal(size=(V, D)), jnp.float32)
  targets = jnp.asarray(rng.integers(vocab_size, size=(B, T)), jnp.int32)
  weights = np.maximum(rng.normal(size=(B, T)) + 0.5, 0.0)
  weights = jnp.asarray(weights, jnp.float32)
  return hidden, table, targets, weights


def with_gradients(loss, jit=True, **options):
  """(sums, gradients of total in hidden, table and weights)."""

  def total(hidden, table, weights, targets):
    sums = loss(hidden, table, targets, weights, **options)
    return 3.0 * sums.total, sums

  def run(hidden, table, targets, weights):
    gradients, sums = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(
      hidden, table, weights, targets
    )
    return sums, gradients

  return run if not jit else jax.jit(run)


def test_literal_value():
  # Two tokens of logits (ln 1, ln 3): p = (1/4, 3/4).
  hidden = jnp.array([[[1.0], [1.0]]])
  table = jnp.log(jnp.array([[1.0], [3.0]]))
  sums = vocabulary_loss.cross_entropy(
    hidden,
    table,
    jnp.array([[0, 1]]),
    jnp.array([[1.0, 2.0]]),
    vocab_size=2,
    z_loss=0.5,
  )
  z = 3 * 0.5 * np.log(4) ** 2
  np.testing.assert_allclose(sums.z_loss, z, rtol=1e-6)
  np.testing.assert_allclose(
    sums.cross_entropy, np.log(4) + 2 * np.log(4 / 3), rtol=1e-6
  )
  np.testing.assert_allclose(sums.total, sums.cross_entropy + z, rtol=1e-6)
  assert float(sums.correct) == 2.0
  assert float(sums.weight) == 3.0


@pytest.mark.parametrize(
  'chunk, softcap, z_loss, label_smoothing',
  [(5, None, 0.0, 0.0), (64, 3.0, 1e-2, 0.0), (5, 3.0, 1e-2, 0.2)],
)
def test_equals_dense(chunk, softcap, z_loss, label_smoothing):
  case = make_case()
  options = dict(
    vocab_size=21,
    softcap=softcap,
    z_loss=z_loss,
    label_smoothing=label_smoothing,
  )
  actual = with_gradients(
    vocabulary_loss.cross_entropy, chunk=chunk, **options
  )(*case)
  expected = with_gradients(dense_loss.cross_entropy, **options)(*case)
  assert_same(actual, expected)


@settings(max_examples=8, deadline=None)
@given(
  B=st.integers(1, 3),
  T=st.integers(1, 6),
  D=st.integers(1, 5),
  vocab_size=st.integers(1, 9),
  padding=st.integers(0, 4),
  chunk=st.integers(1, 20),
  seed=st.integers(0, 2**30),
)
def test_equals_dense_for_any_shape(B, T, D, vocab_size, padding, chunk, seed):
  case = make_case(B, T, D, vocab_size + padding, vocab_size, seed=seed)
  options = dict(vocab_size=vocab_size, softcap=5.0, z_loss=1e-3)
  actual = with_gradients(
    vocabulary_loss.cross_entropy, chunk=chunk, **options
  )(*case)
  expected = with_gradients(dense_loss.cross_entropy, **options)(*case)
  assert_same(actual, expected, rtol=1e-4, atol=1e-4)


def test_bfloat16_products_keep_float32_sums_and_table_gradient():
  case = make_case(dtype=jnp.bfloat16)
  options = dict(vocab_size=21, softcap=30.0)
  sums, gradients = with_gradients(
    vocabulary_loss.cross_entropy, chunk=4, **options
  )(*case)
  expected_sums, expected = with_gradients(dense_loss.cross_entropy, **options)(
    *case
  )
  assert gradients[0].dtype == jnp.bfloat16
  assert gradients[1].dtype == jnp.float32
  # The logits are the same products; only the gradients are rounded.
  assert_same(sums, expected_sums)
  assert_same(gradients, expected, rtol=2e-2, atol=6e-2)


@pytest.mark.parametrize('softcap', [None, 30.0])
def test_large_logits_stay_finite(softcap):
  hidden, table, targets, weights = make_case()
  case = (300 * hidden, table, targets, weights)
  options = dict(vocab_size=21, softcap=softcap)
  actual, gradients = with_gradients(vocabulary_loss.cross_entropy, **options)(
    *case
  )
  sums, expected = with_gradients(dense_loss.cross_entropy, **options)(*case)
  # Saturated scores tie, and the dense argmax takes the first of them.
  actual = actual.replace(correct=sums.correct)
  assert_same((actual, gradients), (sums, expected), rtol=1e-4, atol=1e-3)


def test_padding_rows_change_nothing():
  hidden, table, targets, weights = make_case()
  run = with_gradients(
    vocabulary_loss.cross_entropy, vocab_size=21, label_smoothing=0.1
  )
  sums, gradients = run(hidden, table, targets, weights)
  other_table = table.at[21:].set(1e4)
  other_sums, other_gradients = run(hidden, other_table, targets, weights)
  assert_same((sums, gradients), (other_sums, other_gradients), rtol=0, atol=0)
  assert not np.any(gradients[1][21:])
  assert np.all(np.any(gradients[1][:21], axis=-1))


def test_microbatches_add_up_to_the_batch():
  case = make_case(B=4)
  run = with_gradients(vocabulary_loss.cross_entropy, vocab_size=21, chunk=3)
  hidden, table, targets, weights = case
  whole, (_, dtable, _) = run(*case)
  parts = [
    run(hidden[i : i + 1], table, targets[i : i + 1], weights[i : i + 1])
    for i in range(4)
  ]
  sums = jax.tree.map(lambda *leaves: sum(leaves), *(p[0] for p in parts))
  assert_same(sums, whole)
  assert_same(sum(p[1][1] for p in parts), dtable)


def test_target_outside_the_vocabulary_gives_nan_only_where_it_weighs():
  hidden, table, targets, weights = make_case()
  for wrong in (-1, 21, 24):
    targets = targets.at[0, 0].set(wrong)
    for weight, expected in ((0.0, False), (1.0, True)):
      sums = vocabulary_loss.cross_entropy(
        hidden,
        table,
        targets,
        weights.at[0, 0].set(weight),
        vocab_size=21,
      )
      assert bool(jnp.isnan(sums.total)) == expected


@pytest.mark.parametrize(
  'options,message',
  [
    (dict(vocab_size=25), 'vocab_size=25'),
    (dict(vocab_size=0), 'vocab_size=0'),
    (dict(vocab_size=21, softcap=0.0), 'softcap=0.0'),
    (dict(vocab_size=21, label_smoothing=1.0), 'label_smoothing=1.0'),
    (dict(vocab_size=21, chunk=0), 'chunk=0'),
  ],
)
def test_bad_arguments(options, message):
  with pytest.raises(ValueError, match=message):
    vocabulary_loss.cross_entropy(*make_case(), **options)


def compiled(loss, *, grad, N=256, V=4096, D=16, **options):
  """The compiled loss, or its gradient, of N tokens."""
  float32 = jnp.float32
  arguments = (
    jax.ShapeDtypeStruct((1, N, D), float32),
    jax.ShapeDtypeStruct((V, D), float32),
    jax.ShapeDtypeStruct((1, N), jnp.int32),
    jax.ShapeDtypeStruct((1, N), float32),
  )

  def total(hidden, table, targets, weights):
    return loss(hidden, table, targets, weights, vocab_size=V, **options).total

  function = jax.grad(total, argnums=grad) if grad is not None else total
  return jax.jit(function).lower(*arguments).compile()


def test_memory_does_not_hold_all_logits():
  logits_bytes = 256 * 4096 * 4
  one_pass = compiled(
    vocabulary_loss.cross_entropy, grad=(0, 1), chunk=16, softcap=30.0
  )
  dense = compiled(dense_loss.cross_entropy, grad=(0, 1), softcap=30.0)
  assert dense.memory_analysis().temp_size_in_bytes >= logits_bytes
  assert one_pass.memory_analysis().temp_size_in_bytes < logits_bytes / 2


def test_no_gradient_work_unless_asked():
  def flops(grad):
    program = compiled(vocabulary_loss.cross_entropy, grad=grad, chunk=256)
    return program.cost_analysis()['flops']

  product = 2 * 256 * 4096 * 16
  both, frozen_table, value = flops((0, 1)), flops(0), flops(None)
  assert both - frozen_table > 0.9 * product
  assert frozen_table - value > 0.9 * product


# On meshes.


def mesh_case():
  return make_case(B=8, T=8, D=4, V=16, vocab_size=13)


@pytest.fixture(scope='module')
def one_device():
  options = dict(vocab_size=13, softcap=5.0, z_loss=1e-2, label_smoothing=0.1)
  run = with_gradients(
    vocabulary_loss.cross_entropy, jit=False, chunk=3, **options
  )
  return run, jax.jit(run)(*mesh_case())


@pytest.mark.sharded
@pytest.mark.parametrize('shape', MESHES, ids=str)
def test_mesh_equals_one_device(shape, one_device):
  run, expected = one_device
  actual = on_mesh(shape, run, vocab=('fsdp', 'tensor'))(*mesh_case())
  assert_same(actual, expected)


@pytest.mark.sharded
@pytest.mark.parametrize(
  'rules',
  [
    {'vocab': 'fsdp'},
    {'vocab': None},
    {'vocab': ('tensor', 'fsdp')},
    {'vocab': 'sequence'},
    {'vocab': ('fsdp', 'tensor'), 'batch': None, 'length': None},
  ],
  ids=str,
)
def test_rules_of_the_vocabulary(rules, one_device):
  run, expected = one_device
  actual = on_mesh((1, 2, 2, 2), run, **rules)(*mesh_case())
  assert_same(actual, expected)


@pytest.mark.sharded
def test_mesh_that_does_not_divide_is_refused():
  case = make_case(B=8, T=8, V=18, vocab_size=13)
  run = with_gradients(vocabulary_loss.cross_entropy, jit=False, vocab_size=13)
  with pytest.raises(ValueError, match="'vocab' of size 18"):
    on_mesh((1, 4, 1, 2), run, vocab='fsdp')(*case)


@pytest.mark.sharded
def test_mesh_memory_is_split():
  shapes = (
    jax.ShapeDtypeStruct((8, 64, 16), jnp.float32),
    jax.ShapeDtypeStruct((4096, 16), jnp.float32),
    jax.ShapeDtypeStruct((8, 64), jnp.int32),
    jax.ShapeDtypeStruct((8, 64), jnp.float32),
  )
  run = with_gradients(vocabulary_loss.cross_entropy, vocab_size=4096, chunk=8)
  program = on_mesh((1, 8, 1, 1), run, vocab='fsdp')
  memory = program.lower(*shapes).compile().memory_analysis()
  # Per device: 8 gathered chunks of 8 tokens times an eighth of the columns.
  local_logits = 8 * 8 * 4096 // 8 * 4
  assert memory.temp_size_in_bytes < 6 * local_logits
