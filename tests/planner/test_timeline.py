"""Times of a GPU program that is small enough to count by hand."""

import pathlib
import types

import pytest

from encdec_adapt.planner import chips, hlo, kernels, roofline, timeline

# A loop of 3 that updates a row of a stack, a gather beside which a product
# runs, a product of cuBLAS, a kernel, and a sum that nothing runs beside.
PROGRAM = (pathlib.Path(__file__).parent / 'gpu_program.hlo').read_text()
PRODUCT = 2 * 256 * 512 * 512
HARDWARE = chips.parse('h100:4')


@pytest.fixture(scope='module')
def totals():
  return hlo.totals(PROGRAM)


def test_work_of_a_gpu_program_is_counted(totals):
  assert totals.flops == 2 * PRODUCT
  (kernel,) = totals.kernels
  assert kernel.name == 'attention_dkv'
  sizes = {c.kind: c.bytes for c in totals.collectives.values()}
  assert sizes == {'all-gather': 512 * 512 * 2, 'all-reduce': 256 * 512 * 2}
  # Of 128 queries and 256 keys, all of which they see: 8 heads of 64, 2 rows.
  whole = kernels.Attention(128, 256, None, None)
  flops = 4 * 2 * 64 * 8 * 2 * 128 * 256
  assert kernels.flops([kernel], [whole]) == flops
  # Of 256 causal queries in blocks of 128, three of four blocks.
  causal = kernels.Attention(256, 256, None, 0)
  square = hlo.Kernel('flash_attention_sm90', ((256, 8, 64),) * 2, 1, 1, '')
  assert kernels.flops([square], [causal]) == 2 * 2 * 64 * 8 * 3 * 128**2


def test_a_loop_moves_the_rows_that_it_reads_and_writes(totals):
  (step,) = [step for step in totals.schedule if step.op.name == 'rows']
  # A row of the stacks, which is read and written, and its index.
  moved = timeline.moved_bytes(step.op, step.types, totals.computations)
  assert (moved, step.times) == (2 * 256 * 4 + 4, 3)


@pytest.mark.parametrize('seconds', [1.0, 1e-9])
def test_an_exposed_collective_costs_what_its_end_waits_for(totals, seconds):
  network = types.SimpleNamespace(
    hardware=HARDWARE, cost=lambda c: ('fsdp', c.bytes, seconds)
  )
  work, rows = timeline.simulate(totals, network, lambda kernel: 5.0)
  chip = HARDWARE.chip
  product = max(
    PRODUCT / chip.flops / roofline.GPU_PRODUCTS,
    2 * 512 * (256 + 512 + 256) / chip.hbm_bandwidth / roofline.GPU_MEMORY,
  )
  exposed = {row['kind']: row['exposed'] for row in rows}
  assert exposed == {
    'all-gather': pytest.approx(max(0, seconds - product)),
    'all-reduce': pytest.approx(seconds),
  }
  # Two products and the loop; cuBLAS has a little memory of its own.
  assert 2 * product < work < 2.1 * product
