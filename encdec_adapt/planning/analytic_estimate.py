"""Analytic cost model: memory and time of a program from its shapes.

Nothing is compiled. It plans GPU clusters, as their compiler may be missing,
and ranks candidates before the best are compiled for TPUs. Bytes of parameters,
optimizer, caches and batch are exact, since they follow from the shardings;
memory inside the program, and all times, are estimates by the rules below. This
module must not import `hlo` or `plan_report`, which read compiled programs.
"""

import dataclasses
from typing import Any

from encdec_adapt.models import forward_flops, parameters
from encdec_adapt.ops import (
  attention,
  attention_gradients,
  attention_tokamax,
  partition,
)
from encdec_adapt.planning import (
  chips,
  program_shapes,
  programs,
  roofline,
  workload,
)

# Share of the peak that products of weights reach, elementwise work included,
# and share of the collectives' time hidden by other work. Set by published
# speeds of Llama 2 7B on 8 and on 128 H100; see `planning.calibration`.
PRODUCT_EFFICIENCY = 0.68
HIDDEN = 0.5
# Memory of a TPU's training step that is not counted below (cast and gathered
# weights, copies), as shares of the activations saved for the backward pass and
# of the remainder. With these, peaks are 0.88 to 1.18 of those in
# `configs/plans`.
_UNCOUNTED_SAVED = 0.15
_UNCOUNTED_REMAINDER = 1.0
# Weights that GPUs have gathered at a time: layers in training, a pattern of
# two and the next; a share of all layers in decoding.
_GATHERED_LAYERS = 4
_GATHERED_SHARE = 0.4
_FP32 = 4
# Kernels of `ops.attention_tokamax`, and their work in forward passes: products
# for scores and values; for scores, their gradient and queries'; for those and
# keys' and values'.
_FORWARD = 'attention'
_BACKWARD = {'attention_dq': 1.5, 'attention_dkv': 2.0}
# The same of `ops.attention_gradients`, which is no kernel.
_PRODUCTS_BACKWARD = 2.5


@dataclasses.dataclass(frozen=True)
class Arguments:
  """Sizes of a program's arguments on a device.

  Attributes:
    bytes: bytes of the arguments by part; see `program_shapes.Program`.
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
    cls, job: programs.Job, program: program_shapes.Program
  ) -> 'Arguments':
    """Returns the arguments of a job's program.

    They do not depend on `compute.remat`, and on the batch only by its rows.
    """
    return cls(
      program_shapes.tree_bytes(program.arguments),
      program_shapes.tree_bytes(program.beside),
      program.host_bytes(),
      program.moved_bytes(),
      workload.Workload(job).device_rows,
    )


# Arguments of programs that grow with the rows of a device.
_BY_ROWS = ('batch', 'caches')


def describe(
  job: programs.Job, hardware: chips.Slice, sizes: Arguments
) -> dict[str, Any]:
  """Returns the plan of a program, as `plan_report.describe` does.

  Args:
    job: the job, on a mesh of the devices, or of stand-ins.
    hardware: chips that are planned for.
    sizes: arguments of the job on this mesh, or on a mesh that shards
      parameters alike, with any batch; computing them takes most of the time.

  Returns:
    JSON in which `source` is 'shapes', `kernels` are counted by the pairs that
    see each other, and `compile_s` and `trace_s` are None.
  """
  work = workload.Workload(job)
  # `search` computes `sizes` once for all batches, with the smallest one.
  arguments = {
    name: size * (work.device_rows / sizes.rows if name in _BY_ROWS else 1)
    for name, size in sizes.bytes.items()
  }
  # A step of decoding reads the caches.
  more = arguments.get('caches', 0) - sizes.bytes.get('caches', 0)
  parts = _parts(work, arguments, hardware.chip.kind)
  temporary = sum(parts.values())
  peak = temporary + sum((*arguments.values(), *sizes.beside.values()))
  kernels = _kernels(work, hardware)
  products = job.flops() + _recomputed(work)
  if kernels:
    # The formula counts scores as products; kernels have them in their rows.
    products -= _scores(work)
    products += _score_gradients(work)
  products /= work.busy
  compute = products / hardware.chip.flops / PRODUCT_EFFICIENCY
  traffic, weights = _traffic(work, hardware)
  collectives = sum(row['seconds'] for row in traffic)
  computing = compute + sum(row['seconds'] for row in kernels)
  for row in traffic:
    # There must be as much other work as it hides.
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
      products=products,
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


def _parts(work: workload.Workload, arguments, kind: str) -> dict[str, float]:
  """Returns bytes that live inside the program only, by part.

  Args:
    work: the work of the program.
    arguments: bytes of its arguments by part.
    kind: kind of the chips, 'tpu' or 'gpu'.
  """
  saved = sum(
    p.stack.layers * work.tokens(p) * _saved(work, p) for p in work.trained
  )
  # Layers run in turn, so their unsaved activations share memory.
  states, scores = max((_working(work, p) for p in work.passes), key=sum)
  working = states + scores
  name = 'logits' if work.job.decodes else 'loss'
  parts = {name: _loss(work), 'activations': saved + working}
  if kind == 'gpu' and (work.job.trains or work.job.decodes):
    parts['weights'] = _gathered_at_once(work)
  if work.job.trains:
    trees = programs.gradients(work.job)
    parts['gradients'] = arguments['parameters'] * trees
    if kind == 'gpu':
      # The loss's chunk and a layer, which run in turn, share their memory.
      parts['activations'] -= min(working, parts['loss'])
      return parts
    # Scores of a chunk live in its loop alone.
    remainder = sum(parts.values()) - saved - scores
    parts['besides'] = _UNCOUNTED_SAVED * saved
    parts['besides'] += _UNCOUNTED_REMAINDER * remainder
  return parts


def _gathered_at_once(work: workload.Workload) -> float:
  """Returns bytes of gathered weights that a GPU holds at a time."""
  weights = _gathered_weights(work) * (work.partition.size('embed') > 1)
  if work.job.trains:  # All layers, forward and backward.
    layers = sum(p.stack.layers for p in work.passes) + sum(
      p.stack.layers for p in work.trained
    )
    return weights * min(1.0, _GATHERED_LAYERS / layers)
  # A decoding step gathers the table for its logits, too.
  stack = _logits_pass(work).stack
  table = stack.table_rows * stack.width * work.item
  table *= work.partition.size('vocab') > 1
  return _GATHERED_SHARE * weights + table


def _key_value_width(
  work: workload.Workload, stack_pass: workload.StackPass
) -> float:
  """Returns elements of keys and values of a position on a device."""
  stack = stack_pass.stack
  return 2 * stack.kv_heads * stack.head_dim / work.by_tensor


def _saved(work: workload.Workload, stack_pass: workload.StackPass) -> float:
  """Returns bytes that a layer saves of a token for its backward pass.

  Without rematerialisation these include keys and values of all shards of a
  row.
  """
  stack, remat = stack_pass.stack, work.job.compute.remat
  heads = stack.heads * stack.head_dim / work.by_tensor
  keys_values = _key_value_width(work, stack_pass)
  attentions = 1 + bool(stack_pass.source_length)
  mlp = stack.mlp_width / work.by_tensor
  # Every policy saves the layer's input; the others add the outputs that
  # `models.execution.REMAT_POLICIES` names.
  width = stack.width
  if remat == 'attention':
    width += attentions * heads
  elif remat in ('narrow_dots', 'dots', 'none'):
    # Queries, keys, values, the attention's output, and both products with
    # weights that return to the model's width.
    width += attentions * (2 * heads + keys_values + stack.width) + stack.width
  if remat in ('dots', 'none'):
    width += (1 + stack.mlp_gated) * mlp
  if remat == 'none':
    width += 4 * stack.width + keys_values * work.by_length + mlp
  # Row statistics of the softmax, which 'full' computes again.
  statistics = 0 if remat == 'full' else attentions * stack.heads * _FP32
  return width * work.item + statistics


def _working(
  work: workload.Workload, stack_pass: workload.StackPass
) -> tuple[float, float]:
  """Returns bytes of a layer while it runs; doubled for its gradients.

  Returns:
    Those of states, and those of a chunk's scores, 0 with kernels.
  """
  compute, stack = work.job.compute, stack_pass.stack
  tokens, length = work.tokens(stack_pass), stack_pass.length
  wide = (1 + stack.mlp_gated) * stack.mlp_width
  wide += 2 * stack.heads * stack.head_dim
  width = 2 * stack.width + wide / work.by_tensor
  if work.by_length > 1:  # Keys and values of all shards of a row.
    width += work.by_length * _key_value_width(work, stack_pass)
  copies = 2 if work.job.trains else 1
  states, scores = copies * tokens * width * work.item, 0.0
  backend = attention.BACKENDS[compute.attention]
  # The single query of a cache runs no kernels (`cached_attention`).
  if not backend.kernels or length == 1:
    queries = length
    if backend.takes_chunk:
      queries = min(compute.attention_chunk, queries)
    keys = max(stack_pass.keys, stack_pass.source_length)
    pairs = tokens / length * queries * keys
    scores = copies * pairs * stack.heads / work.by_tensor * _FP32
  elif stack_pass.trained and _by_products(work, stack_pass):
    keys = max(stack_pass.keys, stack_pass.source_length)
    block = attention_gradients.block(length, keys) * keys
    # Scores and their gradients, in float32 and in the dtype of products.
    scores = block * stack.heads / work.by_tensor * 3 * (_FP32 + work.item)
  return states, scores


def _logits_pass(work: workload.Workload) -> workload.StackPass:
  """Returns the pass with the states that logits are computed from."""
  decoder = work.job.models[0].decoder
  return next(p for p in work.passes if p.stack is decoder)


def _loss(work: workload.Workload) -> float:
  """Returns bytes of a chunk of logits and, in training, of gradients.

  Of an embedding model: of the similarities of a device's texts to all.
  """
  logits = _logits_pass(work)
  stack, tokens = logits.stack, work.tokens(logits)
  if stack.classes == 1:  # It has no logits.
    return 0.0
  if stack.embedding:
    texts = work.job.rows * work.job.data.objectives[0].maker.texts
    # Compiled programs hold one matrix for each size of vectors in training.
    sizes = stack.embedding.sizes(stack.width) if work.job.trains else [0]
    return texts * texts / work.by_rows * len(sizes) * _FP32
  # A device that holds a part of the table computes the logits of all devices
  # that share the table.
  rows = min(work.job.loss.chunk, tokens)
  rows *= work.partition.devices(work.exchange)
  columns = stack.table_rows / work.partition.size('vocab')
  copies = 1 + work.job.trains + len(work.references)
  size = rows * columns * _FP32 * copies + rows * stack.width * work.item
  if work.job.trains:
    size += (rows + columns * _trains_table(work)) * stack.width * _FP32
    size += tokens * stack.width * work.item
  return size


def _trains_table(work: workload.Workload) -> bool:
  """Whether the table of the logits has a gradient."""
  adapters = work.job.placed_model.adapters
  return not adapters or any('/table' in path for path in adapters.table)


def _scores(work: workload.Workload) -> float:
  """Returns FLOPs of all attentions on all devices, by the formula."""
  runs = forward_flops.TRAINING + work.caches
  runs += work.job.compute.remat == 'full'
  return work.job.rows * sum(
    p.flops(forward_flops.scores) * (runs if p.trained else 1)
    for p in work.passes
  )


def _by_products(
  work: workload.Workload, stack_pass: workload.StackPass
) -> bool:
  """Whether tokamax's attentions of a stack have gradients without kernels."""
  is_wide = stack_pass.stack.head_dim > attention_tokamax.KERNEL_HEAD_DIM
  return work.job.compute.attention == 'tokamax' and is_wide


def _score_gradients(work: workload.Workload) -> float:
  """Returns FLOPs of gradients of attentions that are not by kernels."""
  scores = sum(
    p.flops(forward_flops.scores) for p in work.trained if _by_products(work, p)
  )
  return _PRODUCTS_BACKWARD * work.job.rows * scores


def _kernels(
  work: workload.Workload, hardware: chips.Slice
) -> list[roofline.Row]:
  """Returns kernels by name on a device; none if the attention has none.

  FLOPs are of pairs that see each other, which is less than whole blocks.
  """
  # Decoding runs no kernels (`ComputeConfig.cached_attention`).
  if work.job.compute.attention != 'tokamax' or work.job.decodes:
    return []
  # Only 'full' computes attention again for the backward pass: the other
  # policies save its outputs.
  repeated = work.trained * ((work.job.compute.remat == 'full') + work.caches)
  runs = {_FORWARD: (1.0, [*work.passes, *repeated])}
  backward = [p for p in work.trained if not _by_products(work, p)]
  runs |= {name: (share, backward) for name, share in _BACKWARD.items()}
  rows = work.job.rows / work.busy
  return [
    roofline.kernel_row(
      name,
      work.parts * sum(map(_calls, passes)),
      sum(p.flops(forward_flops.scores) for p in passes) * share * rows,
      hardware,
      # Stacks have equal ones, as far as they are shipped.
      passes[0].stack.head_dim,
    )
    for name, (share, passes) in runs.items()
    if passes
  ]


def _calls(stack_pass: workload.StackPass) -> int:
  """Returns the number of attentions of a stack."""
  stack = stack_pass.stack
  # Merged attention reads source and targets in a single call.
  cross = stack_pass.source_length and not stack.cross_merged
  return stack.layers + (forward_flops.cross_layers(stack) if cross else 0)


def _recomputed(work: workload.Workload) -> float:
  """Returns FLOPs on all devices that the backward pass repeats."""
  remat, total = work.job.compute.remat, 0
  for stack_pass in work.trained:
    stack = stack_pass.stack
    total += work.caches * stack_pass.flops(forward_flops.stack_forward)
    if remat in ('full', 'attention'):
      total += stack_pass.flops(forward_flops.stack_forward)
    if remat == 'attention':
      total -= stack_pass.flops(forward_flops.scores)
    if remat == 'narrow_dots':  # Both products that widen.
      length = stack_pass.answers * stack_pass.length
      total += 4 * stack.layers * length * stack.width * stack.mlp_width
  return float(total * work.job.rows)


def _gathered_weights(work: workload.Workload) -> float:
  """Returns bytes of the weights that a device gathers for a microbatch."""
  stacks = parameters.count_by_stack(work.job.models[0])
  if work.job.decodes:  # The encoder has run before.
    stacks = {'decoder': stacks['decoder']}
  # Tables are not gathered: devices exchange hidden states instead.
  total = sum(c.other + c.cross for c in stacks.values())
  total *= 2 if work.job.trains else 1  # Once more for the backward pass.
  for model in work.references:
    counts = parameters.count_by_stack(model).values()
    total += sum(c.other + c.cross for c in counts)
  return total / work.by_tensor * work.item


def _exchanged_keys(
  work: workload.Workload, stack_pass: workload.StackPass
) -> float:
  """Returns elements of keys and values that the shards of a row exchange.

  They are gathered forward, and twice more if a backward pass follows. A window
  gathers only its reach (`ops.attention_shards`). A cache is not moved.
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
  return runs * rows * _key_value_width(work, stack_pass) * positions


def _exchanges(work: workload.Workload):
  """Yields purpose, mesh axes, kind and bytes of a microbatch's collectives.

  Bytes are those of the unsharded array.
  """
  shares, item = work.partition, work.item
  embed, length = shares.mesh_axes('embed'), shares.mesh_axes('length')
  logits = _logits_pass(work)
  states = work.tokens(logits) * logits.stack.width
  states *= shares.devices(work.exchange)
  # Every product with heads or feed-forwards that returns to the model's width
  # leaves a part of each sum on every device: those of self-attention,
  # cross-attention and feed-forward.
  sums = sum(
    work.tokens(p)
    * p.stack.width
    * p.stack.layers
    * (2 + bool(p.source_length))
    * (forward_flops.TRAINING if p.trained else 1)
    for p in work.passes
  )
  keys = sum(_exchanged_keys(work, p) for p in work.passes)
  yield 'weights', embed, 'all-gather', _gathered_weights(work)
  yield 'hidden states', work.exchange, 'all-gather', states * item
  yield 'activations', shares.mesh_axes('mlp'), 'all-reduce', sums * item
  yield 'keys', length, 'all-gather', keys * item
  if not work.job.trains:
    return
  scattered = states * _FP32
  yield 'gradients of hidden states', work.exchange, 'reduce-scatter', scattered
  if work.job.placed_model.adapters:  # Their gradients are small.
    return
  counts = parameters.count_by_stack(work.job.model).values()
  tables = sum(c.embedding + c.head for c in counts) * _FP32
  size = sum(c.other + c.cross for c in counts) / work.by_tensor * _FP32
  # Gradients are summed over the axes that split tokens: those that shard the
  # parameter scatter the sum, the others need it whole.
  copies = shares.only(partition.TOKENS, ['embed'])
  tables_of = shares.only(partition.TOKENS, ['vocab'])
  tables /= shares.size('vocab')
  yield 'gradients', embed, 'reduce-scatter', size
  yield 'replicas', copies, 'all-reduce', size / shares.size('embed')
  yield 'gradients of tables', tables_of, 'all-reduce', tables


def _traffic(
  work: workload.Workload, hardware: chips.Slice
) -> tuple[list[roofline.Row], float]:
  """Returns collectives with their bytes, and bytes of gathered weights."""
  mesh = work.job.mesh
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
