"""Analytic cost model: memory and time of a program from its shapes.

Nothing is compiled. It plans GPU clusters, whose compiler may not be available,
and ranks candidates before the best are compiled for TPUs. Bytes of parameters,
optimizer, caches and batch are exact, since they follow from the shardings;
memory inside the program, and all times, are estimates by the rules below.
"""

from collections.abc import Iterator
import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from encdec_adapt import config as config_lib
from encdec_adapt.models import model_config, model_flops, parameters
from encdec_adapt.ops import attention, partition
from encdec_adapt.planning import chips, programs, roofline

# Share of the peak that products of weights reach, elementwise work included,
# and share of the collectives' time hidden by other work. Set by published
# speeds of Llama 2 7B on 8 and on 128 H100; see `planning.calibration`.
PRODUCT_EFFICIENCY = 0.68
HIDDEN = 0.5
# Memory of a training step that is not counted below (cast and gathered
# weights, copies), as shares of the activations kept for the backward pass and
# of the rest. With these, peaks are 0.88 to 1.18 of those in `configs/plans`.
_BESIDES_KEPT = 0.15
_BESIDES_REST = 1.0
_FP32 = 4
# Kernels of `ops.flash_kernels`, and their work in forward passes: products
# for scores and values; for scores, their gradient and queries'; for those and
# keys' and values'.
_FORWARD = 'flash_forward'
_BACKWARD = {'flash_backward_queries': 1.5, 'flash_backward_keys': 2.0}


@dataclasses.dataclass(frozen=True)
class Read:
  """A stack that reads rows.

  Attributes:
    stack: configuration of the stack.
    length: positions of a row that it computes.
    keys: positions that its self-attention may see; more than `length` if a
      cache has the others.
    source_length: positions that its cross-attention reads, or 0.
    trained: whether a backward pass follows.
  """

  stack: model_config.StackConfig
  length: int
  keys: int
  source_length: int
  trained: bool

  def scores(self) -> int:
    """Returns FLOPs of the attentions of a row."""
    return model_flops.scores(
      self.stack, self.length, source_length=self.source_length
    )

  def forward(self) -> int:
    """Returns FLOPs of a forward pass of a row, without the vocabulary."""
    return model_flops.stack_forward(
      self.stack, self.length, source_length=self.source_length
    )


@dataclasses.dataclass(frozen=True)
class Arguments:
  """What a program reads and holds, on one device.

  Attributes:
    bytes: bytes of the arguments by part; see `programs.Program`.
    beside: bytes that the job holds in memory and that are not arguments, by
      part.
    host: bytes copied from the host's memory and back.
    moved: lower bound of the bytes of arguments that are read and written.
    rows: rows of the batch on a device; below 1 if devices share a row.
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
    """Returns the arguments of a job's program.

    They do not depend on `compute.remat`, and on the batch only by its rows.
    """
    return cls(
      programs.tree_bytes(program.arguments),
      programs.tree_bytes(program.beside),
      programs.host_bytes(program),
      programs.moved_bytes(program),
      Workload(name, settings, mesh, False).device_rows,
    )


class Workload:
  """One run of a program: which stacks read how many tokens.

  Attributes:
    name: name of the program in `programs.PROGRAMS`.
    settings: settings of the job.
    place: partition of the job on its mesh.
    reads: every stack that reads, the teacher's last.
    rows: rows of the batch, on all devices.
    parts: number of microbatches.
    trains: whether parameters are updated.
    has_teacher: whether training has a teacher.
    item: bytes of a number in the compute dtype.
    by_rows: number of devices that share a batch by its rows.
    by_length: number of devices that share a row.
    by_tensor: number of devices that share heads and feed-forwards.
    exchange: mesh axes whose devices share the table and not the tokens.
  """

  def __init__(
    self,
    name: str,
    settings: config_lib.Settings,
    mesh: Mesh,
    has_teacher: bool,
  ):
    train, place = settings.train, settings.rules.on(mesh)
    self.name, self.settings, self.place = name, settings, place
    self.trains = name == 'train'
    self.has_teacher = has_teacher and self.trains
    self.rows = train.batch_size if self.trains else train.eval_batch_size
    self.parts = train.microbatches if self.trains else 1
    self.item = jnp.dtype(settings.compute.dtype).itemsize
    self.by_rows, self.by_tensor = place.size('batch'), place.size('mlp')
    # Decoding computes one token of every row: there is no length to share.
    self.by_length = 1 if name == 'decode' else place.size('length')
    self.exchange = place.common(partition.TOKENS, ['vocab'])
    self.reads = tuple(self._reads())

  def _reads(self) -> Iterator[Read]:
    lengths, model = self.settings.data.train.lengths, self.settings.model
    trained, decoder = self.trains, model.decoder
    source = lengths.encoder if 'encoder' in model.stacks else 0
    if self.name == 'decode':
      yield Read(decoder, 1, lengths.decoder, source, False)
      return
    length = lengths.decoder
    if 'encoder' in model.stacks:
      yield Read(model.encoder, source, source, 0, trained)
    elif lengths.encoder:
      length = lengths.teacher
    yield Read(decoder, length, length, source, trained)
    if self.has_teacher:
      alone = programs.without_cross_attention(decoder).decoder
      yield Read(alone, lengths.teacher, lengths.teacher, 0, False)

  @property
  def trained(self) -> list[Read]:
    """Reads that a backward pass follows."""
    return [read for read in self.reads if read.trained]

  @property
  def busy(self) -> int:
    """Number of devices that share the work; others repeat it."""
    return self.by_rows * self.by_length * self.by_tensor

  @property
  def device_rows(self) -> float:
    """Rows of the batch on one device."""
    return self.rows / self.by_rows / self.by_length

  def tokens(self, read: Read) -> float:
    """Returns the positions of one microbatch on one device."""
    return self.device_rows / self.parts * read.length


def describe(
  name: str,
  settings: config_lib.Settings,
  mesh: Mesh,
  where: chips.Slice,
  budget: float,
  given: Arguments | None = None,
) -> dict[str, Any]:
  """Returns the plan of a program, as `plan_report.describe` does.

  Args:
    name: name of the program in `programs.PROGRAMS`.
    settings: settings of the job.
    mesh: mesh of the devices, or of stand-ins.
    where: chips that are planned for.
    budget: bytes of memory that a device may use.
    given: arguments of the job on this mesh, or on one that shards parameters
      alike, with any batch; computed by default, which takes most of the time.

  Returns:
    JSON with `fits`, `memory`, `flops`, `collectives`, `kernels` (of GPUs, by
    the pairs that see each other), `roofline`, `mfu`, and `source`, which is
    'shapes'; `compile_s`, `trace_s` and `instructions` are None. Without
    `given` also `replicated` and `copies`.
  """
  teacher = programs.teacher(settings, mesh) if name == 'train' else None
  held_twice = {}
  if given is None:
    program = programs.PROGRAMS[name](settings, mesh)
    held_twice = programs.held_twice(program)
    given = Arguments.of(program, name, settings, mesh)
  work = Workload(name, settings, mesh, bool(teacher))
  batch = given.bytes['batch'] * work.device_rows / given.rows
  arguments = {**given.bytes, 'batch': batch}
  parts = _parts(work, arguments)
  temporary = sum(parts.values())
  peak = temporary + sum((*arguments.values(), *given.beside.values()))
  model = programs.model_flops(name, settings, mesh)
  kernels = _kernels(work, where) if where.chip.kind == 'gpu' else None
  products = model + _recomputed(work)
  if kernels:
    products -= _scores(work)
  products /= work.busy
  traffic, weights = _traffic(work, mesh, where)
  moved = given.moved + 2 * work.parts * weights  # Written and read.
  times = _times(where, products, kernels or [], traffic, moved, given.host)
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
    'mfu': model / mesh.size / where.chip.flops / times['step_s'],
    **dict.fromkeys(('trace_s', 'compile_s', 'instructions')),
    **held_twice,
  }


def _times(where, products, kernels, traffic, moved, host) -> dict[str, float]:
  """Returns seconds of a step by cause; adds exposed seconds to `traffic`."""
  chip = where.chip
  compute = products / chip.flops / PRODUCT_EFFICIENCY
  of_kernels = sum(kernel['seconds'] for kernel in kernels)
  collectives = sum(row['seconds'] for row in traffic)
  exposed = collectives - min(HIDDEN * collectives, compute + of_kernels)
  for row in traffic:
    row['exposed'] = exposed / collectives * row['seconds']
  memory, copied = moved / chip.hbm_bandwidth, host / chip.host_bandwidth
  return {
    'compute_s': compute,
    'kernels_s': of_kernels,
    'collectives_s': collectives,
    'exposed_s': exposed,
    'memory_s': memory,
    'host_s': copied,
    'step_s': max(compute + of_kernels + exposed, memory) + copied,
  }


def _parts(work: Workload, arguments) -> dict[str, float]:
  """Returns bytes that live inside the program only, by part."""
  kept = sum(
    read.stack.layers * work.tokens(read) * _saved(work, read)
    for read in work.trained
  )
  working = max(_working(work, read) for read in work.reads)
  name = 'logits' if work.name == 'decode' else 'loss'
  parts = {name: _loss(work), 'activations': kept + working}
  if work.trains:
    trees = programs.gradients(work.settings)
    parts['gradients'] = arguments['parameters'] * trees
    rest = sum(parts.values()) - kept
    parts['besides'] = _BESIDES_KEPT * kept + _BESIDES_REST * rest
  return parts


def _key_value_width(work: Workload, read: Read) -> float:
  """Returns elements of keys and values of a position on one device."""
  return 2 * read.stack.kv_heads * read.stack.head_dim / work.by_tensor


def _saved(work: Workload, read: Read) -> float:
  """Returns bytes that a layer keeps of a token for its backward pass.

  Without rematerialisation these include keys and values of all shards of a
  row.
  """
  stack, remat = read.stack, work.settings.compute.remat
  heads = stack.heads * stack.head_dim / work.by_tensor
  both = _key_value_width(work, read)
  attentions = 1 + bool(read.source_length)
  mlp, kept = stack.mlp_width / work.by_tensor, stack.width
  if remat == 'attention':
    kept += attentions * heads
  elif remat in ('narrow_dots', 'dots', 'none'):
    kept += attentions * (2 * heads + both + stack.width) + stack.width
  if remat in ('dots', 'none'):
    kept += 2 * mlp
  if remat == 'none':
    kept += 4 * stack.width + both * work.by_length + mlp
  statistics = 0 if remat == 'full' else attentions * stack.heads * _FP32
  return kept * work.item + statistics


def _working(work: Workload, read: Read) -> float:
  """Returns bytes of one layer while it runs; doubled for its gradients."""
  compute, stack = work.settings.compute, read.stack
  tokens = work.tokens(read)
  wide = stack.mlp_width + stack.heads * stack.head_dim
  inside = 2 * stack.width + 2 * wide / work.by_tensor
  if work.by_length > 1:  # Keys and values of all shards of a row.
    inside += work.by_length * _key_value_width(work, read)
  found = tokens * inside * work.item
  if not attention.BACKENDS[compute.attention].kernels or read.length == 1:
    # Scores of a chunk of queries, or of all.
    queries = read.length
    if attention.BACKENDS[compute.attention].takes_chunk:
      queries = min(compute.attention_chunk, queries)
    keys = max(read.keys, read.source_length)
    pairs = tokens / read.length * queries * keys
    found += pairs * stack.heads / work.by_tensor * _FP32
  return found * (2 if work.trains else 1)


def _logits(work: Workload) -> Read:
  """Returns the stack whose states logits are computed from."""
  decoder = work.settings.model.decoder
  return next(read for read in work.reads if read.stack is decoder)


def _loss(work: Workload) -> float:
  """Returns bytes of a chunk of logits and, in training, of gradients."""
  read = _logits(work)
  stack, own = read.stack, work.tokens(read)
  rows = min(work.settings.loss.chunk, own) * work.place.devices(work.exchange)
  columns = stack.table_rows / work.place.size('vocab')
  copies = 1 + work.trains + work.has_teacher
  found = rows * columns * _FP32 * copies + rows * stack.width * work.item
  if work.trains:
    found += (rows + columns) * stack.width * _FP32
    found += own * stack.width * work.item
  return found


def _scores(work: Workload) -> float:
  """Returns FLOPs of all attentions on all devices, by the formula."""
  passes = model_flops.TRAINING + (work.settings.compute.remat == 'full')
  return work.rows * sum(
    read.scores() * (passes if read.trained else 1) for read in work.reads
  )


def _kernels(work: Workload, where: chips.Slice) -> list[dict[str, Any]]:
  """Returns kernels by name on one device; none if the attention has none.

  FLOPs are of pairs that see each other, which is less than whole blocks.
  """
  if work.settings.compute.attention != 'triton' or work.name == 'decode':
    return []
  again = work.trained if work.settings.compute.remat == 'full' else []
  runs = {_FORWARD: (1.0, [*work.reads, *again])}
  runs |= {name: (share, work.trained) for name, share in _BACKWARD.items()}
  found = []
  for name, (share, reads) in runs.items():
    total = sum(read.scores() for read in reads)
    total *= share * work.rows / work.busy
    if reads:
      found.append(
        {
          'name': name,
          'calls': work.parts * sum(map(_calls, reads)),
          'flops': total,
          'seconds': total / where.chip.flops / roofline.KERNEL_EFFICIENCY,
        }
      )
  return found


def _calls(read: Read) -> int:
  """Returns the number of attentions of a stack."""
  stack = read.stack
  cross = read.source_length and not stack.cross_merged
  return stack.layers + (model_flops.cross_layers(stack) if cross else 0)


def _recomputed(work: Workload) -> float:
  """Returns FLOPs on all devices that the backward pass repeats."""
  remat, total = work.settings.compute.remat, 0
  for read in work.trained:
    stack = read.stack
    if remat in ('full', 'attention'):
      total += read.forward()
    if remat == 'attention':
      total -= read.scores()
    if remat == 'narrow_dots':  # Both products that widen.
      total += 4 * stack.layers * read.length * stack.width * stack.mlp_width
  return float(total * work.rows)


def _gathered_weights(work: Workload) -> float:
  """Returns bytes of the weights that a device gathers for a microbatch."""
  stacks = parameters.count_by_stack(work.settings.model)
  if work.name == 'decode':  # The encoder has run before.
    stacks = {'decoder': stacks['decoder']}
  total = sum(c.other + c.cross for c in stacks.values())
  total *= 2 if work.trains else 1  # Once more for the backward pass.
  if work.has_teacher:
    alone = programs.without_cross_attention(work.settings.model.decoder)
    total += parameters.count_by_stack(alone)['decoder'].other
  return total / work.by_tensor * work.item


def _exchanged_keys(work: Workload, read: Read) -> float:
  """Returns elements of keys and values that the shards of a row exchange.

  Forward, and twice more if a backward pass follows. A window needs only what
  it reaches (`ops.attention_shards`). A cache is not moved.
  """
  if work.by_length == 1:
    return 0.0
  sides = 1 if read.stack.role == 'causal' else 2
  positions = read.stack.layers * read.source_length
  for window in model_flops.layer_windows(read.stack):
    positions += min(read.length, sides * (window or read.length))
  rows = work.tokens(read) * work.by_length / read.length
  passes = model_flops.TRAINING if read.trained else 1
  return passes * rows * _key_value_width(work, read) * positions


def _exchanges(work: Workload):
  """Yields purpose, mesh axes, kind and bytes of a microbatch's collectives.

  Bytes are those of the array that is whole.
  """
  place, item = work.place, work.item
  embed, length = place.mesh_axes('embed'), place.mesh_axes('length')
  logits = _logits(work)
  states = work.tokens(logits) * logits.stack.width
  states *= place.devices(work.exchange)
  # Sums of the parts that shares of heads and feed-forwards add.
  sums = sum(
    work.tokens(read)
    * read.stack.width
    * read.stack.layers
    * (2 + bool(read.source_length))
    * (model_flops.TRAINING if read.trained else 1)
    for read in work.reads
  )
  keys = sum(_exchanged_keys(work, read) for read in work.reads)
  yield 'weights', embed, 'all-gather', _gathered_weights(work)
  yield 'hidden states', work.exchange, 'all-gather', states * item
  yield 'activations', place.mesh_axes('mlp'), 'all-reduce', sums * item
  yield 'keys', length, 'all-gather', keys * item
  if not work.trains:
    return
  counts = parameters.count_by_stack(work.settings.model).values()
  tables = sum(c.embedding + c.head for c in counts) * _FP32
  size = sum(c.other + c.cross for c in counts) / work.by_tensor * _FP32
  copies = place.only(partition.TOKENS, ['embed'])
  tables_of = place.only(partition.TOKENS, ['vocab'])
  tables /= place.size('vocab')
  yield 'gradients', embed, 'reduce-scatter', size
  yield 'replicas', copies, 'all-reduce', size / place.size('embed')
  yield 'gradients of tables', tables_of, 'all-reduce', tables
  scattered = states * _FP32
  yield 'gradients of hidden states', work.exchange, 'reduce-scatter', scattered


def _traffic(
  work: Workload, mesh: Mesh, where: chips.Slice
) -> tuple[list[dict[str, Any]], float]:
  """Returns collectives with their bytes, and bytes of gathered weights."""
  network, rows, weights = roofline.Network(mesh, where), [], 0.0
  for purpose, axes, kind, size in _exchanges(work):
    axes = [axis for axis in axes if mesh.shape[axis] > 1]
    sent, seconds = network.along(axes, kind, size * work.parts)
    if not sent:
      continue
    if purpose == 'weights':
      weights = size
    rows.append(
      {
        'kind': kind,
        'axes': '+'.join(axes),
        'for': purpose,
        'count': work.parts,
        'bytes': sent,
        'seconds': seconds,
      }
    )
  return rows, weights
