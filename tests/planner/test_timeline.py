"""Times of a GPU program that is small enough to count by hand."""

import types

import pytest

from encdec_adapt.planner import chips, hlo, kernels, roofline, timeline

# A loop of 3 that updates a row of a stack, a gather beside which a product
# runs, a product of cuBLAS, a kernel, and a sum that nothing runs beside.
PROGRAM = """HloModule jit_f, is_scheduled=true

%gemm (a: bf16[256,512], b: bf16[512,512]) -> bf16[256,512] {
  %a = bf16[256,512]{1,0} parameter(0)
  %b = bf16[512,512]{1,0} parameter(1)
  ROOT %dot.1 = bf16[256,512]{1,0} dot(%a, %b), lhs_contracting_dims={1}
}

%row (s: f32[16,256], i: s32[], x: f32[16,256]) -> f32[16,256] {
  %s = f32[16,256]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = f32[16,256]{1,0} parameter(2)
  %flat = f32[16,256]{1,0} bitcast(%x)
  %slice = f32[1,256]{1,0} dynamic-slice(%flat, %i), dynamic_slice_sizes={1,256}
  ROOT %new = f32[16,256]{1,0} dynamic-update-slice(%s, %slice, %i)
}

%body (p: (s32[], f32[16,256], f32[16,256])) -> (s32[], f32[16,256]) {
  %p = (s32[], f32[16,256]{1,0}, f32[16,256]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%p), index=0
  %t = f32[16,256]{1,0} get-tuple-element(%p), index=1
  %u = f32[16,256]{1,0} get-tuple-element(%p), index=2
  %rows = f32[16,256]{1,0} fusion(%t, %n, %u), kind=kLoop, calls=%row
  ROOT %out = (s32[], f32[16,256]{1,0}, f32[16,256]{1,0}) tuple(%n, %rows, %u)
}

%stop (p.1: (s32[])) -> pred[] {
  %p.1 = (s32[]) parameter(0)
}

ENTRY %main (w: bf16[128,512], x.1: bf16[256,512]) -> bf16[256,512] {
  %w = bf16[128,512]{1,0} parameter(0)
  %x.1 = bf16[256,512]{1,0} parameter(1)
  %start = ((bf16[128,512]{1,0}), bf16[512,512]{1,0}) all-gather-start(%w),\
 replica_groups={{0,1,2,3}}, dimensions={0}
  %y = bf16[256,512]{1,0} fusion(%x.1, %v), kind=kCustom, calls=%gemm
  %v = bf16[512,512]{1,0} all-gather-done(%start)
  %z = (bf16[256,512]{1,0}, s8[4096]{0}) custom-call(%y, %v),\
 custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{\
"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  %loop = (s32[], f32[16,256]{1,0}, f32[16,256]{1,0}) while(%init),\
 condition=%stop, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %grad.7 = (bf16[2,256,4,64]{3,2,1,0}, bf16[2,256,4,64]{3,2,1,0})\
 custom-call(%q, %k, %k), custom_call_target="mosaic_gpu_v2",\
 metadata={op_name="jit(f)/transpose(jvp())/anonymous/mpmd_map"}
  %q = bf16[2,128,8,64]{3,2,1,0} parameter(2)
  %k = bf16[2,256,4,64]{3,2,1,0} parameter(3)
  ROOT %sum = bf16[256,512]{1,0} all-reduce(%y), replica_groups={{0,1,2,3}},\
 to_apply=%add
}
"""
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
