"""What devices send to each other in one run of a program, by shapes."""

from collections.abc import Mapping
import math
from typing import Any, NamedTuple

from jax.sharding import Mesh

from encdec_adapt.models import model_flops, parameters
from encdec_adapt.planning import chips, programs, roofline, workload

WEIGHTS = 'weights'  # What their gathering is for.
_FP32 = 4


class Exchange(NamedTuple):
  """A collective of one microbatch.

  Attributes:
    axes: mesh axes that it runs over.
    kind: such as 'all-gather'.
    bytes: of the array that is whole.
  """

  axes: tuple[str, ...]
  kind: str
  bytes: float


def traffic(
  work: workload.Workload, mesh: Mesh, where: chips.Slice
) -> list[dict[str, Any]]:
  """Collectives by what they are for, with bytes that a device sends.

  Args:
    work: the program's.
    mesh: of the devices, which may stand for others.
    where: what they stand for.
  """
  network, result = roofline.Network(mesh, where), []
  for name, (axes, kind, size) in _exchanges(work, mesh).items():
    axes = [axis for axis in axes if mesh.shape[axis] > 1]
    sent, seconds = network.along(axes, kind, size * work.parts)
    if sent:
      result.append(
        {
          'kind': kind,
          'axes': '+'.join(axes),
          'for': name,
          'count': work.parts,
          'bytes': sent,
          'seconds': seconds,
        }
      )
  return result


def gathered_weights(work: workload.Workload) -> float:
  """Bytes of the weights that a device gathers for one microbatch."""
  stacks = parameters.count_by_stack(work.settings.model)
  if work.name == 'decode':  # The encoder has run before.
    stacks = {'decoder': stacks['decoder']}
  total = sum(c.other + c.cross for c in stacks.values())
  total *= 2 if work.trains else 1  # Once more for the backward pass.
  if work.taught:
    alone = programs.alone(work.settings.model.decoder)
    total += parameters.count_by_stack(alone)['decoder'].other
  return total / work.shares.tensor * work.itemsize


def _exchanges(work: workload.Workload, mesh: Mesh) -> Mapping[str, Exchange]:
  """Every collective of one microbatch, by what it is for."""
  rules, item = work.settings.rules.as_dict(), work.itemsize
  tokens = (*rules['batch'], *rules['length'])
  exchange = tuple(a for a in tokens if a in rules['vocab'])
  # Logits are formed of the decoder's states.
  states = work.tokens(work.logits) * work.logits.stack.width
  # Sums of what each share of the heads and of the feed-forward adds.
  sums = sum(
    work.tokens(read)
    * read.stack.width
    * read.stack.layers
    * (2 + bool(read.source_length))
    * (3 if read.trained else 1)
    for read in work.reads
  )
  found = {
    WEIGHTS: Exchange(rules['embed'], 'all-gather', gathered_weights(work)),
    'hidden states': Exchange(
      exchange, 'all-gather', states * work.shares.exchange * item
    ),
    'activations': Exchange(rules['mlp'], 'all-reduce', sums * item),
    'keys': Exchange(
      rules['length'],
      'all-gather',
      sum(_gathered(work, read) for read in work.reads) * item,
    ),
  }
  return found | (_of_gradients(work, mesh, states) if work.trains else {})


def _of_gradients(work, mesh, states: float) -> dict[str, Exchange]:
  """Those of gradients: of weights, of tables, and of the decoder's states."""
  rules = work.settings.rules.as_dict()
  tokens = (*rules['batch'], *rules['length'])
  counts = parameters.count_by_stack(work.settings.model).values()
  tables = sum(c.embedding + c.head for c in counts) * _FP32
  size = sum(c.other + c.cross for c in counts) / work.shares.tensor * _FP32
  shards = math.prod(mesh.shape[a] for a in rules['embed'])
  rest = tuple(a for a in tokens if a not in rules['embed'])
  return {
    'gradients': Exchange(rules['embed'], 'reduce-scatter', size),
    'replicas': Exchange(rest, 'all-reduce', size / shards),
    'gradients of tables': Exchange(
      tuple(a for a in tokens if a not in rules['vocab']),
      'all-reduce',
      tables / work.shares.vocabulary,
    ),
    'gradients of hidden states': Exchange(
      tuple(a for a in tokens if a in rules['vocab']),
      'reduce-scatter',
      states * work.shares.exchange * _FP32,
    ),
  }


def _gathered(work, read: workload.Read) -> float:
  """Elements of keys and values that the shards of a row exchange.

  Forward; where a backward pass follows, once more, and their gradients. A
  window needs no more than what it reaches (`ops.attention_shards`). A cache
  stays where it is.
  """
  if work.shares.length == 1:
    return 0.0
  stack = read.stack
  of_position = 2 * stack.kv_heads * stack.head_dim / work.shares.tensor
  rows = work.tokens(read) * work.shares.length / read.length
  sides = 1 if stack.role == 'causal' else 2
  positions = stack.layers * read.source_length
  for window in model_flops.layer_windows(stack):
    positions += min(read.length, sides * (window or read.length))
  return (3 if read.trained else 1) * rows * of_position * positions
