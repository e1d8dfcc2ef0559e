"""The one-pass loss against the dense one, alone and on meshes.

With and without a teacher of another width.
"""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.ops import distillation_loss, partition, vocabulary_loss
from tests.ops import attention_cases, dense_loss

# Every mesh of eight devices; some in the default run.
DEFAULT = [(1, 8, 1, 1), (2, 2, 1, 2), (1, 2, 2, 2)]
MESHES = [
  pytest.param(shape, marks=[] if shape in DEFAULT else pytest.mark.slow)
  for shape in itertools.product((1, 2, 4, 8), repeat=4)
  if np.prod(shape) == 8
]
RULES = {'batch': ('replica', 'fsdp'), 'length': ('sequence',)}
# Logits of five tokens, drawn by torch.
STUDENT = [
  [-1.125602, -0.316998, -1.092468, -0.085194, -0.093348, 0.687050, -0.838315],
  [0.000892, -0.750427, 0.185408, 0.621138, 0.638182, -0.246001, 2.302516],
  [-1.360169, 0.344565, 0.519868, -0.365619, -1.302440, -0.921462, -0.056195],
  [-0.701524, 1.036687, -0.603670, -1.278765, 0.092950, -0.666100, 0.923374],
  [1.387295, 1.375038, 0.659631, 0.476557, -1.016307, 0.180367, 0.108332],
]  # fmt: skip
TEACHER = [
  [1.950657, -1.063099, 1.140351, -0.089882, 0.729796, -1.845319, -0.025020],
  [1.369381, -0.312639, 0.245785, 0.377182, 1.101235, -1.142778, 0.037585],
  [0.172273, -1.611502, -0.479448, 0.157393, 0.385363, -0.066144, -0.358355],
  [-1.561562, -0.354643, 1.081073, 0.131478, 1.573538, 0.781430, -1.078658],
  [-0.720910, 1.470793, 0.275635, 0.666781, -0.994390, -1.189364, -1.195949],
]  # fmt: skip
with_teacher = pytest.mark.parametrize(
  'teacher',
  [None, {'softcap': 4.0, 'one_hot': True}],
  ids=['alone', 'teacher'],
)


def make_case(
  B=2, T=7, D=8, E=5, V=24, W=22, vocab_size=21, dtype=jnp.float32, seed=0
):
  """Student, targets, unequal weights with zeros, and a teacher's arrays."""
  # Drawn by numpy: jax would compile a program per shape.
  rng = np.random.default_rng(seed)
  hidden, table, teacher_hidden, teacher_table = (
    scale * rng.normal(size=shape)
    for scale, shape in (
      (1, (B, T, D)),
      (2, (V, D)),
      (1, (B, T, E)),
      (2, (W, E)),
    )
  )
  targets = jnp.asarray(rng.integers(vocab_size, size=(B, T)), jnp.int32)
  weights = np.maximum(rng.normal(size=(B, T)) + 0.5, 0.0)
  return (
    jnp.asarray(hidden, dtype),
    jnp.asarray(table, jnp.float32),
    targets,
    jnp.asarray(weights, jnp.float32),
    (jnp.asarray(teacher_hidden, dtype), jnp.asarray(teacher_table, dtype)),
  )


def stored(hidden, table, targets):
  """Three tokens of a teacher at each target, one of them twice."""
  ids = jnp.stack([targets, targets // 2, targets, targets // 3], axis=-1)
  scores = jnp.einsum('BTE,E->BT', hidden, table[0])[..., None] * jnp.arange(4)
  return ids, jax.lax.stop_gradient(jax.nn.softmax(scores))


def with_gradients(
  loss=vocabulary_loss.cross_entropy, jit=True, teacher=None, **options
):
  """(sums, gradients of total in hidden, table, weights and teacher)."""

  def total(hidden, table, weights, arrays, targets):
    source = None
    if teacher is not None and 'stored' in teacher:
      source = distillation_loss.StoredTeacher(*stored(*arrays, targets))
    elif teacher is not None:
      fields = dict(teacher)
      if fields.pop('one_hot', False):  # At every other target.
        odd = jnp.arange(targets.shape[1]) % 2
        fields['one_hot'] = jnp.where(odd, targets, -1)
      source = distillation_loss.Teacher(*arrays, **fields)
    sums = loss(hidden, table, targets, weights, teacher=source, **options)
    return 3.0 * sums.total, sums

  def run(hidden, table, targets, weights, arrays):
    gradients, sums = jax.grad(total, argnums=(0, 1, 2, 3), has_aux=True)(
      hidden, table, weights, arrays, targets
    )
    return sums, gradients

  return jax.jit(run) if jit else run


def assert_same(actual, expected, *, rtol=2e-5, atol=3e-5):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(
      np.asarray(a, np.float32), np.asarray(b, np.float32), rtol, atol
    ),
    actual,
    expected,
  )


def assert_dense(case, chunk=64, rtol=2e-5, atol=3e-5, **options):
  actual = with_gradients(chunk=chunk, **options)(*case)
  expected = with_gradients(dense_loss.cross_entropy, **options)(*case)
  assert_same(actual, expected, rtol=rtol, atol=atol)


def test_literal_value():
  # Two tokens of logits (ln 1, ln 3): p = (1/4, 3/4).
  hidden = jnp.array([[[1.0], [1.0]]])
  table = jnp.log(jnp.array([[1.0], [3.0]]))
  weights = jnp.array([[1.0, 2.0]])
  sums = vocabulary_loss.cross_entropy(
    hidden, table, jnp.array([[0, 1]]), weights, vocab_size=2, z_loss=0.5
  )
  z = 3 * 0.5 * np.log(4) ** 2
  np.testing.assert_allclose(sums.z_loss, z, rtol=1e-6)
  np.testing.assert_allclose(
    sums.cross_entropy, np.log(4) + 2 * np.log(4 / 3), rtol=1e-6
  )
  np.testing.assert_allclose(sums.total, sums.cross_entropy + z, rtol=1e-6)
  assert (float(sums.correct), float(sums.weight)) == (2.0, 3.0)
  # As a teacher of a student that says (1/2, 1/2).
  sums = vocabulary_loss.cross_entropy(
    hidden,
    0 * table,
    jnp.array([[0, 1]]),
    weights,
    vocab_size=2,
    teacher=distillation_loss.Teacher(hidden, table),
  )
  np.testing.assert_allclose(sums.total, 3 * np.log(2), rtol=1e-6)
  kl = 0.25 * np.log(0.5) + 0.75 * np.log(1.5)
  np.testing.assert_allclose(sums.divergence, 3 * kl, rtol=1e-5)


@pytest.mark.parametrize(
  'divergence, beta, expected',
  [
    # `GKDTrainer.generalized_jsd_loss` of TRL 1.16: its beta 0 and 1 are KL
    # divergences, and not the limits of those between, which are 0.
    ('forward', 0.0, 0.7135028),
    ('js', 0.1, 0.0623767),
    ('js', 0.5, 0.1719384),
    ('js', 0.9, 0.0716587),
    ('reverse', 1.0, 0.8843817),
  ],
)
def test_divergences_equal_trl(divergence, beta, expected):
  student, teacher = (jnp.array([rows]) for rows in (STUDENT, TEACHER))
  sums = vocabulary_loss.cross_entropy(
    student,
    jnp.eye(7),
    jnp.zeros((1, 5), jnp.int32),
    jnp.ones((1, 5)),
    vocab_size=7,
    teacher=distillation_loss.Teacher(
      teacher, jnp.eye(7), divergence=divergence, beta=beta
    ),
  )
  np.testing.assert_allclose(sums.divergence / 5, expected, rtol=1e-6)


@pytest.mark.parametrize(
  'chunk, softcap, z_loss, label_smoothing, teacher',
  [
    (5, None, 0.0, 0.0, None),
    (64, 3.0, 1e-2, 0.0, None),
    (5, 3.0, 1e-2, 0.2, None),
    (5, None, 0.0, 0.0, dict(softcap=4.0)),
    (64, 3.0, 1e-2, 0.1, dict(temperature=2.5)),
    (5, 3.0, 1e-2, 0.1, dict(softcap=4.0, temperature=2.5, share=0.3)),
    (5, 3.0, 1e-2, 0.1, dict(divergence='reverse', temperature=2.5, share=0.3)),
    (64, None, 0.0, 0.0, dict(divergence='js', beta=0.1, softcap=4.0)),
    (5, 3.0, 0.0, 0.1, dict(divergence='js', temperature=2.5, share=0.3)),
    (5, 3.0, 1e-2, 0.1, dict(temperature=2.5, share=0.3, one_hot=True)),
    (5, None, 1e-2, 0.1, dict(stored=True)),
  ],
)
def test_equals_dense(chunk, softcap, z_loss, label_smoothing, teacher):
  assert_dense(
    make_case(),
    chunk,
    vocab_size=21,
    softcap=softcap,
    z_loss=z_loss,
    label_smoothing=label_smoothing,
    teacher=teacher,
  )


@with_teacher
def test_equals_dense_for_any_shape(teacher):
  @settings(max_examples=8, deadline=None)
  @given(
    sizes=st.tuples(*map(st.integers, (1, 1, 1, 1), (3, 6, 5, 5))),
    vocab_size=st.integers(1, 9),
    padding=st.tuples(st.integers(0, 4), st.integers(0, 4)),
    chunk=st.integers(1, 20),
    seed=st.integers(0, 2**30),
  )
  def check(sizes, vocab_size, padding, chunk, seed):
    rows = (vocab_size + some for some in padding)
    case = make_case(*sizes, *rows, vocab_size, seed=seed)
    options = dict(vocab_size=vocab_size, softcap=5.0, z_loss=1e-3)
    assert_dense(case, chunk, 1e-4, 1e-4, teacher=teacher, **options)

  check()


@with_teacher
def test_bfloat16_products_keep_float32_sums_and_table_gradient(teacher):
  case = make_case(dtype=jnp.bfloat16)
  options = dict(vocab_size=21, softcap=30.0, teacher=teacher)
  sums, gradients = with_gradients(chunk=4, **options)(*case)
  dense = with_gradients(dense_loss.cross_entropy, **options)
  expected_sums, expected = dense(*case)
  assert gradients[0].dtype == jnp.bfloat16
  assert gradients[1].dtype == jnp.float32
  # The logits are the same products; only the gradients are rounded.
  assert_same(sums, expected_sums)
  assert_same(gradients, expected, rtol=2e-2, atol=6e-2)


@with_teacher
def test_the_reduction_of_gpus_equals_dense(teacher, monkeypatch):
  monkeypatch.setattr(partition.Partition, 'platform', 'gpu')
  options = dict(vocab_size=21, softcap=3.0, label_smoothing=0.1)
  assert_dense(make_case(), chunk=5, teacher=teacher, **options)


@pytest.mark.parametrize('softcap', [None, 30.0])
def test_large_logits_stay_finite(softcap):
  hidden, *rest = make_case()
  case, options = (300 * hidden, *rest), dict(vocab_size=21, softcap=softcap)
  actual, gradients = with_gradients(**options)(*case)
  sums, expected = with_gradients(dense_loss.cross_entropy, **options)(*case)
  # Saturated scores tie, and the dense argmax takes the first of them.
  actual = actual.replace(correct=sums.correct)
  assert_same((actual, gradients), (sums, expected), rtol=1e-4, atol=1e-3)


@with_teacher
def test_padding_rows_change_nothing(teacher):
  hidden, table, targets, weights, (states, rows) = make_case()
  run = with_gradients(vocab_size=21, label_smoothing=0.1, teacher=teacher)
  expected = run(hidden, table, targets, weights, (states, rows))
  actual = run(
    hidden,
    table.at[21:].set(1e4),
    targets,
    weights,
    (states, rows.at[21:].set(1e4)),
  )
  assert_same(actual, expected, rtol=0, atol=0)
  dtable = expected[1][1]
  assert not np.any(dtable[21:])
  assert np.all(np.any(dtable[:21], axis=-1))


def test_target_outside_the_vocabulary_gives_nan_only_where_it_weighs():
  hidden, table, targets, weights, _ = make_case()
  for wrong in (-1, 21, 24):
    targets = targets.at[0, 0].set(wrong)
    for weight, expected in ((0.0, False), (1.0, True)):
      sums = vocabulary_loss.cross_entropy(
        hidden, table, targets, weights.at[0, 0].set(weight), vocab_size=21
      )
      assert bool(jnp.isnan(sums.total)) == expected


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


def on_mesh(shape, function, **rules):
  """Jits `function` with a partition of this mesh active."""
  mesh = attention_cases.make_mesh(shape)

  @jax.jit
  def run(*arguments):
    with partition.use(mesh, {**RULES, **rules}):
      return function(*arguments)

  return run


def mesh_case():
  return make_case(B=8, T=8, D=4, E=3, V=16, W=14, vocab_size=13)


@pytest.fixture(scope='module')
def one_device():
  """Losses without and with a teacher, and what one device makes of them."""
  options = dict(vocab_size=13, softcap=5.0, z_loss=1e-2, label_smoothing=0.1)
  teachers = (
    None,
    dict(temperature=2.0, share=0.4),
    dict(divergence='js', beta=0.3),
    dict(stored=True),
  )
  runs = [
    with_gradients(jit=False, chunk=3, teacher=teacher, **options)
    for teacher in teachers
  ]

  def run(*case):
    return [one(*case) for one in runs]

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
    {'vocab': ('fsdp',)},
    {'vocab': ()},
    {'vocab': ('tensor', 'fsdp')},
    {'vocab': ('sequence',)},
    {'vocab': ('fsdp', 'tensor'), 'batch': (), 'length': ()},
  ],
  ids=str,
)
def test_rules_of_the_vocabulary(rules, one_device):
  run, expected = one_device
  actual = on_mesh((1, 2, 2, 2), run, **rules)(*mesh_case())
  assert_same(actual, expected)


@pytest.mark.sharded
def test_mesh_that_does_not_divide_is_refused():
  run = with_gradients(jit=False, vocab_size=13)
  with pytest.raises(ValueError, match="'vocab' of size 18"):
    on_mesh((1, 4, 1, 2), run, vocab=('fsdp',))(*make_case(B=8, T=8, V=18))


@pytest.mark.sharded
def test_mesh_memory_is_split():
  shapes = jax.eval_shape(lambda: make_case(8, 64, 16, 1, 4096, 4096, 4096))
  run = with_gradients(vocab_size=4096, chunk=8)
  program = on_mesh((1, 8, 1, 1), run, vocab=('fsdp',))
  memory = program.lower(*shapes).compile().memory_analysis()
  # Per device: 8 gathered chunks of 8 tokens times an eighth of the columns.
  local_logits = 8 * 8 * 4096 // 8 * 4
  assert memory.temp_size_in_bytes < 6 * local_logits


def test_per_token():
  hidden, table, targets, weights, *_ = make_case()
  losses, correct = vocabulary_loss.per_token(
    hidden, table, targets, vocab_size=21, softcap=3.0, chunk=2
  )
  sums = dense_loss.cross_entropy(
    hidden, table, targets, weights, vocab_size=21, softcap=3.0
  )
  np.testing.assert_allclose(
    (weights * losses).sum(), sums.cross_entropy, rtol=1e-5
  )
  np.testing.assert_allclose((weights * correct).sum(), sums.correct)
