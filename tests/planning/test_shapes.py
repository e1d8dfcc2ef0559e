"""Estimates from shapes: exact where they can be, and in the right order."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from encdec_adapt.cli import errors
from encdec_adapt.models import model_flops, parameters
from encdec_adapt.planning import (
  chips,
  hlo,
  programs,
  roofline,
  search,
  shapes,
)
from encdec_adapt.sharding import layout_report as sharding_report
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.training import setup
from tests.planning import toy


def plan(name='train', **changes):
  asked = toy.settings(**changes)
  mesh = mesh_lib.make_mesh(asked.mesh, jax.devices()[:8])
  return asked, mesh, shapes.describe(name, asked, mesh, toy.WHERE, toy.BUDGET)


def test_what_follows_from_shardings_is_exact():
  asked, mesh, found = plan()
  memory = found['memory']
  assert memory['arguments'] == programs.argument_bytes(
    programs.train(asked, mesh)
  )
  assert memory['peak'] == memory['temporary'] + sum(
    memory['arguments'].values()
  )
  assert memory['temporary'] == sum(memory['parts'].values())
  assert found['fits'] == (memory['peak'] <= toy.BUDGET)
  assert found['source'] == 'shapes'


@pytest.mark.parametrize(
  'name, parts',
  [('eval', {'loss', 'activations'}), ('decode', {'logits', 'activations'})],
)
def test_evaluation_and_decoding_keep_nothing_for_a_backward_pass(name, parts):
  asked, mesh, found = plan(name)
  _, _, train = plan()
  program = programs.PROGRAMS[name](asked, mesh)
  memory, times = found['memory'], found['roofline']
  assert memory['arguments'] == programs.argument_bytes(program)
  assert memory['beside'] == programs.tree_bytes(program.beside)
  assert set(memory['parts']) == parts
  assert memory['peak'] == memory['temporary'] + sum(
    (*memory['arguments'].values(), *memory['beside'].values())
  )
  assert memory['temporary'] < train['memory']['temporary'] / 2
  assert found['flops']['products'] == found['flops']['model']
  kinds = {row['for']: row['kind'] for row in found['collectives']}
  assert kinds == {'weights': 'all-gather', 'hidden states': 'all-gather'}
  assert 0 < found['mfu'] < 1
  assert times['step_s'] < train['roofline']['step_s']


def test_decoding_reads_its_weights_and_caches():
  _, _, found = plan('decode')
  given = found['memory']['arguments']
  weights = next(r for r in found['collectives'] if r['for'] == 'weights')
  gathered = weights['bytes'] * 8 / 7
  read = sum(given.values()) + 2 * gathered
  assert found['roofline']['memory_s'] == pytest.approx(
    read / toy.WHERE.chip.hbm_bandwidth
  )
  # The encoder's weights are not read any more.
  evaluated = plan('eval')[2]['collectives']
  whole = next(r for r in evaluated if r['for'] == 'weights')
  assert 0 < weights['bytes'] < whole['bytes']


def test_kernels_of_gpus_are_counted_apart():
  asked, mesh, chunked = plan()
  _, _, found = plan(compute__attention='triton')
  kernels = {row['name']: row for row in found['kernels']}
  assert chunked['kernels'] == []
  stacks = asked.model.stacks.values()
  # Self-attention of both stacks, cross-attention; and again for the backward.
  calls = sum(stack.layers for stack in stacks) + asked.model.decoder.layers
  assert {name: row['calls'] for name, row in kernels.items()} == {
    'flash_forward': 2 * calls,
    'flash_backward_queries': calls,
    'flash_backward_keys': calls,
  }
  scores = toy.ROWS * sum(
    model_flops.scores(s, toy.LENGTH, source_length=source)
    for s, source in zip(stacks, (0, toy.LENGTH), strict=True)
  )
  shares = {name: row['flops'] * 8 / scores for name, row in kernels.items()}
  assert shares == {
    'flash_forward': 2,
    'flash_backward_queries': 1.5,
    'flash_backward_keys': 2,
  }
  # Of the formula: a pass, the same once more, and twice for gradients.
  products = chunked['flops']['products'] - 4 * scores / 8
  assert found['flops']['products'] == pytest.approx(products)
  evaluated = plan('eval', compute__attention='triton')[2]
  assert [row['name'] for row in evaluated['kernels']] == ['flash_forward']


def test_what_the_host_holds_is_copied_twice():
  _, _, plain = plan()
  _, _, found = plan(optimizer__offload=True)
  held = plain['memory']['arguments']['optimizer']
  held -= found['memory']['arguments']['optimizer']
  assert held > 0 == plain['roofline']['host_s']
  seconds = 2 * held / toy.WHERE.chip.host_bandwidth
  assert found['roofline']['host_s'] == pytest.approx(seconds)


def test_copies_along_an_axis_are_listed(monkeypatch):
  monkeypatch.setattr(sharding_report, 'LARGE', 2**10)
  _, _, found = plan(mesh__replica=2, mesh__fsdp=4)
  (copies,) = [c for c in found['copies'] if c['part'] == 'parameters'][:1]
  assert copies['axes'] == 'replica'
  assert copies['bytes'] > 0.9 * found['memory']['arguments']['parameters']


def test_rematerialisation_computes_the_blocks_again():
  asked, _, found = plan()
  model = found['flops']['model']
  lengths = asked.data.train.lengths
  assert (
    model == setup.step_flops(asked.model, lengths, asked.train.batch_size) / 8
  )
  again = {}
  for remat in ('none', 'narrow_dots', 'attention', 'full'):
    again[remat] = plan(compute__remat=remat)[2]['flops']['products'] - model
  stacks = asked.model.stacks.values()
  lengths = [(toy.LENGTH, 0), (toy.LENGTH, toy.LENGTH)]
  blocks = scores = widening = 0
  for stack, (length, source) in zip(stacks, lengths, strict=True):
    shape = stack
    blocks += model_flops.stack_forward(shape, length, source_length=source)
    scores += model_flops.scores(shape, length, source_length=source)
    widening += stack.layers * 2 * length * stack.width * 2 * stack.mlp_width
  assert again == {
    'none': 0,
    'narrow_dots': toy.ROWS * widening / 8,
    'attention': toy.ROWS * (blocks - scores) / 8,
    'full': toy.ROWS * blocks / 8,
  }


def peak(**changes):
  return plan(**changes)[2]['memory']['peak']


def test_memory_rises_with_what_is_kept():
  kept = [
    peak(compute__remat=remat)
    for remat in ('full', 'attention', 'narrow_dots', 'dots', 'none')
  ]
  assert kept == sorted(set(kept))
  assert peak(train__batch_size=32) > peak()
  parts = {
    n: plan(train__batch_size=64, train__microbatches=n)[2]['memory']['parts']
    for n in (1, 2)
  }
  assert parts[2]['activations'] == parts[1]['activations'] / 2
  assert parts[2]['gradients'] == 2 * parts[1]['gradients']


@pytest.mark.parametrize(
  'axes, kind, sent, seconds',
  [
    (('fsdp',), 'all-gather', 7e9, 7e9 / 450e9),
    (('replica', 'fsdp'), 'all-reduce', 14e9, 14e9 / 450e9),
    (('tensor',), 'all-gather', 0, 0),
  ],
)
def test_a_collective_along_mesh_axes(axes, kind, sent, seconds):
  mesh = mesh_lib.make_mesh(mesh_lib.MeshConfig(), jax.devices()[:8])
  network = roofline.Network(mesh, toy.WHERE)
  assert network.along(axes, kind, 8e9) == pytest.approx((sent, seconds))


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
  sizes = mesh_lib.MeshConfig(replica=2, fsdp=4)
  network = roofline.Network(
    mesh_lib.make_mesh(sizes, jax.devices()[:8]), toy.WHERE
  )
  one = hlo.Collective('collective-permute', 9e9, pairs, 1, False, '', '')
  assert network.cost(one) == (axes, 9e9, pytest.approx(seconds))


def test_what_leaves_a_node_goes_over_the_network():
  chip = dataclasses.replace(toy.WHERE.chip, host_chips=4)
  where = dataclasses.replace(toy.WHERE, chip=chip)
  sizes = mesh_lib.MeshConfig(replica=2, fsdp=4)
  network = roofline.Network(
    mesh_lib.make_mesh(sizes, jax.devices()[:8]), where
  )
  inside = network.along(('fsdp',), 'all-gather', 8e9)
  assert inside == pytest.approx((6e9, 6e9 / 450e9))
  # Two devices, but one of each node.
  between = network.along(('replica',), 'all-reduce', 8e9)
  assert between == pytest.approx((8e9, 8e9 / 50e9))
  # And so does a permutation, if one of its pairs does.
  pairs = '{{0,1},{3,4}}'
  moved = hlo.Collective('collective-permute', 9e9, pairs, 1, False, '', '')
  assert network.cost(moved)[2] == pytest.approx(9e9 / 50e9)


class Chip:
  """A TPU chip at a place of its torus."""

  def __init__(self, number, coords):
    self.id, self.coords, self.slice_index = number, coords, 0


@pytest.mark.parametrize(
  'topology, places, gigabytes',
  [
    # v5e: 100 GB/s into a dimension, both ways; 16 chips close to a ring.
    ('v5e:16x16', [(x, y) for x in range(16) for y in range(16)], 200),
    ('v5e:16x16', [(x, y) for x in range(16) for y in range(4)], 150),
    ('v5e:16x16', [(x, y) for x in range(8) for y in range(8)], 100),
    ('v5e:16x16', [(0, 0), (0, 4), (0, 8), (0, 12)], 25),
    ('v5e:16x16', [(0, 0), (0, 8)], 12.5),
    ('v5e:4x4', [(x, y) for x in range(4) for y in range(4)], 100),
    ('v5p:4x4x4', [(x, y, 0) for x in (0, 1) for y in (0, 1)], 200),
    ('v5p:4x4x4', [(x, 0, 0) for x in range(4)], 200),
  ],
)
def test_a_part_of_a_torus_has_a_part_of_its_links(topology, places, gigabytes):
  where = chips.parse(topology)
  members = [Chip(i, place) for i, place in enumerate(places)]
  mesh = types.SimpleNamespace(
    devices=np.array(members), axis_names=('fsdp',), shape={'fsdp': len(places)}
  )
  mesh.size = len(places)
  network = roofline.Network(mesh, where)
  sent, seconds = network.along(('fsdp',), 'all-gather', 1e9)
  assert sent / seconds == pytest.approx(gigabytes * 1e9)


def test_gradients_of_tables_are_summed_over_replicas():
  asked, mesh, found = plan(mesh__replica=4, mesh__fsdp=2)
  name = 'gradients of tables'
  (row,) = [r for r in found['collectives'] if r['for'] == name]
  assert (row['kind'], row['axes']) == ('all-reduce', 'replica')
  counts = parameters.count_by_stack(asked.model).values()
  tables = sum(c.embedding + c.head for c in counts)
  # Half of them in float32, three quarters twice.
  assert row['bytes'] == pytest.approx(tables / 2 * 4 * 3 / 4 * 2)
  alone = plan(mesh__fsdp=8)[2]['collectives']
  assert not [r for r in alone if r['for'] == name]


@pytest.mark.parametrize('name', ['train', 'decode'])
def test_what_collectives_are_exposed_adds_up(name):
  found = plan(name, mesh__fsdp=4, mesh__replica=2)[2]
  total = sum(row['exposed'] for row in found['collectives'])
  assert total == pytest.approx(found['roofline']['exposed_s'])


def test_candidates_are_ranked_and_divide():
  asked = toy.settings()
  found = search.ranked(asked, toy.WHERE, jax.devices()[:8], toy.BUDGET)
  rates = [one.rate for one in found]
  assert rates == sorted(rates, reverse=True)
  assert len({one.flags for one in found}) == len(found)
  for one in found:
    mesh = one.settings.mesh
    assert mesh.replica * mesh.fsdp * mesh.sequence * mesh.tensor == 8
    assert one.settings.train.batch_size % (mesh.replica * mesh.fsdp) == 0
    assert f'--config.compute.remat={one.settings.compute.remat}' in one.flags
  assert {one.settings.mesh.tensor for one in found} == {1, 2}
  text = search.text(found)
  assert len(text.splitlines()) == 1 + len(found)


def test_a_model_that_nothing_fits_is_refused():
  with pytest.raises(errors.UserError, match='any mesh.* 11.3 MiB of 1.0 KiB'):
    search.ranked(toy.settings(), toy.WHERE, jax.devices()[:8], 2**10)
