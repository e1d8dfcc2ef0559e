"""Totals of programs small enough to count by hand."""

import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.planner import chips, hlo, roofline

# A loop of 12 whose body multiplies [256, 512] by [512, 512], gathers the
# weight from four devices and sums the result; afterwards a kernel.
PROGRAM = (pathlib.Path(__file__).parent / 'program.hlo').read_text()


def test_a_loop_counts_as_often_as_it_runs():
  found = hlo.totals(PROGRAM)
  assert found.flops == 12 * 2 * 256 * 512 * 512
  assert found.cycles['body.1'] == 12 * (1000 + 50)
  assert [(c.kind, c.bytes, c.times) for c in found.collectives.values()] == [
    ('all-gather', 512 * 512 * 2, 12),
    ('all-reduce', 256 * 512 * 2, 12),
  ]
  assert not any(c.overlapped for c in found.collectives.values())
  (kernel,) = found.kernels
  assert (kernel.name, kernel.times) == ('splash_mha_fwd', 1)
  assert kernel.operands == ((256, 512),)


@pytest.mark.parametrize('share, turns', [(1, 16), (1 / 2, 8), (1 / 8, 4)])
def test_a_loop_over_pairs_with_work_takes_fewer_turns_of_packed_rows(
  share, turns
):
  def loop(x, count):
    # As `ops.attention_tiles` names it: of four blocks and four tiles.
    with jax.named_scope('at_most_16_turns'):
      return jax.lax.fori_loop(0, count, lambda _, x: x @ x, x)

  compiled = jax.jit(loop).lower(jnp.ones((64, 64)), 3).compile()
  assert hlo.totals(compiled.as_text(), share).flops == turns * 2 * 64**3


def in_fusions(channels):
  """The program whose gather is in fusions instead, one for each channel."""
  (line,) = [x for x in PROGRAM.splitlines() if ' %all-gather.1 =' in x]
  parts, calls = [], []
  for index, channel in enumerate(channels):
    name = 'all-gather.1' if index == 0 else f'piece.{index}'
    inside = line.replace('channel_id=1', f'channel_id={channel}')
    parts.append(
      f'%fused.{index} (w: bf16[128,512]) -> bf16[512,512] {{\n'
      '  %w = bf16[128,512]{1,0} parameter(0)\n' + inside + '\n}\n'
    )
    calls.append(
      f'  %{name} = bf16[512,512]{{1,0}} fusion(%w), kind=kOutput,'
      f' calls=%fused.{index}'
    )
  head, rest = PROGRAM.replace(line, '\n'.join(calls)).split('\n', 1)
  return '\n'.join([head, *parts, rest])


def test_a_collective_in_pieces_counts_once():
  found = hlo.totals(in_fusions(['7', '7'])).collectives
  assert [c.kind for c in found.values()] == ['all-gather', 'all-reduce']
  gathered = next(iter(found.values()))
  assert gathered.overlapped and gathered.times == 12
  assert len(hlo.totals(in_fusions(['7', '8'])).collectives) == 3
  # Outside of fusions they may share a channel.
  text = PROGRAM.replace('channel_id=2', 'channel_id=1')
  assert len(hlo.totals(text).collectives) == 2


SENT = """  %send.1 = (bf16[128,512]{1,0}, u32[], token[]) send(%w, %after),\
 channel_id=6, is_host_transfer=true, frontend_attributes={\
_xla_host_transfer_handler_name="xla_megascale_runtime",\
_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
"""


def test_what_crosses_slices_is_counted():
  (line,) = [x for x in PROGRAM.splitlines() if ' %all-gather.1 =' in x]
  found = hlo.totals(PROGRAM.replace(line, f'{line}\n{SENT}')).collectives
  (sent,) = [c for c in found.values() if c.groups == hlo.SLICES]
  expected = 'all-reduce', 128 * 512 * 2, 12
  assert (sent.kind, sent.bytes, sent.times) == expected
  assert sent.overlapped and len(found) == 3


def test_axes_of_a_program_of_two_slices():
  # Each slice has 2x2 chips.
  devices = [
    types.SimpleNamespace(slice_index=i // 4, coords=(i // 2 % 2, i % 2, 0))
    for i in range(8)
  ]
  names = ('replica', 'fsdp', 'tensor')
  mesh = types.SimpleNamespace(
    devices=np.array(devices, object).reshape(2, 2, 2),
    axis_names=names,
    shape=dict.fromkeys(names, 2),
  )
  hardware = chips.parse('v5e:2x2', 2)
  network = roofline.Network(mesh, hardware)

  def cost(groups, kind='all-reduce'):
    return network.cost(hlo.Collective(kind, 100.0, groups, 1, False, ''))

  assert cost('{{0,1},{2,3}}')[:2] == ('tensor', 100.0)
  assert cost('{{0,2},{1,3}}')[0] == 'fsdp'
  assert cost('{{0,1,2,3}}')[:2] == ('fsdp+tensor', 150.0)
  seconds = 100 / hardware.chip.network_bandwidth
  for kind in ('all-reduce', 'all-gather'):
    assert cost(hlo.SLICES, kind) == (hlo.SLICES, 100.0, seconds)


def test_an_unrolled_loop_counts_by_its_increment():
  """As loops of collective matmuls do: two iterations in one."""
  twice = '%half = s32[]{:T(128)} add(%i, %one)\n  %next = s32[]{:T(128)}'
  text = PROGRAM.replace('%next = s32[]{:T(128)}', twice)
  text = text.replace('add(%i, %one)\n  ROOT', 'add(%half, %one)\n  ROOT')
  assert hlo.totals(text).flops == 6 * 2 * 256 * 512 * 512


@pytest.mark.parametrize(
  'old, new, words',
  [
    ('constant(12)', 'parameter(1)', r'while\.1'),
    ('tuple(%next,', 'tuple(%i,', 'does not count a loop up'),
    ('%one = s32[]{:T(128)} constant(1)', '%one = s32[] partition-id()', 'one'),
    (' while(', ' conditional(', 'no branches'),
    ('ENTRY', '', 'no entry'),
  ],
)
def test_programs_that_are_not_understood_are_refused(old, new, words):
  assert old in PROGRAM
  with pytest.raises(hlo.UnknownProgramError, match=words):
    hlo.totals(PROGRAM.replace(old, new))


@pytest.mark.parametrize(
  'branches',
  [
    'branch_computations={%body.1, %nothing}',
    'branch_computations={%nothing, %body.1, %body.1}',
    'true_computation=%body.1, false_computation=%nothing',
  ],
)
def test_the_largest_branch_counts(branches):
  (line,) = [x for x in PROGRAM.splitlines() if ' while(' in x]
  of = line.split(' while(')[1].split(')')[0]
  start = line.split(' while(')[0]
  text = PROGRAM.replace(
    line, f'{start} conditional(%p, {of}, {of}), {branches}'
  )
  text = text.replace('ENTRY', '%nothing (t: f32[]) -> f32[] {\n}\n\nENTRY')
  assert hlo.totals(text).flops == 2 * 256 * 512 * 512


@pytest.mark.parametrize('first', [True, False])
def test_of_branches_without_products_the_one_that_makes_more_counts(first):
  bodies = {
    '%large': 'ROOT %sorted = f32[64]{0} sort(%x)',
    '%small': 'ROOT %same = f32[2]{0} negate(%x)',
  }
  names = list(bodies) if first else list(bodies)[::-1]
  parts = [f'{n} (x: f32[]) -> f32[] {{\n  {b}\n}}' for n, b in bodies.items()]
  branches = f'branch_computations={{{", ".join(names)}}}'
  entry = f'  ROOT %c = f32[] conditional(%p), {branches}'
  text = '\n\n'.join(
    ['HloModule m', *parts, f'ENTRY %main (p: f32[]) -> f32[] {{\n{entry}\n}}']
  )
  counted = [step.op.name for step in hlo.totals(text).schedule]
  assert counted == ['sorted', 'c']


def instruction(line):
  text = f'HloModule m\n\nENTRY %main (p: f32[]) -> f32[] {{\n{line}\n}}\n'
  computations, entry = hlo.parse(text)
  return computations[entry][0]


@pytest.mark.parametrize(
  'line, types, flops',
  [
    (
      '  %d = f32[3,5]{1,0} dot(%a, %b), lhs_contracting_dims={1},'
      ' rhs_contracting_dims={0}',
      {'a': 'f32[3,7]{1,0}', 'b': 'f32[7,5]{1,0}'},
      2 * 3 * 5 * 7,
    ),
    # Eight heads [128, 64] x [64, 32] as XLA writes them: the batch dimension
    # is a spatial one, of whose window all but one position is padding.
    (
      '  %c = f32[8,128,32]{2,1,0} convolution(%a, %b), window={size=8'
      ' stride=7 pad=0_0 lhs_dilate=8}, dim_labels=0bf_0io->0bf',
      {'a': 'f32[8,128,64]{2,1,0}', 'b': 'f32[8,64,32]{2,1,0}'},
      2 * 8 * 128 * 32 * 64,
    ),
    ('  %s = f32[3]{0} add(%a, %a)', {'a': 'f32[3]{0}'}, 0),
  ],
)
def test_flops_of_products(line, types, flops):
  assert hlo.product_flops(instruction(line), types) == flops


@pytest.mark.parametrize(
  'text, groups',
  [
    ('', [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ('{}', [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ('{{0,2},{1,3},{4,6},{5,7}}', [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ('[2,4]<=[8]', [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ('[4,2]<=[2,4]T(1,0)', [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ("mesh['a'=2,'b'=4] {'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ("mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    (
      "mesh['a'=2,'b'=2,'c'=2] {'a','c'}",
      [[0, 1, 4, 5], [2, 3, 6, 7]],
    ),
    # The mesh has the devices 0, 2, 4, 6, then 1, 3, 5, 7.
    (
      "mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}",
      [[0, 2, 4, 6], [1, 3, 5, 7]],
    ),
    (
      "mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}",
      [[0, 1], [2, 3], [4, 5], [6, 7]],
    ),
  ],
)
def test_replica_groups(text, groups):
  stated = f'replica_groups={text}, a={{1}}' if text else 'a={1}'
  assert hlo._groups(f'channel_id=3, {stated}') == text
  np.testing.assert_array_equal(roofline.replica_groups(text, 8), groups)


@pytest.mark.parametrize(
  'text',
  [
    '<=[8]',
    "mesh['a'=8] device_ids=[0] {'a'}",
    "mesh['a'=2,'b'=4], device_ids=([0,2,4,6,1,3,5,7]) {'b'}",
  ],
)
def test_unknown_replica_groups_are_refused(text):
  with pytest.raises(hlo.UnknownProgramError, match='not understood'):
    hlo._groups(f'replica_groups={text}, to_apply=%a')
