"""Analytic estimates of a program's memory and of recomputation under remat.

Nothing is compiled. `remat_choice` ranks policies with them, and the planner
ranks programs.
"""

import math

from encdec_adapt.models import forward_flops, parameters
from encdec_adapt.ops import (
  attention,
  attention_gradients,
  attention_tiles,
  attention_tokamax,
)
from encdec_adapt.training import workload

# Memory of a TPU training step not counted below (cast and gathered weights,
# copies), as fractions of the activations saved for the backward pass and of
# the remainder. Estimated peaks are then 0.87 to 1.19 times the compiled peaks
# in `configs/plans`.
_UNCOUNTED_SAVED = 0.16
_UNCOUNTED_REMAINDER = 1.0
# Largest ratio of estimated memory to the limit worth compiling, for errors as
# above.
DOUBT = 1.2
# Weights gathered at a time on GPUs: in training, layers (a pattern of two and
# the next two); in decoding, a fraction of all layers.
_GATHERED_LAYERS = 4
_GATHERED_SHARE = 0.4
_FP32 = 4


def parts(
  work: workload.Workload, trained: float, platform: str
) -> dict[str, float]:
  """Returns bytes of a program's temporaries, by part.

  Args:
    work: the work of the program.
    trained: bytes of the trained parameters on a device.
    platform: 'tpu' or 'gpu'.
  """
  saved = sum(
    p.stack.layers * work.tokens(p) * _saved(work, p) for p in work.trained
  )
  # Layers run sequentially, so their unsaved activations share memory.
  states, scores = max((_working(work, p) for p in work.passes), key=sum)
  working = states + scores
  name = 'logits' if work.decodes else 'loss'
  parts = {name: _loss(work), 'activations': saved + working}
  if platform == 'gpu' and (work.trains or work.decodes):
    parts['weights'] = _gathered_at_once(work)
  if work.trains:
    parts['gradients'] = trained * gradients(work)
    if platform == 'gpu':
      # A chunk of the loss and a layer never run together and share memory.
      parts['activations'] -= min(working, parts['loss'])
      return parts
    # Scores of a chunk live only within its loop.
    remainder = sum(parts.values()) - saved - scores
    parts['besides'] = _UNCOUNTED_SAVED * saved
    parts['besides'] += _UNCOUNTED_REMAINDER * remainder
  return parts


def gradients(work: workload.Workload) -> int:
  """Returns the number of gradient trees in memory of a training step.

  With microbatches: the current gradients and the accumulator.
  """
  return 2 if work.parts > 1 else 1


def _gathered_at_once(work: workload.Workload) -> float:
  weights = gathered_weights(work) * (work.partition.size('embed') > 1)
  if work.trains:  # Layers of the forward and backward pass.
    layers = sum(p.stack.layers for p in work.passes) + sum(
      p.stack.layers for p in work.trained
    )
    return weights * min(1.0, _GATHERED_LAYERS / layers)
  # A decoding step also gathers the table for its logits.
  stack = logits_pass(work).stack
  table = stack.table_rows * stack.width * work.item
  table *= work.partition.size('vocab') > 1
  return _GATHERED_SHARE * weights + table


def key_value_width(
  work: workload.Workload, stack_pass: workload.StackPass
) -> float:
  """Returns elements of keys and values per position on a device."""
  return forward_flops.head_widths(stack_pass.stack)[1] / work.by_tensor


def _saved(work: workload.Workload, stack_pass: workload.StackPass) -> float:
  """Returns bytes per token that a layer saves for its backward pass.

  Without rematerialisation, they include keys and values of all shards of a
  row.
  """
  stack, remat = stack_pass.stack, work.compute.remat
  heads = forward_flops.head_widths(stack)[0] / work.by_tensor
  keys_values = key_value_width(work, stack_pass)
  attentions = 1 + bool(stack_pass.source_length)
  mlps = [stack.mlp_width_of(i) for i in range(stack.layers)]
  mlp = sum(mlps) / stack.layers / work.by_tensor
  # Every policy saves the layer's input; all but 'full' add the outputs named
  # in `models.execution.REMAT_POLICIES`.
  width = stack.width + stack.layer_input_width
  if remat != 'full':
    width += attentions * heads
  if remat in ('narrow_dots', 'dots', 'none'):
    # Queries, keys, values, and output projections back to the model width.
    # Every answer has separate keys and values of the inputs.
    width += attentions * (heads + stack.width) + stack.width
    positions = stack_pass.length + stack_pass.source_length
    width += keys_values * positions / stack_pass.length
  if remat in ('dots', 'none'):
    width += (1 + stack.mlp_gated) * mlp
  if remat == 'none':
    width += 4 * stack.width + keys_values * work.by_length + mlp
  # Row statistics of the softmax, recomputed by 'full'.
  statistics = 0 if remat == 'full' else attentions * stack.heads * _FP32
  return float(width * work.item + statistics)


def _working(
  work: workload.Workload, stack_pass: workload.StackPass
) -> tuple[float, float]:
  """Returns the working memory of a layer, with gradients in training.

  Returns:
    Bytes of states, and of a chunk's scores (0 with kernels).
  """
  compute, stack = work.compute, stack_pass.stack
  tokens, length = work.tokens(stack_pass), stack_pass.length
  wide = (1 + stack.mlp_gated) * stack.mlp_width_of(stack.layers - 1)
  # The layer with the widest heads.
  wide += 2 * stack.heads * max(x.head_dim for x in stack.kinds)
  width = 2 * stack.width + wide / work.by_tensor
  if work.by_length > 1:  # Keys and values of all shards of a row.
    width += work.by_length * key_value_width(work, stack_pass)
  copies = 2 if work.trains else 1
  states, scores = copies * tokens * width * work.item, 0.0
  backend, size = attention.BACKENDS[compute.attention], 0
  keys = max(stack_pass.keys, stack_pass.source_length)
  if backend.takes_chunk and length > compute.attention_chunk:
    size = compute.attention_chunk
  elif stack_pass.trained and by_products(work, stack_pass):
    size = attention_gradients.SIZE
  if size:
    # Scores and gradients of a block of queries and a tile of keys, in float32
    # and in the compute dtype.
    pairs = math.prod(attention_tiles.even(x, size) for x in (length, keys))
    scores = pairs * stack.heads / work.by_tensor * 3 * (_FP32 + work.item)
  # A single query over a cache uses no kernels (`cached_attention`).
  elif not backend.kernels or length == 1:
    scores = copies * tokens * keys * stack.heads / work.by_tensor * _FP32
  return states, scores


def logits_pass(work: workload.Workload) -> workload.StackPass:
  """Returns the pass with the states for the logits."""
  decoder = work.models[0].decoder
  return next(p for p in work.passes if p.stack is decoder)


def _loss(work: workload.Workload) -> float:
  """Returns bytes of a chunk of logits and, in training, of its gradients.

  For embedding models: bytes of the similarities of a device's texts.
  """
  logits = logits_pass(work)
  stack, tokens = logits.stack, work.tokens(logits)
  if stack.outputs == 1:  # A reward model has no logits.
    return 0.0
  if sizes := stack.head.sizes(stack.width):
    texts = work.rows * work.texts
    # In training, one matrix per Matryoshka size.
    count = len(sizes) if work.trains else 1
    return texts * texts / work.by_rows * count * _FP32
  # With a sharded table, a device computes its columns of the logits for all
  # tokens of the devices that share the table.
  rows = min(work.chunk, tokens)
  rows *= work.partition.devices(work.exchange)
  columns = stack.table_rows / work.partition.size('vocab')
  copies = 1 + work.trains + len(work.references)
  size = rows * columns * _FP32 * copies + rows * stack.width * work.item
  if work.trains:
    size += (rows + columns * _trains_table(work)) * stack.width * _FP32
    size += tokens * stack.width * work.item
  return size


def _trains_table(work: workload.Workload) -> bool:
  adapters = work.adapters
  return not adapters or any('/table' in path for path in adapters.table)


def by_products(
  work: workload.Workload, stack_pass: workload.StackPass
) -> bool:
  """Returns whether tokamax's gradients of a stack run without kernels."""
  head_dim = max(x.head_dim for x in stack_pass.stack.kinds)
  is_wide = head_dim > attention_tokamax.KERNEL_HEAD_DIM
  return work.compute.attention == 'tokamax' and is_wide


def recomputed(work: workload.Workload) -> float:
  """Returns FLOPs recomputed by the backward pass, on all devices."""
  remat, total = work.compute.remat, 0
  for stack_pass in work.trained:
    stack = stack_pass.stack
    total += work.caches * stack_pass.flops(forward_flops.stack_forward)
    if remat in ('full', 'attention'):
      total += stack_pass.flops(forward_flops.stack_forward)
    if remat == 'attention':
      total -= stack_pass.flops(forward_flops.scores)
    if remat == 'narrow_dots':  # Both products to the MLP width.
      length = stack_pass.answers * stack_pass.length
      mlps = sum(stack.mlp_width_of(i) for i in range(stack.layers))
      total += 4 * length * stack.width * mlps
  return float(total * work.rows)


def gathered_weights(work: workload.Workload) -> float:
  """Returns bytes of weights gathered by a device per microbatch."""
  stacks = parameters.count_by_stack(work.models[0])
  if work.decodes:  # The encoder has already run.
    stacks = {'decoder': stacks['decoder']}
  # Tables stay sharded: devices exchange hidden states instead.
  total = sum(c.other + c.cross for c in stacks.values())
  total *= 2 if work.trains else 1  # Again for the backward pass.
  for model in work.references:
    counts = parameters.count_by_stack(model).values()
    total += sum(c.other + c.cross for c in counts)
  return total / work.by_tensor * work.item
