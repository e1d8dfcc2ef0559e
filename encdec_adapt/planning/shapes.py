"""What a program costs by its shapes alone: nothing is compiled.

For hardware whose compiler is not at hand (GPU clusters), and to choose what
is worth compiling. Parameters, optimizer, caches and batch are exact, for they
follow from the shardings; what lives only inside the program, and every time,
is an estimate by the rules written here.
"""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh
import numpy as np

from encdec_adapt import config as config_lib
from encdec_adapt.models import model_flops
from encdec_adapt.ops import attention
from encdec_adapt.planning import (
  chips,
  exchanges,
  programs,
  roofline,
  workload,
)

# Share of the peak that products of weights reach, with what is elementwise
# around them, and share of the collectives that other work hides: set by what
# was published of Llama 2 7B on 8 and on 128 H100; see the calibration.
PRODUCT_EFFICIENCY = 0.68
HIDDEN = 0.5
# What a training step has in memory besides what is counted here (weights that
# are cast and gathered, copies), as shares of what layers keep for the backward
# pass, and of the rest. In the compiled plans of `configs/plans` it is 0.05 to
# 0.72 of both, the less the more layers keep. With these shares peaks are 0.88
# to 1.18 of the compiled ones. The farthest above is 9B-2B on two slices of
# v5p: it takes 36 GiB, but 44 on one, where each chip has the same to do.
_BESIDES_KEPT = 0.15
_BESIDES_REST = 1.0
_FP32 = 4
# Kernels of `ops.flash_kernels` by the work of a forward pass that each does:
# products of scores and values; scores, their gradient, queries; those, keys
# and values.
_FORWARD = 'flash_forward'
_BACKWARD = {'flash_backward_queries': 1.5, 'flash_backward_keys': 2.0}


@dataclasses.dataclass(frozen=True)
class Arguments:
  """What a program is given, on one device.

  Attributes:
    bytes: by what they are; see `programs.Program`.
    beside: bytes of what is in memory meanwhile.
    host: bytes of what is copied from the host's memory and back.
    moved: bytes that the device's memory reads and writes of them at least.
    rows: of the batch that a device has; where devices share a row, a part
      of one.
  """

  bytes: dict[str, float]
  beside: dict[str, float]
  host: float
  moved: float
  rows: float

  @classmethod
  def of(
    cls,
    program: programs.Program,
    name: str,
    settings: config_lib.Settings,
    mesh: Mesh,
  ) -> 'Arguments':
    """Those of a job's program; they do not depend on `compute.remat`.

    With another batch, or on a mesh that differs only in how it splits the
    batch, all but the batch is the same; see `with_rows`.
    """
    return cls(
      programs.argument_bytes(program),
      programs.tree_bytes(program.beside),
      programs.host_bytes(program),
      programs.moved_bytes(program),
      _device_rows(workload.of(name, settings, mesh, False)),
    )

  def with_rows(self, rows: float) -> dict[str, float]:
    """The bytes where a device has so many rows of the batch."""
    return {**self.bytes, 'batch': self.bytes['batch'] * rows / self.rows}


def describe(
  name: str,
  settings: config_lib.Settings,
  mesh: Mesh,
  where: chips.Slice,
  budget: float,
  given: Arguments | None = None,
) -> dict[str, Any]:
  """The plan of a program, as `report.describe` writes one.

  Args:
    name: of the program, in `programs.PROGRAMS`.
    settings: of the job.
    mesh: of the devices, which may stand for others.
    where: what they stand for.
    budget: bytes of memory that a device may use.
    given: of the job on this mesh, or one that shards parameters alike, with
      any batch; by default made here, which takes most of the time.

  Returns:
    JSON with `fits`, `memory`, `flops`, `collectives`, `kernels` (those of
    GPUs, by the pairs that see each other), `roofline`, `mfu`, and 'shapes' as
    `source`; None as `compile_s`, `trace_s` and `instructions`, which only a
    compiled program has; where `given` is made here, `replicated` and `copies`.
  """
  teacher = programs.teacher(settings, mesh) if name == 'train' else None
  held_twice = {}
  if given is None:
    program = programs.PROGRAMS[name](settings, mesh)
    held_twice = programs.held_twice(program)
    given = Arguments.of(program, name, settings, mesh)
  work = workload.of(name, settings, mesh, bool(teacher))
  arguments = given.with_rows(_device_rows(work))
  parts = _parts(work, arguments)
  temporary = sum(parts.values())
  state = sum(arguments.values())
  peak = state + temporary + sum(given.beside.values())
  rate, model = where.chip.flops, programs.model_flops(name, settings, mesh)
  kernels = _kernels(work, rate) if where.chip.kind == 'gpu' else None
  products = (model + _recomputed(work)) / _busy(work)
  if kernels:
    products -= _scores(work, trained=3) / _busy(work)
  traffic = exchanges.traffic(work, mesh, where)
  times = _times(work, where, given, products, kernels or [], traffic)
  for row in traffic:
    share = times['exposed_s'] / times['collectives_s']
    row['exposed'] = share * row['seconds']
  return {
    'source': 'shapes',
    'fits': peak <= budget,
    'memory': {
      'budget': budget,
      'peak': peak,
      'arguments': arguments,
      'beside': given.beside,
      'temporary': temporary,
      'parts': parts,
    },
    'flops': {
      'products': products,
      'kernels': sum(kernel['flops'] for kernel in kernels or ()),
      'model': model / mesh.size,
    },
    'collectives': traffic,
    'kernels': kernels,
    'roofline': times,
    'mfu': model / mesh.size / rate / times['step_s'],
    'trace_s': None,
    'compile_s': None,
    'instructions': None,
    **held_twice,
  }


def _times(work, where, given: Arguments, products, kernels, traffic):
  """The roofline: seconds by what they are of, and of the whole."""
  chip = where.chip
  compute = products / chip.flops / PRODUCT_EFFICIENCY
  of_kernels = sum(kernel['seconds'] for kernel in kernels)
  collectives = sum(row['seconds'] for row in traffic)
  exposed = collectives - min(HIDDEN * collectives, compute + of_kernels)
  moved = given.moved  # What is gathered is written and read, too.
  if any(row['for'] == exchanges.WEIGHTS for row in traffic):
    moved += 2 * work.parts * exchanges.gathered_weights(work)
  memory = moved / chip.hbm_bandwidth
  host = given.host / chip.host_bandwidth
  return {
    'compute_s': compute,
    'kernels_s': of_kernels,
    'collectives_s': collectives,
    'exposed_s': exposed,
    'memory_s': memory,
    'host_s': host,
    'step_s': max(compute + of_kernels + exposed, memory) + host,
  }


def _device_rows(work: workload.Workload) -> float:
  """Rows of a batch on one device, a part of one where devices share it."""
  return work.rows / work.shares.rows / work.shares.length


def _busy(work: workload.Workload) -> int:
  """Devices that share the work; others repeat it."""
  return work.shares.rows * work.shares.length * work.shares.tensor


def _parts(work: workload.Workload, arguments) -> dict[str, float]:
  """Bytes that live inside the program only, by what they are."""
  name = 'logits' if work.name == 'decode' else 'loss'
  kept, working = _kept(work), max(_working(work, read) for read in work.reads)
  parts = {name: _loss(work), 'activations': kept + working}
  if work.trains:
    trees = programs.gradients(work.settings)
    parts['gradients'] = arguments['parameters'] * trees
    rest = sum(parts.values()) - kept
    parts['besides'] = _BESIDES_KEPT * kept + _BESIDES_REST * rest
  return parts


def _saved(read: workload.Read, remat: str, shares, item: int) -> float:
  """Bytes that one layer keeps of a token for its backward pass.

  Without rematerialisation these are keys and values of all shards of a row.
  """
  stack = read.stack
  heads = stack.heads * stack.head_dim / shares.tensor
  both = 2 * stack.kv_heads * stack.head_dim / shares.tensor
  attentions = 1 + bool(read.source_length)
  kept = stack.width
  if remat == 'attention':
    kept += attentions * heads
  elif remat in ('narrow_dots', 'dots', 'none'):
    kept += attentions * (2 * heads + both + stack.width) + stack.width
  mlp = stack.mlp_width / shares.tensor
  if remat in ('dots', 'none'):
    kept += 2 * mlp
  if remat == 'none':
    kept += 4 * stack.width + both * shares.length + mlp
  statistics = 0 if remat == 'full' else attentions * stack.heads * _FP32
  return kept * item + statistics


def _kept(work: workload.Workload) -> float:
  """Bytes that all layers keep for the backward pass."""
  remat, shares = work.settings.compute.remat, work.shares
  return sum(
    read.stack.layers
    * work.tokens(read)
    * _saved(read, remat, shares, work.itemsize)
    for read in work.reads
    if read.trained
  )


def _working(work: workload.Workload, read: workload.Read) -> float:
  """Bytes of one layer while it runs; with gradients, twice as many."""
  compute, shares, stack = work.settings.compute, work.shares, read.stack
  tokens, item = work.tokens(read), work.itemsize
  inside = 2 * stack.width
  inside += 2 * (stack.mlp_width + stack.heads * stack.head_dim) / shares.tensor
  found = tokens * inside * item
  if shares.length > 1:
    # Keys and values of all shards of a row.
    both = 2 * stack.kv_heads * stack.head_dim / shares.tensor
    found += tokens * shares.length * both * item
  if not attention.BACKENDS[compute.attention].kernels or read.length == 1:
    # Scores, of a chunk of queries or of all.
    queries = read.length
    if attention.BACKENDS[compute.attention].takes_chunk:
      queries = min(compute.attention_chunk, queries)
    keys = max(read.keys, read.source_length)
    pairs = tokens / read.length * queries * keys
    found += pairs * stack.heads / shares.tensor * _FP32
  return found * (2 if work.trains else 1)


def _loss(work: workload.Workload) -> float:
  """A chunk of logits; in training the gradients it makes, and the table's."""
  read, item = work.logits, work.itemsize
  stack, own = read.stack, work.tokens(read)
  rows = min(work.settings.loss.chunk, own) * work.shares.exchange
  columns = stack.table_rows / work.shares.vocabulary
  copies = 1 + work.trains + work.taught
  found = rows * columns * _FP32 * copies + rows * stack.width * item
  if work.trains:
    found += (rows + columns) * stack.width * _FP32 + own * stack.width * item
  return found


def _scores(work: workload.Workload, trained: int) -> float:
  """FLOPs of all attentions, on all devices.

  Args:
    work: the program's.
    trained: forward passes that a step of a stack which trains counts as;
      one more where it is run again for the backward pass.
  """
  again = work.settings.compute.remat == 'full'
  return work.rows * sum(
    _scores_of(read) * (trained + again if read.trained else 1)
    for read in work.reads
  )


def _scores_of(read: workload.Read) -> int:
  return model_flops.scores(
    read.stack,
    read.length,
    source_length=read.source_length,
  )


def _kernels(work: workload.Workload, rate: float) -> list[dict[str, Any]]:
  """Kernels by name on one device; none where the attention has none.

  Of pairs that see each other, which is less than their whole blocks.

  Args:
    work: the program's.
    rate: FLOP/s of a device.
  """
  if work.settings.compute.attention != 'triton' or work.name == 'decode':
    return []
  trained = [read for read in work.reads if read.trained]
  again = trained if work.settings.compute.remat == 'full' else []
  runs = {_FORWARD: (1.0, [*work.reads, *again])}
  runs |= {name: (share, trained) for name, share in _BACKWARD.items()}
  found = []
  for name, (share, reads) in runs.items():
    total = share * work.rows * sum(map(_scores_of, reads)) / _busy(work)
    if reads:
      found.append(
        {
          'name': name,
          'calls': work.parts * sum(map(_calls, reads)),
          'flops': total,
          'seconds': total / rate / roofline.KERNEL_EFFICIENCY,
        }
      )
  return found


def _calls(read: workload.Read) -> int:
  """Attentions of a stack."""
  stack = read.stack
  if stack.cross_merged or not read.source_length:
    return stack.layers
  return stack.layers + model_flops.cross_layers(stack)


def _recomputed(work: workload.Workload) -> float:
  """FLOPs of all devices that the backward pass does once more."""
  remat, total = work.settings.compute.remat, 0
  for read in (read for read in work.reads if read.trained):
    stack = read.stack
    lengths = dict(length=read.length, source_length=read.source_length)
    if remat in ('full', 'attention'):
      total += model_flops.stack_forward(stack, **lengths)
    if remat == 'attention':
      total -= model_flops.scores(stack, **lengths)
    if remat == 'narrow_dots':  # Both products that widen.
      total += 4 * stack.layers * read.length * stack.width * stack.mlp_width
  return float(total * work.rows)


def stand_in_devices(count: int) -> np.ndarray:
  """Devices that only have to be as many as those planned for.

  The first call, before anything else asks JAX for devices, has to be that
  for the most.
  """
  jax.config.update('jax_platforms', 'cpu')
  if jax.config.jax_num_cpu_devices < count:
    jax.config.update('jax_num_cpu_devices', count)
  return np.array(jax.devices()[:count])
