"""The one-pass distillation against the dense one, alone and on meshes."""

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.ops import distillation_loss
from tests.ops import dense_loss
from tests.ops.loss_cases import MESHES, assert_same, on_mesh


def make_case(
  B=2, T=7, D=8, E=5, V=24, W=24, vocab_size=21, dtype=jnp.float32, seed=0
):
  """Student and teacher of unequal widths, and unequal weights with zeros."""
  # Drawn by numpy: jax would compile a program per shape.
  rng = np.random.default_rng(seed)
  hidden = jnp.asarray(rng.normal(size=(B, T, D)), dtype)
  table = jnp.asarray(2 * rng.normal(size=(V, D)), jnp.float32)
  teacher_hidden = jnp.asarray(rng.normal(size=(B, T, E)), dtype)
  teacher_table = jnp.asarray(2 * rng.normal(size=(W, E)), jnp.float32)
  weights = np.maximum(rng.normal(size=(B, T)) + 0.5, 0.0)
  weights = jnp.asarray(weights, jnp.float32)
  targets = jnp.asarray(rng.integers(0, vocab_size, (B, T)), jnp.int32)
  return hidden, table, teacher_hidden, teacher_table, targets, weights


def with_gradients(loss, jit=True, **options):
  """(sums, gradients of total in all arrays but the targets)."""

  def total(*arrays):
    sums = loss(*arrays, **options)
    return 3.0 * sums.total, sums

  def run(*arrays):
    gradients, sums = jax.grad(total, argnums=(0, 1, 2, 3, 5), has_aux=True)(
      *arrays
    )
    return sums, gradients

  return run if not jit else jax.jit(run)


def test_literal_value():
  # The teacher says (1/4, 3/4), the student (1/2, 1/2).
  one = jnp.ones((1, 1, 1))
  sums = distillation_loss.distillation(
    one,
    jnp.zeros((2, 1)),
    one,
    jnp.log(jnp.array([[1.0], [3.0]])),
    jnp.array([[0]]),
    jnp.array([[2.0]]),
    vocab_size=2,
  )
  np.testing.assert_allclose(sums.total, 2 * np.log(2), rtol=1e-6)
  kl = 0.25 * np.log(0.5) + 0.75 * np.log(1.5)
  np.testing.assert_allclose(sums.kl, 2 * kl, rtol=1e-5)
  np.testing.assert_allclose(sums.cross_entropy, 2 * np.log(2), rtol=1e-6)
  assert float(sums.weight) == 2.0


@pytest.mark.parametrize(
  'chunk, softcap, teacher_softcap, temperature, z_loss, share, smoothing',
  [
    (5, None, 4.0, 1.0, 0.0, 1.0, 0.0),
    (64, 3.0, None, 2.5, 1e-2, 1.0, 0.1),
    (5, 3.0, 4.0, 2.5, 1e-2, 0.3, 0.1),
  ],
)
def test_equals_dense(
  chunk, softcap, teacher_softcap, temperature, z_loss, share, smoothing
):
  case = make_case()
  options = dict(
    vocab_size=21,
    softcap=softcap,
    teacher_softcap=teacher_softcap,
    temperature=temperature,
    z_loss=z_loss,
    share=share,
    label_smoothing=smoothing,
  )
  actual = with_gradients(
    distillation_loss.distillation, chunk=chunk, **options
  )(*case)
  expected = with_gradients(dense_loss.distillation, **options)(*case)
  assert_same(actual, expected)


@settings(max_examples=8, deadline=None)
@given(
  B=st.integers(1, 3),
  T=st.integers(1, 6),
  D=st.integers(1, 5),
  E=st.integers(1, 5),
  vocab_size=st.integers(1, 9),
  padding=st.integers(0, 4),
  teacher_padding=st.integers(0, 4),
  chunk=st.integers(1, 20),
  seed=st.integers(0, 2**30),
)
def test_equals_dense_for_any_shape(
  B, T, D, E, vocab_size, padding, teacher_padding, chunk, seed
):
  rows = (vocab_size + padding, vocab_size + teacher_padding)
  case = make_case(B, T, D, E, *rows, vocab_size, seed=seed)
  options = dict(vocab_size=vocab_size, softcap=5.0, temperature=1.5)
  actual = with_gradients(
    distillation_loss.distillation, chunk=chunk, **options
  )(*case)
  expected = with_gradients(dense_loss.distillation, **options)(*case)
  assert_same(actual, expected, rtol=1e-4, atol=1e-4)


def test_bfloat16_products_keep_float32_sums_and_table_gradient():
  case = make_case(dtype=jnp.bfloat16)
  options = dict(vocab_size=21, softcap=30.0, teacher_softcap=30.0)
  sums, gradients = with_gradients(
    distillation_loss.distillation, chunk=4, **options
  )(*case)
  expected_sums, expected = with_gradients(dense_loss.distillation, **options)(
    *case
  )
  assert gradients[0].dtype == jnp.bfloat16
  assert gradients[1].dtype == jnp.float32
  assert_same(sums, expected_sums)
  assert_same(gradients, expected, rtol=2e-2, atol=6e-2)


def test_a_student_equal_to_its_teacher_has_no_gradient():
  hidden, table, _, _, targets, weights = make_case()
  sums, gradients = with_gradients(
    distillation_loss.distillation,
    vocab_size=21,
    softcap=5.0,
    teacher_softcap=5.0,
    temperature=2.0,
  )(hidden, table, hidden, table, targets, weights)
  np.testing.assert_allclose(sums.kl, 0.0, atol=1e-5)
  for gradient in gradients[:4]:
    np.testing.assert_allclose(gradient, 0.0, atol=1e-5)


def test_padding_rows_change_nothing():
  hidden, table, teacher_hidden, teacher_table, *rest = make_case()
  run = with_gradients(distillation_loss.distillation, vocab_size=21)
  expected = run(hidden, table, teacher_hidden, teacher_table, *rest)
  actual = run(
    hidden,
    table.at[21:].set(1e4),
    teacher_hidden,
    teacher_table.at[21:].set(1e4),
    *rest,
  )
  assert_same(actual, expected, rtol=0, atol=0)
  dtable = expected[1][1]
  assert not np.any(dtable[21:])
  assert np.all(np.any(dtable[:21], axis=-1))


def test_microbatch_of_weight_zero_is_exactly_zero():
  *arrays, weights = make_case()
  sums, gradients = with_gradients(
    distillation_loss.distillation, vocab_size=21, z_loss=1e-2
  )(*arrays, jnp.zeros_like(weights))
  for leaf in jax.tree.leaves((sums, gradients[:4])):
    assert not np.any(leaf)


def test_bad_arguments():
  case = make_case(W=22)
  for options, message in (
    (dict(vocab_size=23), 'vocab_size=23'),
    (dict(vocab_size=21, temperature=0.0), 'temperature=0.0'),
    (dict(vocab_size=21, share=1.5), 'share=1.5'),
    (dict(vocab_size=21, teacher_softcap=-1.0), 'softcap=-1.0'),
  ):
    with pytest.raises(ValueError, match=message):
      distillation_loss.distillation(*case, **options)


# On meshes.


def mesh_case():
  return make_case(B=8, T=8, D=4, E=3, V=16, W=14, vocab_size=13)


@pytest.fixture(scope='module')
def one_device():
  run = with_gradients(
    distillation_loss.distillation,
    jit=False,
    chunk=3,
    vocab_size=13,
    softcap=5.0,
    temperature=2.0,
    z_loss=1e-2,
    share=0.4,
  )
  return run, jax.jit(run)(*mesh_case())


@pytest.mark.sharded
@pytest.mark.parametrize('shape', MESHES, ids=str)
def test_mesh_equals_one_device(shape, one_device):
  run, expected = one_device
  actual = on_mesh(shape, run, vocab=('fsdp', 'tensor'))(*mesh_case())
  assert_same(actual, expected)
