"""The analytic cost model: exact where possible, and monotonic."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from encdec_adapt.models import model_flops, parameters
from encdec_adapt.planning import chips, cost_model, hlo, programs, roofline
from encdec_adapt.sharding import layout_report
from encdec_adapt.sharding import mesh as mesh_lib
from tests.planning import toy


def plan(name='train', **changes):
  asked = toy.settings(**changes)
  mesh = mesh_lib.make_mesh(asked.mesh, jax.devices()[:8])
  found = cost_model.describe(name, asked, mesh, toy.WHERE, toy.BUDGET)
  return asked, mesh, found


@pytest.fixture(scope='module')
def plans():
  return {name: plan(name) for name in programs.PROGRAMS}


@pytest.mark.parametrize(
  'name, parts',
  [
    ('train', {'loss', 'activations', 'gradients', 'besides'}),
    ('eval', {'loss', 'activations'}),
    ('decode', {'logits', 'activations'}),
  ],
)
def test_arguments_are_exact_and_memory_adds_up(plans, name, parts):
  asked, mesh, found = plans[name]
  program, memory = programs.PROGRAMS[name](asked, mesh), found['memory']
  assert memory['arguments'] == programs.tree_bytes(program.arguments)
  assert memory['beside'] == programs.tree_bytes(program.beside)
  assert set(memory['parts']) == parts
  assert memory['temporary'] == sum(memory['parts'].values())
  assert memory['peak'] == memory['temporary'] + sum(
    (*memory['arguments'].values(), *memory['beside'].values())
  )
  assert found['fits'] == (memory['peak'] <= toy.BUDGET)
  assert 0 < found['mfu'] < 1
  exposed = sum(row['exposed'] for row in found['collectives'])
  assert exposed == pytest.approx(found['roofline']['exposed_s'])


def test_evaluation_and_decoding_have_no_backward_pass(plans):
  train = plans['train'][2]
  for name in ('eval', 'decode'):
    found = plans[name][2]
    assert found['memory']['temporary'] < train['memory']['temporary'] / 2
    assert found['flops']['products'] == found['flops']['model']
    kinds = {row['for']: row['kind'] for row in found['collectives']}
    assert kinds == {'weights': 'all-gather', 'hidden states': 'all-gather'}
    assert found['roofline']['step_s'] < train['roofline']['step_s']


def test_decoding_reads_its_weights_and_caches(plans):
  found = plans['decode'][2]

  def weights(name):
    rows = plans[name][2]['collectives']
    return next(r['bytes'] for r in rows if r['for'] == 'weights')

  gathered = weights('decode') * 8 / 7
  read = sum(found['memory']['arguments'].values()) + 2 * gathered
  seconds = read / toy.WHERE.chip.hbm_bandwidth
  assert found['roofline']['memory_s'] == pytest.approx(seconds)
  # The encoder has run before.
  assert 0 < weights('decode') < weights('eval')


def test_kernels_of_gpus_are_counted_apart(plans):
  asked, _, chunked = plans['train']
  found = plan(compute__attention='triton')[2]
  kernels = {row['name']: row for row in found['kernels']}
  encoder, decoder = asked.model.encoder, asked.model.decoder
  calls = encoder.layers + 2 * decoder.layers
  assert {name: row['calls'] for name, row in kernels.items()} == {
    'flash_forward': 2 * calls,  # Once more for the backward pass.
    'flash_backward_queries': calls,
    'flash_backward_keys': calls,
  }
  scores = toy.ROWS * (
    model_flops.scores(encoder, toy.LENGTH)
    + model_flops.scores(decoder, toy.LENGTH, source_length=toy.LENGTH)
  )
  shares = {name: row['flops'] * 8 / scores for name, row in kernels.items()}
  assert list(shares.values()) == [2, 1.5, 2]
  # By the formula, a pass, its repetition, and twice for gradients.
  products = chunked['flops']['products'] - 4 * scores / 8
  assert found['flops']['products'] == pytest.approx(products)


def test_offloaded_state_is_copied_twice(plans):
  plain, held = plans['train'][2], plan(optimizer__offload=True)[2]
  size = plain['memory']['arguments']['optimizer']
  size -= held['memory']['arguments']['optimizer']
  assert size > 0 == plain['roofline']['host_s']
  seconds = 2 * size / toy.WHERE.chip.host_bandwidth
  assert held['roofline']['host_s'] == pytest.approx(seconds)


def test_copies_along_an_axis_are_listed(monkeypatch):
  monkeypatch.setattr(layout_report, 'LARGE', 2**10)
  found = plan(mesh__replica=2, mesh__fsdp=4)[2]
  copies = next(c for c in found['copies'] if c['part'] == 'parameters')
  assert copies['axes'] == 'replica'
  assert copies['bytes'] > 0.9 * found['memory']['arguments']['parameters']
  # Gradients of tables are summed over replicas: half of them in float32.
  name = 'gradients of tables'
  (row,) = [r for r in found['collectives'] if r['for'] == name]
  counts = parameters.count_by_stack(toy.settings().model).values()
  tables = sum(c.embedding + c.head for c in counts)
  assert (row['kind'], row['axes']) == ('all-reduce', 'replica')
  assert row['bytes'] == pytest.approx(tables / 4 * 4 / 2 * 2)


def test_rematerialisation_repeats_the_blocks(plans):
  asked, _, full = plans['train']
  model = full['flops']['model']
  stacks = asked.model.stacks.values()
  blocks = scores = widening = 0
  for stack, source in zip(stacks, (0, toy.LENGTH), strict=True):
    lengths = dict(length=toy.LENGTH, source_length=source)
    blocks += model_flops.stack_forward(stack, **lengths)
    scores += model_flops.scores(stack, **lengths)
    widening += stack.layers * 4 * toy.LENGTH * stack.width * stack.mlp_width
  expected = {
    'full': blocks,
    'attention': blocks - scores,
    'narrow_dots': widening,
    'dots': 0,
    'none': 0,
  }
  peaks = []
  for remat, again in expected.items():
    found = plan(compute__remat=remat)[2]
    repeated = found['flops']['products'] - model
    assert repeated == pytest.approx(toy.ROWS * again / 8)
    peaks.append(found['memory']['peak'])
  assert peaks == sorted(set(peaks))


def test_microbatches_trade_activations_for_gradients():
  parts = {
    n: plan(train__batch_size=64, train__microbatches=n)[2]['memory']['parts']
    for n in (1, 2)
  }
  assert parts[2]['activations'] == parts[1]['activations'] / 2
  assert parts[2]['gradients'] == 2 * parts[1]['gradients']


def network(where=toy.WHERE, **sizes):
  mesh = mesh_lib.make_mesh(mesh_lib.MeshConfig(**sizes), jax.devices()[:8])
  return roofline.Network(mesh, where)


@pytest.mark.parametrize(
  'axes, kind, sent, seconds',
  [
    (('fsdp',), 'all-gather', 7e9, 7e9 / 450e9),
    (('replica', 'fsdp'), 'all-reduce', 14e9, 14e9 / 450e9),
    (('tensor',), 'all-gather', 0, 0),
  ],
)
def test_a_collective_along_mesh_axes(axes, kind, sent, seconds):
  found = network().along(axes, kind, 8e9)
  assert found == pytest.approx((sent, seconds))


@pytest.mark.parametrize(
  'pairs, axes, seconds',
  [
    ('{{0,1},{1,0},{2,3},{3,2}}', 'fsdp', 0.02),
    ('{{0,4},{4,0}}', 'replica', 0.02),
    ('{{0,5},{1,4}}', 'replica+fsdp', 0.02),
    ('{{0,0}}', 'one device', 0),
  ],
)
def test_a_permutation_moves_along_mesh_axes(pairs, axes, seconds):
  one = hlo.Collective('collective-permute', 9e9, pairs, 1, False, '', '')
  found = network(replica=2, fsdp=4).cost(one)
  assert found == (axes, 9e9, pytest.approx(seconds))


def test_data_that_leaves_a_node_goes_over_the_network():
  chip = dataclasses.replace(toy.WHERE.chip, host_chips=4)
  where = dataclasses.replace(toy.WHERE, chip=chip)
  links = network(where, replica=2, fsdp=4)
  inside = links.along(('fsdp',), 'all-gather', 8e9)
  assert inside == pytest.approx((6e9, 6e9 / 450e9))
  between = links.along(('replica',), 'all-reduce', 8e9)
  assert between == pytest.approx((8e9, 8e9 / 50e9))
  pairs = '{{0,1},{3,4}}'
  moved = hlo.Collective('collective-permute', 9e9, pairs, 1, False, '', '')
  assert links.cost(moved)[2] == pytest.approx(9e9 / 50e9)


@pytest.mark.parametrize(
  'topology, places, gigabytes',
  [
    # v5e: 100 GB/s into a dimension, both ways; 16 chips close to a ring.
    ('v5e:16x16', [(x, y) for x in range(16) for y in range(16)], 200),
    ('v5e:16x16', [(x, y) for x in range(16) for y in range(4)], 150),
    ('v5e:16x16', [(x, y) for x in range(8) for y in range(8)], 100),
    ('v5e:16x16', [(0, 0), (0, 4), (0, 8), (0, 12)], 25),
    ('v5e:16x16', [(0, 0), (0, 8)], 12.5),
    ('v5p:4x4x4', [(x, 0, 0) for x in range(4)], 200),
    # Two devices per chip share its links; inside a chip they have their own.
    ('tpu7x:2x2x1', [(x, 0, 0) for x in (0, 0, 1, 1)], 50),
    ('tpu7x:2x2x1', [(0, 0, 0), (0, 0, 0)], 600),
  ],
)
def test_a_part_of_a_torus_has_a_part_of_its_links(topology, places, gigabytes):
  members = [types.SimpleNamespace(coords=place) for place in places]
  mesh = types.SimpleNamespace(
    devices=np.array(members, object),
    axis_names=('fsdp',),
    shape={'fsdp': len(places)},
    size=len(places),
  )
  links = roofline.Network(mesh, chips.parse(topology))
  sent, seconds = links.along(('fsdp',), 'all-gather', 1e9)
  assert sent / seconds == pytest.approx(gigabytes * 1e9)
