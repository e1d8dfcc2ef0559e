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

from encdec_adapt.models import (
  forward_flops,
  model_config,
  parameters,
)
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
    return forward_flops.scores(
      self.stack, self.length, source_length=self.source_length
    )

  def forward(self) -> int:
    """Returns FLOPs of a forward pass of a row, without the vocabulary."""
    return forward_flops.stack_forward(
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
  def of(cls, job: programs.Job, program: programs.Program) -> 'Arguments':
    """Returns the arguments of a job's program.

    They do not depend on `compute.remat`, and on the batch only by its rows.
    """
    return cls(
      programs.tree_bytes(program.arguments),
      programs.tree_bytes(program.beside),
      program.host_bytes(),
      program.moved_bytes(),
      Workload(job).device_rows,
    )


class Workload:
  """One run of a program: which stacks read how many tokens.

  Attributes:
    job: the program, its configuration and its mesh.
    place: partition of the job on its mesh.
    reads: every stack that reads, those of references last.
    parts: number of microbatches.
    references: shapes of the frozen models that it reads.
    item: bytes of a number in the compute dtype.
    by_rows: number of devices that share a batch by its rows.
    by_length: number of devices that share a row.
    by_tensor: number of devices that share heads and feed-forwards.
    exchange: mesh axes whose devices share the table and not the tokens.
  """

  def __init__(self, job: programs.Job):
    self.job, self.place = job, job.rules.on(job.mesh)
    self.references = job.models[1:]
    self.parts = job.train.microbatches if job.trains else 1
    self.item = jnp.dtype(job.compute.dtype).itemsize
    self.by_rows = self.place.size('batch')
    self.by_tensor = self.place.size('mlp')
    # Decoding computes one token of every row: there is no length to share.
    self.by_length = 1 if job.name == 'decode' else self.place.size('length')
    self.exchange = self.place.common(partition.TOKENS, ['vocab'])
    self.reads = tuple(self._reads())

  def _reads(self) -> Iterator[Read]:
    job, lengths = self.job, self.job.lengths
    if job.name == 'decode':
      stack = job.model.decoder
      source = lengths.encoder * (stack.cross_width is not None)
      yield Read(stack, 1, lengths.decoder, source, False)
      return
    for model in job.models:
      trained = job.trains and model is job.model
      for name, side in model.architecture.sides(lengths.encoder > 0).items():
        stack, length = model.stacks[name], getattr(lengths, side)
        source = lengths.encoder * (stack.cross_width is not None)
        yield Read(stack, length, length, source, trained)

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
    return self.job.rows / self.by_rows / self.by_length

  def tokens(self, read: Read) -> float:
    """Returns the positions of one microbatch on one device."""
    return self.device_rows / self.parts * read.length


def describe(
  job: programs.Job, where: chips.Slice, given: Arguments
) -> dict[str, Any]:
  """Returns the plan of a program, as `plan_report.describe` does.

  Args:
    job: the job, on a mesh of the devices, or of stand-ins.
    where: chips that are planned for.
    given: arguments of the job on this mesh, or on one that shards parameters
      alike, with any batch; computing them takes most of the time.

  Returns:
    JSON in which `source` is 'shapes', `kernels` are counted by the pairs that
    see each other, and `compile_s` and `trace_s` are None.
  """
  work = Workload(job)
  batch = given.bytes['batch'] * work.device_rows / given.rows
  arguments = {**given.bytes, 'batch': batch}
  parts = _parts(work, arguments)
  temporary = sum(parts.values())
  peak = temporary + sum((*arguments.values(), *given.beside.values()))
  kernels = _kernels(work, where)
  products = job.flops() + _recomputed(work)
  if kernels:
    products -= _scores(work)
  products /= work.busy
  compute = products / where.chip.flops / PRODUCT_EFFICIENCY
  traffic, weights = _traffic(work, where)
  collectives = sum(row['seconds'] for row in traffic)
  other = compute + sum(row['seconds'] for row in kernels)
  for row in traffic:
    hidden = min(HIDDEN, other / collectives)
    row['exposed'] = (1 - hidden) * row['seconds']
  return {
    'source': 'shapes',
    'fits': peak <= where.chip.hbm_bytes,
    'memory': {
      'budget': where.chip.hbm_bytes,
      'peak': peak,
      'arguments': arguments,
      'beside': given.beside,
      'temporary': temporary,
      'parts': parts,
    },
    **roofline.describe(
      job,
      where,
      products=products,
      kernels=kernels,
      traffic=traffic,
      compute=compute,
      moved=given.moved + 2 * work.parts * weights,  # Written and read.
      host=given.host,
    ),
    'trace_s': None,
    'compile_s': None,
  }


def _parts(work: Workload, arguments) -> dict[str, float]:
  """Returns bytes that live inside the program only, by part."""
  kept = sum(
    read.stack.layers * work.tokens(read) * _saved(work, read)
    for read in work.trained
  )
  working = max(_working(work, read) for read in work.reads)
  name = 'logits' if work.job.name == 'decode' else 'loss'
  parts = {name: _loss(work), 'activations': kept + working}
  if work.job.trains:
    trees = programs.gradients(work.job)
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
  stack, remat = read.stack, work.job.compute.remat
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
  compute, stack = work.job.compute, read.stack
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
  return found * (2 if work.job.trains else 1)


def _logits(work: Workload) -> Read:
  """Returns the stack whose states logits are computed from."""
  decoder = work.job.model.decoder
  return next(read for read in work.reads if read.stack is decoder)


def _loss(work: Workload) -> float:
  """Returns bytes of a chunk of logits and, in training, of gradients."""
  read = _logits(work)
  stack, own = read.stack, work.tokens(read)
  rows = min(work.job.loss.chunk, own) * work.place.devices(work.exchange)
  columns = stack.table_rows / work.place.size('vocab')
  copies = 1 + work.job.trains + len(work.references)
  found = rows * columns * _FP32 * copies + rows * stack.width * work.item
  if work.job.trains:
    found += (rows + columns) * stack.width * _FP32
    found += own * stack.width * work.item
  return found


def _scores(work: Workload) -> float:
  """Returns FLOPs of all attentions on all devices, by the formula."""
  passes = forward_flops.TRAINING + (work.job.compute.remat == 'full')
  return work.job.rows * sum(
    read.scores() * (passes if read.trained else 1) for read in work.reads
  )


def _kernels(work: Workload, where: chips.Slice) -> list[roofline.Row]:
  """Returns kernels by name on one device; none if the attention has none.

  FLOPs are of pairs that see each other, which is less than whole blocks.
  """
  if work.job.compute.attention != 'triton' or work.job.name == 'decode':
    return []
  again = work.trained if work.job.compute.remat == 'full' else []
  runs = {_FORWARD: (1.0, [*work.reads, *again])}
  runs |= {name: (share, work.trained) for name, share in _BACKWARD.items()}
  share_of_rows = work.job.rows / work.busy
  return [
    roofline.kernel_row(
      name,
      work.parts * sum(map(_calls, reads)),
      sum(read.scores() for read in reads) * share * share_of_rows,
      where,
    )
    for name, (share, reads) in runs.items()
    if reads
  ]


def _calls(read: Read) -> int:
  """Returns the number of attentions of a stack."""
  stack = read.stack
  cross = read.source_length and not stack.cross_merged
  return stack.layers + (forward_flops.cross_layers(stack) if cross else 0)


def _recomputed(work: Workload) -> float:
  """Returns FLOPs on all devices that the backward pass repeats."""
  remat, total = work.job.compute.remat, 0
  for read in work.trained:
    stack = read.stack
    if remat in ('full', 'attention'):
      total += read.forward()
    if remat == 'attention':
      total -= read.scores()
    if remat == 'narrow_dots':  # Both products that widen.
      total += 4 * stack.layers * read.length * stack.width * stack.mlp_width
  return float(total * work.job.rows)


def _gathered_weights(work: Workload) -> float:
  """Returns bytes of the weights that a device gathers for a microbatch."""
  stacks = parameters.count_by_stack(work.job.model)
  if work.job.name == 'decode':  # The encoder has run before.
    stacks = {'decoder': stacks['decoder']}
  total = sum(c.other + c.cross for c in stacks.values())
  total *= 2 if work.job.trains else 1  # Once more for the backward pass.
  for model in work.references:
    counts = parameters.count_by_stack(model).values()
    total += sum(c.other + c.cross for c in counts)
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
  for window in forward_flops.layer_windows(read.stack):
    positions += min(read.length, sides * (window or read.length))
  rows = work.tokens(read) * work.by_length / read.length
  passes = forward_flops.TRAINING if read.trained else 1
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
    * (forward_flops.TRAINING if read.trained else 1)
    for read in work.reads
  )
  keys = sum(_exchanged_keys(work, read) for read in work.reads)
  yield 'weights', embed, 'all-gather', _gathered_weights(work)
  yield 'hidden states', work.exchange, 'all-gather', states * item
  yield 'activations', place.mesh_axes('mlp'), 'all-reduce', sums * item
  yield 'keys', length, 'all-gather', keys * item
  if not work.job.trains:
    return
  counts = parameters.count_by_stack(work.job.model).values()
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
  work: Workload, where: chips.Slice
) -> tuple[list[roofline.Row], float]:
  """Returns collectives with their bytes, and bytes of gathered weights."""
  mesh = work.job.mesh
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
