"""Analytic cost model: memory and time of a program from its shapes.

Nothing is compiled. The model plans for GPUs without an installed compiler and
ranks search candidates before the best are compiled. Bytes of parameters,
optimizer state, caches and batch are exact, computed from the shardings;
temporary memory and all times are estimates. This module must not import `hlo`
or `plan_report`, which read compiled programs.
"""

import dataclasses
from typing import Any

from encdec_adapt.models import forward_flops, parameters
from encdec_adapt.ops import partition
from encdec_adapt.planner import chips, program_shapes, programs, roofline
from encdec_adapt.training import step_estimate, workload

# Share of peak FLOP/s reached by weight matmuls, elementwise work included, and
# share of collective time overlapped with other work. Fitted to published
# speeds of Llama 2 7B on 8 and 128 H100; see `planner.calibration`.
PRODUCT_EFFICIENCY = 0.68
HIDDEN = 0.5
# Kernels of `ops.attention_tokamax`, and their FLOPs relative to the forward
# pass, which has 2 matmuls (scores, values). dq has 3 (scores, gradients of
# scores and queries), dkv 4 (scores, gradients of scores, keys and values).
_FORWARD = 'attention'
_BACKWARD = {'attention_dq': 1.5, 'attention_dkv': 2.0}
# The same for `ops.attention_gradients`, which is not a kernel, and its share
# of peak FLOP/s, fitted to a measured step of 2B-2B with packed rows on an H200
# (`calibration.json`); it includes elementwise work of narrow layers.
_PRODUCTS_BACKWARD = 2.5
_GRADIENT_EFFICIENCY = 0.2
_FP32 = 4


@dataclasses.dataclass(frozen=True)
class Arguments:
  """Per-device sizes of a program's arguments.

  Attributes:
    bytes: bytes of the arguments by part; see `program_shapes.Program`.
    beside: bytes of other arrays in the job's memory, by part.
    host: bytes copied between host and device.
    moved: lower bound on bytes of arguments read and written.
    rows: batch rows per device; below 1 if devices share a row.
  """

  bytes: dict[str, float]
  beside: dict[str, float]
  host: float
  moved: float
  rows: float

  @classmethod
  def of(
    cls, job: programs.Job, program: program_shapes.Program
  ) -> 'Arguments':
    """Computes the sizes for a job's program.

    They are independent of `compute.remat`, and depend on the batch only
    through its rows.
    """
    return cls(
      program_shapes.tree_bytes(program.arguments),
      program_shapes.tree_bytes(program.beside),
      program.host_bytes(),
      program.moved_bytes(),
      job.work.device_rows,
    )


# Arguments that scale with the rows per device.
_BY_ROWS = ('batch', 'caches')


def describe(
  job: programs.Job, hardware: chips.Slice, sizes: Arguments
) -> dict[str, Any]:
  """Returns the plan of a program in the format of `plan_report.describe`.

  Args:
    job: the job, on a mesh of the devices or stand-ins.
    hardware: target chips.
    sizes: argument sizes of the job, with any batch, on this mesh or a mesh
      with the same parameter sharding; computing them takes most of the time.

  Returns:
    JSON with `source` 'shapes', FLOPs of `kernels` by visible query-key pairs,
    and None for `compile_s` and `trace_s`.
  """
  work = job.work
  # `plan_search` computes `sizes` once, with the smallest batch.
  arguments = {
    name: size * (work.device_rows / sizes.rows if name in _BY_ROWS else 1)
    for name, size in sizes.bytes.items()
  }
  # A decoding step reads the whole caches.
  more = arguments.get('caches', 0) - sizes.bytes.get('caches', 0)
  parts = step_estimate.parts(
    work, arguments.get('parameters', 0.0), hardware.chip.kind
  )
  temporary = sum(parts.values())
  peak = temporary + sum((*arguments.values(), *sizes.beside.values()))
  kernels = _kernels(work, hardware)
  products, gradients = job.flops() + step_estimate.recomputed(work), 0.0
  if kernels:
    # The formula counts attention as matmuls; here kernels compute it.
    products -= _scores(work)
    gradients = _score_gradients(work)
  speed = work.busy * hardware.chip.flops
  compute = products / speed / PRODUCT_EFFICIENCY
  compute += gradients / speed / _GRADIENT_EFFICIENCY
  traffic, weights = _traffic(work, hardware)
  collectives = sum(row['seconds'] for row in traffic)
  computing = compute + sum(row['seconds'] for row in kernels)
  for row in traffic:
    # Overlap is bounded by the other work.
    hidden = min(HIDDEN, computing / collectives)
    row['exposed'] = (1 - hidden) * row['seconds']
  return {
    'source': 'shapes',
    'fits': peak <= hardware.chip.hbm_bytes,
    'memory': {
      'budget': hardware.chip.hbm_bytes,
      'peak': peak,
      'arguments': arguments,
      'beside': sizes.beside,
      'temporary': temporary,
      'parts': parts,
    },
    **roofline.describe(
      job,
      hardware,
      products=(products + gradients) / work.busy,
      kernels=kernels,
      traffic=traffic,
      compute=compute,
      # Gathered weights are written to memory and read again.
      moved=sizes.moved + more + 2 * work.parts * weights,
      host=sizes.host,
    ),
    'trace_s': None,
    'compile_s': None,
  }


def _scores(work: workload.Workload) -> float:
  """Returns FLOPs of attention over all devices, by the formula."""
  runs = forward_flops.TRAINING + work.caches
  runs += work.compute.remat == 'full'
  return work.rows * sum(
    p.flops(forward_flops.scores) * (runs if p.trained else 1)
    for p in work.passes
  )


def _score_gradients(work: workload.Workload) -> float:
  scores = sum(
    p.flops(forward_flops.scores)
    for p in work.trained
    if step_estimate.by_products(work, p)
  )
  return _PRODUCTS_BACKWARD * work.rows * scores


def _kernels(
  work: workload.Workload, hardware: chips.Slice
) -> list[roofline.Row]:
  """Returns per-device attention kernels; empty without kernels.

  FLOPs count visible query-key pairs, not whole blocks.
  """
  # Decoding runs no kernels (`ComputeConfig.cached_attention`).
  if work.compute.attention != 'tokamax' or work.decodes:
    return []
  # Only 'full' recomputes attention in the backward pass; the other policies
  # save its outputs.
  repeated = work.trained * ((work.compute.remat == 'full') + work.caches)
  runs = {_FORWARD: (1.0, [*work.passes, *repeated])}
  backward = [p for p in work.trained if not step_estimate.by_products(work, p)]
  runs |= {name: (share, backward) for name, share in _BACKWARD.items()}
  rows = work.rows / work.busy
  return [
    roofline.kernel_row(
      name,
      work.parts * sum(map(_calls, passes)),
      sum(p.flops(forward_flops.scores) for p in passes) * share * rows,
      hardware,
      # Stacks of a shipped model have the same heads.
      max(x.head_dim for x in passes[0].stack.kinds),
    )
    for name, (share, passes) in runs.items()
    if passes
  ]


def _calls(stack_pass: workload.StackPass) -> int:
  stack = stack_pass.stack
  # Merged attention reads source and targets in a single call.
  cross = stack_pass.source_length and not stack.cross_merged
  return stack.layers + (forward_flops.cross_layers(stack) if cross else 0)


def _exchanged_keys(
  work: workload.Workload, stack_pass: workload.StackPass
) -> float:
  """Returns elements of keys and values exchanged between sequence shards.

  They are gathered once in the forward pass, and count twice more for a
  backward pass. A window gathers only a halo (`ops.attention_shards`). Caches
  do not move.
  """
  if work.by_length == 1:
    return 0.0
  stack, length = stack_pass.stack, stack_pass.length
  sides = 1 if stack.role == 'causal' else 2
  positions = stack.layers * stack_pass.source_length
  for window in forward_flops.layer_windows(stack):
    positions += min(length, sides * (window or length))
  rows = work.tokens(stack_pass) * work.by_length / length
  runs = forward_flops.TRAINING if stack_pass.trained else 1
  widths = step_estimate.key_value_width(work, stack_pass)
  # A layer that shares keys gathers them, too.
  widths *= stack.layers / stack.owning
  return runs * rows * widths * positions


def _exchanges(work: workload.Workload):
  """Yields purpose, mesh axes, kind and bytes of a microbatch's collectives.

  Bytes count the unsharded array.
  """
  shares, item = work.partition, work.item
  embed, length = shares.mesh_axes('embed'), shares.mesh_axes('length')
  logits = step_estimate.logits_pass(work)
  states = work.tokens(logits) * logits.stack.width
  states *= shares.devices(work.exchange)
  # Output projections (self-attention, cross-attention, feed-forward) leave
  # partial sums on every device.
  sums = sum(
    work.tokens(p)
    * p.stack.width
    * p.stack.layers
    * (2 + bool(p.source_length))
    * (forward_flops.TRAINING if p.trained else 1)
    for p in work.passes
  )
  keys = sum(_exchanged_keys(work, p) for p in work.passes)
  yield 'weights', embed, 'all-gather', step_estimate.gathered_weights(work)
  yield 'hidden states', work.exchange, 'all-gather', states * item
  yield 'activations', shares.mesh_axes('mlp'), 'all-reduce', sums * item
  yield 'keys', length, 'all-gather', keys * item
  if not work.trains:
    return
  scattered = states * _FP32
  yield 'gradients of hidden states', work.exchange, 'reduce-scatter', scattered
  if work.adapters:  # Their gradients are small.
    return
  counts = parameters.count_by_stack(work.models[0]).values()
  tables = sum(c.embeddings + c.head for c in counts) * _FP32
  size = sum(c.other + c.cross for c in counts) / work.by_tensor * _FP32
  # Gradients are summed over the token axes: a reduce-scatter over axes that
  # also shard the parameter, an all-reduce over the others.
  copies = shares.only(partition.TOKENS, ['embed'])
  tables_of = shares.only(partition.TOKENS, ['vocab'])
  tables /= shares.size('vocab')
  yield 'gradients', embed, 'reduce-scatter', size
  yield 'replicas', copies, 'all-reduce', size / shares.size('embed')
  yield 'gradients of tables', tables_of, 'all-reduce', tables


def _traffic(
  work: workload.Workload, hardware: chips.Slice
) -> tuple[list[roofline.Row], float]:
  """Returns collectives, and bytes of gathered weights."""
  mesh = work.partition.mesh
  network, rows, weights = roofline.Network(mesh, hardware), [], 0.0
  for purpose, axes, kind, size in _exchanges(work):
    axes = [axis for axis in axes if mesh.shape[axis] > 1]
    sent, seconds = network.cost_along(axes, kind, size * work.parts)
    if not sent:
      continue
    if purpose == 'weights':
      weights = size
    row = {'kind': kind, 'axes': '+'.join(axes), 'for': purpose}
    row |= {'count': work.parts, 'bytes': sent, 'seconds': seconds}
    rows.append(row)
  return rows, weights
