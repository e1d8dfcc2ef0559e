"""The lookup on one device and sharded over vocabulary, batch and width."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.ops import embedding, partition
from tests.ops import attention_cases

V, D, B, L = 16, 8, 4, 6
SHAPE = (2, 2, 1, 2)
RULES = dict.fromkeys(('vocab', 'table_embed', 'batch', 'length'), ())
BATCH = ('replica', 'fsdp')
# Every way in which the axes of the table and of the tokens can meet: the mesh
# and its rules.
SHARDINGS = {
  'vocabulary over two axes, one of them shared': (
    SHAPE,
    dict(vocab=('fsdp', 'tensor'), batch=BATCH),
  ),
  'both axes shared, in another order': (
    SHAPE,
    dict(vocab=('fsdp', 'replica'), batch=BATCH),
  ),
  'vocabulary over axes of its own': (
    SHAPE,
    dict(vocab=('tensor',), batch=BATCH),
  ),
  'length shares an axis too': (
    SHAPE,
    dict(vocab=('tensor', 'fsdp'), batch=BATCH, length=('tensor',)),
  ),
  'length over an axis of its own': (
    (1, 4, 2, 1),
    dict(vocab=('fsdp',), batch=BATCH, length=('sequence',)),
  ),
  'width sharded': (
    SHAPE,
    dict(vocab=('fsdp',), table_embed=('tensor',), batch=BATCH),
  ),
  'batch not sharded': (SHAPE, dict(vocab=('fsdp', 'tensor'))),
}
SHARED = SHARDINGS['vocabulary over two axes, one of them shared']
make_mesh = attention_cases.make_mesh


def table(rows=V, width=D):
  values = np.random.default_rng(0).normal(size=(rows, width))
  return jnp.asarray(values, jnp.float32)


def tokens(rows=V):
  ids = np.random.default_rng(1).integers(0, rows, (B, L))
  # The same id often, and ids at both ends of every shard.
  ids[0], ids[1, :4] = 3, [0, rows // 2 - 1, rows // 2, rows - 1]
  return jnp.asarray(ids, jnp.int32)


def value_and_gradient(ids, dtype=None, mesh=None, rules=None):
  """A jitted function of the table: the embeddings and a loss's gradient."""

  def loss(table):
    out = embedding.lookup(table, ids, dtype)
    weight = jnp.arange(ids.size, dtype=jnp.float32).reshape(*ids.shape, 1)
    return jnp.sum(jnp.sin(out.astype(jnp.float32)) * weight), out

  def run(table):
    if mesh is None:
      return jax.grad(loss, has_aux=True)(table)
    with partition.use(mesh, RULES | rules):
      return jax.grad(loss, has_aux=True)(table)

  return jax.jit(run)


@pytest.mark.parametrize('dtype', [None, jnp.bfloat16])
def test_takes_rows(dtype):
  out = embedding.lookup(table(), tokens(), dtype)
  expected = table()[tokens()].astype(dtype or jnp.float32)
  assert out.dtype == expected.dtype
  np.testing.assert_array_equal(out, expected)


def test_gradients_of_bfloat16_rows_add_up_in_fp32():
  ids = jnp.zeros((B, 300), jnp.int32)

  def loss(table):
    return embedding.lookup(table, ids, jnp.bfloat16).sum(dtype=jnp.float32)

  gradient = jax.grad(loss)(table())
  assert gradient.dtype == jnp.float32
  np.testing.assert_array_equal(gradient[0], B * 300.0)


@pytest.mark.sharded
@pytest.mark.parametrize('dtype', [None, jnp.bfloat16])
@pytest.mark.parametrize('rows', [256, 8], ids=['rows move', 'table moves'])
@pytest.mark.parametrize('name', SHARDINGS)
def test_sharded_equals_one_device(name, rows, dtype):
  shape, rules = SHARDINGS[name]
  ids, values = tokens(rows), table(rows)
  run = value_and_gradient(ids, dtype, make_mesh(shape), rules)
  gradient, out = run(values)
  expected_gradient, expected = value_and_gradient(ids, dtype)(values)
  assert out.dtype == expected.dtype
  np.testing.assert_array_equal(out, expected)
  np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-5)
  assert np.abs(expected_gradient).max() > 1.0


def compiled(rows, width, ids):
  """Text of the compiled gradient of a lookup, sharded like the table."""
  mesh, rules = make_mesh(SHARED[0]), RULES | SHARED[1]
  active = partition.Partition(mesh, rules)
  place = active.sharding('table', (rows, width), ('vocab', 'table_embed'))

  def loss(table, ids):
    return jnp.sum(jnp.sin(embedding.lookup(table, ids)))

  @functools.partial(jax.jit, out_shardings=place)
  def run(table, ids):
    with partition.use(mesh, rules):
      return jax.grad(loss)(table, ids)

  values = jax.ShapeDtypeStruct((rows, width), jnp.float32, sharding=place)
  return run.lower(values, ids).compile().as_text()


@pytest.mark.sharded
def test_few_tokens_never_gather_the_table():
  rows, width = 1024, 56  # sizes that nothing else has
  program = compiled(rows, width, tokens(rows))
  assert f'f32[{rows // 4},{width}]' in program
  assert f'[{rows},{width}]' not in program


@pytest.mark.sharded
def test_many_tokens_gather_columns_of_the_table():
  rows, width = 2**16, 2**12  # 1 GiB, in 8 parts
  ids = jax.ShapeDtypeStruct((4, rows), jnp.int32)
  program = compiled(rows, width, ids)
  # Halves of the rows, of the two devices that share tokens' axis.
  assert f'f32[{rows // 2},{width // 4}]' in program
  assert f'f32[{rows // 2},{width}]' not in program


@pytest.mark.sharded
@pytest.mark.parametrize('on_mesh', [False, True])
@pytest.mark.parametrize('V', [256, 8], ids=['rows move', 'table moves'])
def test_ids_outside_the_table_give_nan(on_mesh, V):
  ids = tokens(V).at[2, 3].set(V).at[3, 1].set(-1)
  outside = np.zeros((B, L), bool)
  outside[2, 3] = outside[3, 1] = True
  shape, rules = SHARED
  mesh = make_mesh(shape) if on_mesh else None
  _, out = value_and_gradient(ids, None, mesh, rules)(table(V))
  np.testing.assert_array_equal(np.isnan(out).all(-1), outside)
  np.testing.assert_array_equal(np.isnan(out).any(-1), outside)
