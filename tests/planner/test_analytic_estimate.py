"""The analytic cost model: exact where possible, and monotonic."""

import types

import jax
import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.models import forward_flops, parameters
from encdec_adapt.ops import attention_tokamax
from encdec_adapt.planner import chips, hlo, program_shapes, programs, roofline
from encdec_adapt.sharding import mesh as mesh_lib
from tests.planner import toy


@pytest.fixture(scope='module')
def plans():
  return {name: toy.plan(toy.program_job(name)) for name in programs.PROGRAMS}


@pytest.mark.parametrize('name', programs.PROGRAMS)
def test_arguments_are_exact_and_memory_adds_up(plans, name):
  program, found = toy.program_job(name).program(), plans[name]
  memory = found['memory']
  assert memory['arguments'] == program_shapes.tree_bytes(program.arguments)
  assert memory['beside'] == program_shapes.tree_bytes(program.beside)
  assert memory['temporary'] == sum(memory['parts'].values())
  assert memory['peak'] == memory['temporary'] + sum(
    (*memory['arguments'].values(), *memory['beside'].values())
  )
  assert found['fits'] == (memory['peak'] <= memory['budget'])
  assert 0 < found['mfu'] < 1


def test_evaluation_and_decoding_have_no_backward_pass(plans):
  train = plans['train']
  for name in ('eval', 'decode'):
    found = plans[name]
    assert found['memory']['temporary'] < train['memory']['temporary'] / 2
    assert found['flops']['products'] == found['flops']['model']
    kinds = {row['for']: row['kind'] for row in found['collectives']}
    assert kinds == {'weights': 'all-gather', 'hidden states': 'all-gather'}
    assert found['roofline']['step_s'] < train['roofline']['step_s']


def test_a_policy_samples_with_a_copy_beside_its_state():
  job = toy.job('sample', **toy.POLICY, mesh__fsdp=2, mesh__replica=4)
  program, trained = job.program(), toy.job(mesh__fsdp=2, mesh__replica=4)
  sizes, beside = (
    program_shapes.tree_bytes(x) for x in (program.arguments, program.beside)
  )
  # In bfloat16, divided over the same two devices as the parameters, by heads
  # and not by width; norms are whole, and in float32.
  parameters = program_shapes.tree_bytes(trained.program().arguments)[
    'parameters'
  ]
  assert beside['trained parameters'] == parameters
  assert parameters / 2 < sizes['parameters'] < parameters * 0.6
  assert beside['teacher'] > 0 and beside['optimizer'] > 2 * parameters * 0.99
  # Caches of the encoder's and the decoder's tokens, for 4 completions each.
  rows = 4 * toy.ROWS / 4
  stack = job.model.decoder
  cache = stack.layers * 2 * stack.kv_heads / 2 * stack.head_dim * 2
  assert sizes['caches'] == pytest.approx(
    rows * cache * (16 + toy.LENGTH), rel=0.05
  )
  # Heads that do not divide are divided over `tensor` alone.
  whole = toy.job('sample', **toy.POLICY, mesh__fsdp=8)
  assert whole.program_rules.heads == ('tensor',)
  copy = program_shapes.tree_bytes(whole.program().arguments)['parameters']
  assert copy == pytest.approx(2 * sizes['parameters'], rel=0.05)
  with pytest.raises(errors.UserError, match='samples no completions'):
    toy.job('sample')


def test_a_policy_holds_its_reward_model():
  jobs = {
    name: toy.job(name, **toy.POLICY, mesh__fsdp=8)
    for name in ('train', 'sample', 'reward')
  }
  programs_by_name = {name: job.program() for name, job in jobs.items()}
  size = program_shapes.tree_bytes(programs_by_name['train'].arguments)
  # In bfloat16 and sharded as the policy; the head is a vector.
  held = size['parameters'] / 2 + 2 * jobs['train'].model.decoder.width / 8
  for name in ('train', 'sample'):
    beside = program_shapes.tree_bytes(programs_by_name[name].beside)
    assert beside['reward model 1'] == pytest.approx(held, rel=0.02)
  scoring = programs_by_name['reward']
  assert set(scoring.arguments) == {'reward model 1', 'batch'}
  assert set(scoring.beside) == {'trained parameters', 'optimizer', 'teacher'}
  shapes = {name: x.shape for name, x in scoring.arguments['batch'].items()}
  # BOS and all of a completion.
  assert shapes['decoder_tokens'] == (toy.ROWS, 4, 16 + 1)
  assert shapes['encoder_tokens'] == (toy.ROWS, toy.LENGTH)
  assert jobs['reward'].rewards.missing == ['nowhere/judge']
  with pytest.raises(errors.UserError, match=r'rewards.models is \(\), or'):
    toy.job('reward', **toy.POLICY | {'train__rewards__models': ()})


def test_both_answers_of_a_preference_are_counted():
  changes = {'data__objective': 'preferences'}
  changes['data__source'] = 'preferences:x#p,c,r'
  single, policy, reward = (
    toy.job(),
    toy.job(**changes, loss__kind='simpo'),
    toy.job(**changes, loss__kind='reward'),
  )
  tokens = [
    [work.tokens(stack_pass) for stack_pass in work.passes]
    for work in map(lambda job: job.work, (single, policy, reward))
  ]
  encoder, decoder = tokens[0]
  assert tokens[1:] == [[encoder, 2 * decoder]] * 2
  parts = [toy.plan(job)['memory']['parts'] for job in (policy, reward)]
  assert parts[0]['loss'] > parts[1]['loss'] == 0


@pytest.mark.parametrize('wide', [False, True])
def test_kernels_of_gpus_are_counted_apart(wide, plans, monkeypatch):
  if wide:
    monkeypatch.setattr(attention_tokamax, 'KERNEL_HEAD_DIM', 16)
  job = toy.job(compute__attention='tokamax')
  found = toy.plan(job)
  kernels = {row['name']: row for row in found['kernels']}
  encoder, decoder = job.model.encoder, job.model.decoder
  calls = encoder.layers + 2 * decoder.layers
  # Once more for the backward pass; gradients of wide heads are products.
  expected = {'attention': 2 * calls}
  if not wide:
    expected |= {'attention_dq': calls, 'attention_dkv': calls}
  assert {name: row['calls'] for name, row in kernels.items()} == expected
  scores = toy.ROWS * (
    forward_flops.scores(encoder, toy.LENGTH)
    + forward_flops.scores(decoder, toy.LENGTH, source_length=toy.LENGTH)
  )
  shares = {name: row['flops'] * 8 / scores for name, row in kernels.items()}
  assert list(shares.values()) == ([2] if wide else [2, 1.5, 2])
  # By the formula, a pass, its repetition, and twice for gradients.
  products = plans['train']['flops']['products'] - 4 * scores / 8
  if wide:
    products += 2.5 * scores / 8
  assert found['flops']['products'] == pytest.approx(products)


def test_offloaded_state_is_copied_twice(plans):
  plain, held = plans['train'], toy.plan(toy.job(optimizer__offload=True))
  size = plain['memory']['arguments']['optimizer']
  size -= held['memory']['arguments']['optimizer']
  assert size > 0 == plain['roofline']['host_s']
  seconds = 2 * size / toy.where().chip.host_bandwidth
  assert held['roofline']['host_s'] == pytest.approx(seconds)


def test_rematerialisation_repeats_the_blocks(plans):
  model = plans['train']['flops']['model']
  blocks = scores = widening = 0
  stacks = toy.job().model.stacks.values()
  for stack, source in zip(stacks, (0, toy.LENGTH), strict=True):
    lengths = dict(length=toy.LENGTH, source_length=source)
    blocks += forward_flops.stack_forward(stack, **lengths)
    scores += forward_flops.scores(stack, **lengths)
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
    found = toy.plan(toy.job(compute__remat=remat))
    repeated = found['flops']['products'] - model
    assert repeated == pytest.approx(toy.ROWS * again / 8)
    peaks.append(found['memory']['peak'])
  assert peaks == sorted(set(peaks))


def test_microbatches_trade_activations_for_gradients():
  whole, halves = (
    toy.plan(toy.job(train__batch_size=64, train__microbatches=n))
    for n in (1, 2)
  )
  whole, halves = whole['memory']['parts'], halves['memory']['parts']
  assert halves['activations'] == whole['activations'] / 2
  assert halves['gradients'] == 2 * whole['gradients']


def test_an_embedding_model_is_compared_with_all_texts():
  fields = {
    'model__kind': 'encoder_only',
    'model__head__kind': 'embedding',
    'model__head__dimensions': (16, 8),
    'loss__kind': 'infonce',
    'data__objective': 'embed:texts=4',
    'data__source': 'embed:x#q,p',
    'data__decoder_length': 0,
  }
  job = toy.job(**fields)
  table = parameters.parameter_table(job.model)
  kernels = sum(
    int(np.prod(info.shape))
    for path, info in table.items()
    if info.shape[-1] > 1 and not path.endswith(('scale', 'table'))
  )
  pairs = forward_flops.scores(job.model.decoder, toy.LENGTH)
  forward = toy.ROWS * (2 * toy.LENGTH * kernels + pairs) / 8
  found = toy.plan(job)
  assert found['flops']['model'] == pytest.approx(3 * forward)
  assert found['flops']['products'] == pytest.approx(4 * forward)  # Remat.
  # A float32 for each text of a device, text of the batch and size.
  texts = toy.ROWS * 4
  assert found['memory']['parts']['loss'] == texts / 8 * texts * 4 * 3
  with pytest.raises(errors.UserError, match='generates no text'):
    toy.job('decode', **fields)
  evaluation = toy.plan(toy.job('eval', **fields))['memory']['parts']
  assert 0 < evaluation['loss'] < found['memory']['parts']['loss']
  # Gradient caching: activations of a half, for another forward pass.
  fields['train__batch_size'] = 2 * toy.ROWS
  whole, halves = (
    toy.plan(toy.job(**fields, train__microbatches=n)) for n in (1, 2)
  )
  repeated = halves['flops']['products'] - whole['flops']['products']
  assert repeated == pytest.approx(2 * forward)
  whole, halves = (x['memory']['parts'] for x in (whole, halves))
  assert halves['loss'] == whole['loss']
  # A layer and the loss, which run in turn, share memory.
  layers, half = (x['activations'] + x['loss'] for x in (whole, halves))
  assert half == layers / 2


def _network(where=toy.where(), **sizes):
  mesh = mesh_lib.make_mesh(mesh_lib.MeshConfig(**sizes), jax.devices()[:8])
  return roofline.Network(mesh, where)


@pytest.mark.parametrize(
  'nodes, axes, kind, sent, bandwidth',
  [
    (1, ('fsdp',), 'all-gather', 7e9, 450e9),
    (1, ('replica', 'fsdp'), 'all-reduce', 14e9, 450e9),
    (1, ('tensor',), 'all-gather', 0, 450e9),
    (2, ('fsdp',), 'all-gather', 6e9, 450e9),
    # Data that leaves a node goes over the network.
    (2, ('replica',), 'all-reduce', 8e9, 50e9),
    (2, ('replica', 'fsdp'), 'all-gather', 7e9, 4 * 50e9),
  ],
)
def test_a_collective_along_mesh_axes(nodes, axes, kind, sent, bandwidth):
  hardware = toy.where(host_chips=8 // nodes)
  network = _network(hardware, replica=nodes, fsdp=8 // nodes)
  cost = network.cost_along(axes, kind, 8e9)
  assert cost == pytest.approx((sent, sent / bandwidth))


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
  permute = hlo.Collective('collective-permute', 9e9, pairs, 1, False, '')
  cost = _network(replica=2, fsdp=4).cost(permute)
  assert cost == (axes, 9e9, pytest.approx(seconds))


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
  )
  links = roofline.Network(mesh, chips.parse(topology))
  sent, seconds = links.cost_along(('fsdp',), 'all-gather', 1e9)
  assert sent / seconds == pytest.approx(gigabytes * 1e9)
