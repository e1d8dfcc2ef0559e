"""Loss and gradients on every mesh of eight devices equal one device's.

A few meshes run by default, every mesh with one rule set in the long tier, and
the other rule sets in the slow one.
"""

import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest

from encdec_adapt.models import build, execution, model_config
from encdec_adapt.ops import partition
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import placement
from encdec_adapt.sharding import rules as rules_lib
from encdec_adapt.training import state as state_lib
from encdec_adapt.training.losses import cross_entropy
from encdec_adapt.training.losses import loss as loss_lib
from tests import toy_models

pytestmark = pytest.mark.sharded

SHAPES = [
  shape
  for shape in itertools.product((1, 2, 4, 8), repeat=4)
  if math.prod(shape) == 8
]
# Each axis with others, and each rule set.
DEFAULT = {
  ((1, 2, 2, 2), 'fsdp'),
  ((2, 4, 1, 1), 'whole_slice'),
  ((2, 2, 1, 2), 'fsdp_replica'),
  ((4, 1, 2, 1), 'data_parallel'),
}
CASES = [
  pytest.param(
    'dense',
    shape,
    name,
    marks=[]
    if (shape, name) in DEFAULT
    else pytest.mark.slow
    if (i + j) % len(rules_lib.RULES)
    else pytest.mark.long,
    id=f'{shape}-{name}',
  )
  for i, shape in enumerate(SHAPES)
  for j, name in enumerate(rules_lib.RULES)
]
CASES += [
  pytest.param('experts', (1, 2, 2, 2), 'fsdp', marks=pytest.mark.long),
  pytest.param('experts', (2, 2, 1, 2), 'fsdp', marks=pytest.mark.slow),
]
# Every dimension that a rule names divides by eight.
STACK = toy_models.stack(
  layers=1, heads=8, kv_heads=8, vocab_multiple=8, pattern=('local',), window=3
)
EXPERTS = dict(
  layers=2,
  dense_layers=1,
  experts=4,
  experts_per_token=2,
  expert_mlp_width=16,
  norm_topk=True,
  shared_expert_width=8,
  shared_expert_gate=True,
)
LENGTHS = {'encoder': 16, 'decoder': 8}
ROWS = 8
LOSS = cross_entropy.CrossEntropy(
  z_loss=1e-2, load_balance=1.0, router_z_loss=1.0, chunk=4
)


def _make_batch():
  """Rows of two segments, the second ended by padding."""
  rng = np.random.default_rng(0)
  batch = {}
  for side, length in LENGTHS.items():
    columns = np.arange(length)
    first = rng.integers(1, length, (ROWS, 1))
    segments = np.where(columns < first, 1, 2)
    segments[:, -1] = rng.integers(0, 2, ROWS) * 2
    batch[f'{side}_tokens'] = rng.integers(1, STACK.vocab_size, segments.shape)
    batch[f'{side}_segments'] = segments
    batch[f'{side}_positions'] = np.where(
      columns < first, columns, columns - first
    )
  batch['targets'] = np.roll(batch['decoder_tokens'], -1, axis=1)
  batch = {name: value.astype(np.int32) for name, value in batch.items()}
  weights = rng.random((ROWS, LENGTHS['decoder']), np.float32)
  return {**batch, 'weights': weights * (batch['decoder_segments'] > 0)}


def _run(model, params, batch):
  """The loss and its gradients."""
  return jax.value_and_grad(
    lambda params: loss_lib.sums(LOSS, model, params, batch, {})['loss']
  )(params)


@pytest.fixture(scope='module')
def case(request):
  """A model, its parameters, a batch, and what one device makes of them."""
  stack = STACK
  if request.param == 'experts':
    stack = dataclasses.replace(STACK, **EXPERTS)
  pair = model_config.encoder_decoder(stack, stack)
  compute = execution.ComputeConfig('float32', 'full', attention_chunk=4)
  model, plain = build.build(pair, compute), build.build(pair)
  params = toy_models.params(model.config, seed=1, scale=0.3)
  batch = _make_batch()
  # Without rematerialisation, which changes nothing either.
  expected = jax.jit(_run, static_argnums=0)(plain, params, batch)
  return model, params, batch, expected


@pytest.mark.parametrize('case, shape, name', CASES, indirect=['case'])
def test_every_mesh_equals_one_device(case, shape, name):
  model, params, batch, expected = case
  sizes = dict(zip(mesh_lib.AXES, shape, strict=True))
  mesh = mesh_lib.make_mesh(mesh_lib.MeshConfig(**sizes))
  where = state_lib.Placement(model, mesh, rules_lib.RULES[name])
  shardings = where.shardings(params)
  fields = placement.batch_sharding(mesh, where.rules, batch)

  def run(params, batch):
    with partition.use(mesh, where.rules.as_dict()):
      return _run(model, params, batch)

  loss, gradients = jax.jit(
    run, in_shardings=(shardings, fields), out_shardings=(None, shardings)
  )(params, batch)
  np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
  found, wanted = (state_lib.flatten(g) for g in (gradients, expected[1]))
  for path, value in wanted.items():
    apart = np.linalg.norm(found[path] - value) / np.linalg.norm(value)
    # Parameters changed by one unit in the last place make 7e-6.
    assert apart < 3e-5, path
