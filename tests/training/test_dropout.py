"""Dropout: its masks, and who draws them.

That a killed job draws the masks of an uninterrupted one is in tests/resume.
"""

import dataclasses
import functools

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.models import base_model, build, model_config, parameters
from encdec_adapt.ops import partition
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import rules as rules_lib
from encdec_adapt.training import recipes
from encdec_adapt.training.losses import cross_entropy, distillation, infonce
from tests.training import conftest
from tests.training.conftest import INIT, MODEL, STACK, Trainer, make_batch
from tests.training.test_infonce import MODEL as EMBEDDER
from tests.training.test_infonce import _batch as _texts

RATE = 0.2
LOSS = cross_entropy.CrossEntropy(chunk=16)


def _batch(**options):
  return jax.tree.map(jnp.asarray, make_batch(8, **options))


@pytest.fixture(scope='module')
def params():
  return jax.jit(INIT)(jax.random.key(0))


@pytest.fixture(scope='module')
def predict(params):
  """States that predict the targets, with dropout of this rate and key."""
  batch = _batch()

  def run(rate, key):
    dropout = base_model.Dropout(rate, key) if rate is not None else None
    states = MODEL.architecture.predict(MODEL, params, batch, dropout=dropout)
    return jnp.where(batch['decoder_segments'][..., None] > 0, states, 0)

  return jax.jit(run, static_argnums=0)


def test_rate_0_is_no_dropout_and_has_no_state(predict):
  key = jax.random.key(1)
  np.testing.assert_array_equal(predict(0.0, key), predict(None, key))
  assert Trainer().phases.abstract().dropout_key is None


def test_the_mean_over_keys_is_near_the_output_without_dropout(predict):
  exact = np.asarray(predict(None, jax.random.key(0)))
  drawn = np.stack([predict(0.02, jax.random.key(i)) for i in range(200)])
  error = np.sqrt(np.mean((drawn - exact) ** 2))
  assert error > 0.1
  # Norms and attention are not linear: the mean is not the output itself.
  assert np.sqrt(np.mean((drawn.mean(0) - exact) ** 2)) < 0.5 * error


def test_every_layer_and_stack_draws_masks_of_its_own():
  # Self-attention adds ones and everything else nothing: a value counts the
  # layers, of two, that kept it.
  stack = dataclasses.replace(
    STACK, attention_bias='qkvo', post_norms=False, norm_gain='direct'
  )
  model = build.build(model_config.encoder_decoder(stack, stack))
  ones = ('/attention/output_bias', 'final_norm/scale')
  params = traverse_util.unflatten_dict(
    {
      path: jnp.full(info.shape, float(path.endswith(ones)))
      for path, info in parameters.parameter_table(model.config).items()
    },
    sep='/',
  )
  tokens = jnp.ones((4, 32), jnp.int32)
  side = tokens, tokens, jnp.broadcast_to(jnp.arange(32), tokens.shape)
  dropout = base_model.Dropout(0.5, jax.random.key(0))
  encoded = model.encode(params, *side, dropout=dropout)
  decoded = model.decode(params, *side, encoded, tokens, dropout=dropout)
  encoded, decoded = (
    np.round(2 * x / x.max(-1, keepdims=True)) for x in (encoded, decoded)
  )
  for counted in (encoded, decoded):
    shares = [np.mean(counted == count) for count in (0, 1, 2)]
    np.testing.assert_allclose(shares, [0.25, 0.5, 0.25], atol=0.05)
  assert np.mean(encoded == decoded) == pytest.approx(0.375, abs=0.05)


@pytest.mark.long
def test_steps_and_microbatches_draw_their_own(params):
  trainer, batch = Trainer(dropout=RATE, microbatches=2), _batch()

  @jax.jit
  def loss(part, key):
    dropout = base_model.Dropout(RATE, key)
    terms = conftest.sums(trainer.loss, MODEL, params, part, dropout=dropout)
    return terms['loss']

  parts = [{name: x[i::2] for name, x in batch.items()} for i in range(2)]
  seen = []
  for step in range(2):
    state = trainer.init().replace(step=jnp.int32(step))
    _, metrics = trainer.step(state, make_batch(8))
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), step), 2)
    total = sum(map(loss, parts, keys))
    seen.append(float(metrics['loss']))
    assert seen[-1] == pytest.approx(
      float(total / batch['weights'].sum()), rel=1e-5
    )
  assert abs(seen[0] - seen[1]) > 1e-3


@pytest.mark.long
@pytest.mark.parametrize(
  'loss, model, batch',
  [
    (distillation.Distillation(share=0.5), MODEL, make_batch(8)),
    (infonce.InfoNce(teacher=1.0), EMBEDDER, _texts(2)),
  ],
  ids=['distillation', 'infonce'],
)
def test_a_student_has_dropout_and_its_teacher_none(loss, model, batch):
  student, frozen = (jax.jit(model.init)(jax.random.key(i)) for i in range(2))
  dropout = base_model.Dropout(RATE, jax.random.key(2))

  def compute(batch):
    predict = functools.partial(loss.predict, model, batch=batch)
    outputs = [predict(student, dropout=x) for x in (None, dropout)]
    readers = {'teacher': functools.partial(loss.predict, model, frozen)}
    terms = [loss.terms(x, readers, batch) for x in outputs]
    teacher = {'teacher': frozen}
    sums = conftest.sums(loss, model, student, batch, teacher, dropout=dropout)
    return [x.hidden for x in outputs], (*terms, sums)

  (plain, drawn), (without, expected, sums) = jax.jit(compute)(batch)
  # Of every target, and of every text: queries and documents.
  counted = batch.get('roles', batch['weights']) > 0
  assert np.all(np.abs(plain - drawn).max(-1)[counted] > 1e-3)
  for term in {'loss', 'cross_entropy', 'distillation'} & {*sums}:
    assert float(sums[term]) == pytest.approx(float(expected[term]), rel=1e-4)
    assert abs(float(sums[term]) - float(without[term])) > 1e-2, term


def test_losses_that_compare_answers_refuse_dropout():
  refusing = {
    base.__name__
    for base, recipe in recipes.BY_LOSS.items()
    if not recipe.allows_dropout
  }
  assert refusing >= {'Policy', 'Preference', 'Reward'}


DECODER = build.build(model_config.DecoderOnlyConfig(STACK))


def _gradient(mesh=mesh_lib.MeshConfig(fsdp=1), **compute):
  """Loss of a decoder with dropout, and its gradient."""
  model = dataclasses.replace(
    DECODER, compute=dataclasses.replace(DECODER.compute, **compute)
  )
  count = 8 if mesh.tensor > 1 else 1
  mesh = mesh_lib.make_mesh(mesh, jax.devices()[:count])
  rules = rules_lib.RULES['fsdp'].as_dict()

  def loss(params, batch, key):
    dropout = base_model.Dropout(RATE, key)
    with partition.use(mesh, rules):
      terms = conftest.sums(LOSS, model, params, batch, dropout=dropout)
    return conftest.value(LOSS, terms, batch)

  params = jax.jit(DECODER.init)(jax.random.key(0))
  batch = _batch(teacher=True)
  return jax.jit(jax.value_and_grad(loss))(params, batch, jax.random.key(1))


@pytest.fixture(scope='module')
def reference():
  return _gradient()


def _assert_close(one, other):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), one, other
  )


@pytest.mark.sharded
def test_a_mesh_draws_the_masks_of_one_device(reference):
  mesh = mesh_lib.MeshConfig(fsdp=2, sequence=2, tensor=2)
  _assert_close(_gradient(mesh), reference)


def test_recomputed_and_unrolled_layers_draw_the_same_masks(reference):
  found = _gradient(remat='full', scan_unroll=STACK.layers)
  _assert_close(found, reference)
