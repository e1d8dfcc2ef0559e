"""The training step: divisor, accumulation, guards, phases, meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.models import build
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.training import optimizers, schedules
from encdec_adapt.training import state as state_lib
from encdec_adapt.training import step as step_lib
from encdec_adapt.training.losses import distillation
from tests.training import conftest
from tests.training.conftest import PAIR, SOURCE, Trainer, host, make_batch


def _updates(trainer, batches, references=None):
  """Losses of some steps and the parameters after them."""
  state = trainer.init()
  losses = []
  for batch in batches:
    state, metrics = trainer.step(state, batch, references)
    losses.append(float(metrics['loss']))
  return losses, host(state.params)


def _assert_close(one, other, tolerance=2e-5):
  assert one[0] == pytest.approx(other[0], abs=tolerance)
  for path, value in one[1].items():
    np.testing.assert_allclose(
      value, other[1][path], atol=tolerance, err_msg=path
    )


def _assert_equal(params, wanted):
  for path, value in wanted.items():
    np.testing.assert_array_equal(params[path], value, err_msg=path)


@pytest.fixture(scope='module')
def full():
  """On one device; tests share what it has compiled."""
  return Trainer()


@pytest.fixture(scope='module')
def frozen():
  """The same, but only cross-attention moves for three steps."""
  return Trainer(warmup=3)


@pytest.fixture(scope='module')
def reference(full):
  """Two steps on one device, one batch of 16 rows each."""
  return _updates(full, [make_batch(16, 0), make_batch(16, 1)])


@pytest.mark.sharded
@pytest.mark.parametrize(
  'mesh, microbatches',
  [
    (mesh_lib.MeshConfig(fsdp=1), 4),
    pytest.param(mesh_lib.MeshConfig(fsdp=8), 2, marks=pytest.mark.slow),
    pytest.param(
      mesh_lib.MeshConfig(replica=2, fsdp=2, tensor=2),
      4,
      marks=pytest.mark.slow,
    ),
    (mesh_lib.MeshConfig(fsdp=2, sequence=2, tensor=2), 4),
  ],
  ids=['one', 'fsdp', 'replica-fsdp-tensor', 'fsdp-sequence-tensor'],
)
def test_meshes_and_microbatches_equal_one_large_batch(
  mesh, microbatches, reference
):
  trainer = Trainer(mesh, microbatches=microbatches)
  _assert_close(
    _updates(trainer, [make_batch(16, 0), make_batch(16, 1)]), reference
  )


def test_divisor_is_the_weight_of_the_whole_batch(full):
  # Rows 0, 4, 8, .. form the first microbatch; all other weights are 0, so
  # a divisor per microbatch would give another loss, or NaN.
  batch = make_batch(16)
  batch['weights'][np.arange(16) % 4 != 0] = 0.0
  whole = _updates(full, [batch])
  parts = _updates(Trainer(microbatches=4), [batch])
  assert np.isfinite(whole[0][0])
  _assert_close(parts, whole)


def test_batch_of_weight_zero_moves_nothing_without_weight_decay():
  batch = make_batch(4)
  batch['weights'][:] = 0.0
  trainer = Trainer(
    optimizer=optimizers.OptimizerConfig(
      'adamw', schedules.ScheduleConfig('constant', 1e-2, 0)
    )
  )
  before = host(trainer.init().params)
  losses, after = _updates(trainer, [batch])
  assert losses == [0.0]
  _assert_equal(after, before)


def test_non_finite_update_is_skipped_and_counted(full):
  state, _ = full.step(full.init(), make_batch(4, 0))
  before = host(state.params)
  count = int(state.groups['all'].count)
  bad = make_batch(4, 1)
  bad['weights'][0, 0] = np.inf
  state, metrics = full.step(state, bad)
  assert (int(metrics['skipped']), int(metrics['skipped_in_row'])) == (1, 1)
  assert int(state.groups['all'].count) == count
  _assert_equal(host(state.params), before)
  state, metrics = full.step(state, make_batch(4, 2))
  assert (int(metrics['skipped']), int(metrics['skipped_in_row'])) == (1, 0)
  assert int(state.step) == 3


def _is_cross(path):
  return 'cross' in path


def test_frozen_leaves_are_bit_equal_and_have_no_optimizer_state(frozen):
  state = frozen.init()
  before = host(state.params)
  for seed in range(3):
    state, metrics = frozen.step(state, make_batch(4, seed))
  assert set(state.groups) == {'cross_attention'}
  moments = jax.tree.leaves(state.groups['cross_attention'].inner)
  count = sum(v.size for p, v in before.items() if _is_cross(p))
  assert sum(leaf.size for leaf in moments) == 2 * count + 1  # and a count.
  after = host(state.params)
  cross = {path for path in before if _is_cross(path)}
  assert not any(np.array_equal(after[p], before[p]) for p in cross)
  _assert_equal(after, {p: before[p] for p in before.keys() - cross})


def test_a_step_takes_over_the_memory_of_its_state(frozen, full):
  for trainer in (frozen, full):
    before = trainer.init()
    after, _ = trainer.step(before, make_batch(4))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(after))


def test_no_gradients_of_frozen_parameters_are_computed(frozen, full):
  batch = make_batch(4)

  def work(trainer):
    state, _ = trainer.step(trainer.init(), batch)
    (step,) = trainer.functions.values()
    placed = step_lib.place_batch(batch, trainer.where)
    return step.lower(state, placed, {}, {}).compile().cost_analysis()['flops']

  # Measured 0.51: nothing goes back into the encoder either.
  assert work(frozen) < 0.6 * work(full)


def test_clip_norm_is_that_of_the_moving_parameters(frozen, full):
  batch = make_batch(4)
  _, some = frozen.step(frozen.init(), batch)
  _, every = full.step(full.init(), batch)

  model = frozen.where.model
  params = jax.tree.map(jnp.asarray, host(full.init().params))
  batch = jax.tree.map(jnp.asarray, batch)

  def loss(flat):
    terms = conftest.sums(frozen.loss, model, state_lib.unflatten(flat), batch)
    return conftest.value(frozen.loss, terms, batch)

  gradients = jax.jit(jax.grad(loss))(params)
  squares = {p: float((g**2).sum()) for p, g in gradients.items()}
  cross = sum(v for p, v in squares.items() if _is_cross(p)) ** 0.5
  assert float(some['gradient_norm']) == pytest.approx(cross, rel=1e-5)
  total = sum(squares.values()) ** 0.5
  assert float(every['gradient_norm']) == pytest.approx(total, rel=1e-5)


@pytest.mark.long
def test_first_update_after_thawing_is_a_fresh_optimizers():
  thawing = Trainer(warmup=2, rate=1e-2)
  state = thawing.init()
  for seed in range(2):
    state, _ = thawing.step(state, make_batch(4, seed))
  params = jax.tree.map(np.array, state.params)
  assert set(state.groups) == {'cross_attention'}
  state, metrics = thawing.step(state, make_batch(4, 9))
  # Bit for bit, by the same compiled step with fresh optimizers only.
  fresh = thawing.phases.create(jax.tree.map(jnp.array, params))
  new = thawing.phases.thaw(fresh, 2).replace(step=jnp.int32(2))
  new, same = thawing.step(new, make_batch(4, 9))
  assert same['gradient_norm'] == metrics['gradient_norm']
  thawed = {p: x for p, x in host(state.params).items() if not _is_cross(p)}
  _assert_equal(host(new.params), thawed)

  # Half of the peak: the first of two warm-up steps, by its own count.
  assert float(metrics['learning_rate/rest']) == pytest.approx(5e-3)
  assert float(metrics['learning_rate/cross_attention']) == pytest.approx(1e-2)


@pytest.mark.long
def test_a_teacher_held_in_bfloat16_is_one_of_rounded_parameters():
  teacher, model = build.build(SOURCE), build.build(PAIR)
  batch = jax.tree.map(jnp.asarray, make_batch(4, teacher=True))
  params = model.init(jax.random.key(0))
  loss = distillation.Distillation(chunk=16)
  held = jax.tree.map(
    lambda x: x.astype(jnp.bfloat16), teacher.init(jax.random.key(1))
  )
  rounded = jax.tree.map(lambda x: x.astype(jnp.float32), held)
  sums = [
    conftest.sums(loss, model, params, batch, {'teacher': (teacher, source)})
    for source in (held, rounded)
  ]
  rounded, exact = sums
  assert float(rounded['distillation']) > 0
  assert float(rounded['cross_entropy']) > 0
  assert float(rounded['loss']) == pytest.approx(float(exact['loss']), rel=1e-5)


@pytest.mark.sharded
@pytest.mark.long
def test_distillation_on_a_mesh_equals_one_device():
  teacher = build.build(SOURCE)
  params = {'teacher': teacher.init(jax.random.key(1))}
  loss = distillation.Distillation(share=0.5, z_loss=1e-3, chunk=16)
  models = {'teacher': teacher}
  batch = make_batch(16, teacher=True)
  one = _updates(Trainer(loss=loss, models=models), [batch], params)
  mesh = mesh_lib.MeshConfig(replica=2, fsdp=2, tensor=2)
  many = _updates(
    Trainer(mesh, loss=loss, microbatches=2, models=models), [batch], params
  )
  _assert_close(many, one)
