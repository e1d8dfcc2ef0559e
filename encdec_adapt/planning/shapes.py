"""What a training step costs by its shapes alone: nothing is compiled.

For hardware whose compiler is not at hand (GPU clusters), and to choose what
is worth compiling. Parameters, optimizer and batch are exact, for they follow
from the shardings; what lives only inside the step, and every time, is an
estimate by the rules written here.
"""

from collections.abc import Iterator
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from encdec_adapt import config as config_lib
from encdec_adapt import job
from encdec_adapt.models import config as model_config
from encdec_adapt.models import model_flops, parameters
from encdec_adapt.planning import chips, programs, roofline
from encdec_adapt.runtime import flops

# Share of the peak that products of weights reach, with what is elementwise
# around them, and share of the collectives that other work hides: set by what
# was published of Llama 2 7B on 8 and on 128 H100; see the calibration.
PRODUCT_EFFICIENCY = 0.66
HIDDEN = 0.5
_FP32 = 4


@dataclasses.dataclass(frozen=True)
class _Row:
  """A stack that reads rows in a step.

  Attributes:
    stack: its shape.
    length: positions of a row.
    source_length: of what its cross-attention reads, or 0.
    trained: whether a backward pass follows.
  """

  stack: model_config.StackConfig
  length: int
  source_length: int
  trained: bool


@dataclasses.dataclass(frozen=True)
class _Shares:
  """How many devices share what."""

  rows: int
  length: int
  tensor: int
  vocabulary: int
  exchange: int  # Devices that share a table and hold other tokens.

  @classmethod
  def of(cls, settings: config_lib.Settings, mesh: Mesh) -> '_Shares':
    """Reads the rules."""
    rules = settings.rules.as_dict()

    def size(axes):
      return math.prod(mesh.shape[axis] for axis in axes)

    tokens = (*rules['batch'], *rules['length'])
    return cls(
      rows=size(rules['batch']),
      length=size(rules['length']),
      tensor=size(rules['mlp']),
      vocabulary=size(rules['vocab']),
      exchange=size(a for a in tokens if a in rules['vocab']),
    )


@dataclasses.dataclass(frozen=True)
class Arguments:
  """What a step is given, on one device.

  Attributes:
    bytes: by what they are; see `programs.Program`.
    replicated: large ones that every device holds whole.
    rows: of the batch that a device has; where devices share a row, a part
      of one.
  """

  bytes: dict[str, float]
  replicated: list[dict[str, Any]]
  rows: float

  @classmethod
  def of(cls, settings: config_lib.Settings, mesh: Mesh) -> 'Arguments':
    """Those of a job; they do not depend on its `compute.remat`.

    With another batch, or on a mesh that differs only in how it splits the
    batch, all but the batch is the same; see `with_rows`.
    """
    program = programs.train(settings, mesh)
    return cls(
      programs.argument_bytes(program),
      programs.replicated(program),
      _device_rows(settings, _Shares.of(settings, mesh)),
    )

  def with_rows(self, rows: float) -> dict[str, float]:
    """The bytes where a device has so many rows of the batch."""
    return {**self.bytes, 'batch': self.bytes['batch'] * rows / self.rows}


def train(
  settings: config_lib.Settings,
  mesh: Mesh,
  where: chips.Slice,
  budget: float,
  given: Arguments | None = None,
) -> dict[str, Any]:
  """The plan of a training step, as `report.describe` writes one.

  Args:
    settings: of the job.
    mesh: of the devices, which may stand for others.
    where: what they stand for.
    budget: bytes of memory that a device may use.
    given: of the job on this mesh, or one that shards parameters alike, with
      any batch; by default made here, which takes most of the time.

  Returns:
    JSON with `fits`, `memory`, `flops` (those of kernels are among the
    products), `collectives`, `roofline`, `mfu`, `replicated`, and 'shapes' as
    `source`; None as `kernels`, `compile_s`, `trace_s` and `instructions`,
    which only a compiled program has.
  """
  teacher = programs.teacher(settings, mesh)
  given = given or Arguments.of(settings, mesh)
  shares = _Shares.of(settings, mesh)
  rows = list(_rows(settings, bool(teacher)))
  arguments = given.with_rows(_device_rows(settings, shares))
  parts = {
    'loss': _loss(settings, shares, bool(teacher)),
    'activations': _activations(settings, rows, shares),
    'gradients': arguments['parameters'] * programs.gradients(settings),
  }
  temporary = sum(parts.values())
  model = job.step_flops(settings, teacher)
  again = _recomputed(settings, rows)
  work = (model + again) / mesh.size
  peak = where.chip.flops
  compute = work / peak / PRODUCT_EFFICIENCY
  traffic = _traffic(settings, mesh, where, shares, rows)
  collectives = sum(row['seconds'] for row in traffic)
  state = sum(arguments.values())
  memory_seconds = 2 * state / where.chip.hbm_bandwidth
  exposed = collectives - min(HIDDEN * collectives, compute)
  step = max(compute + exposed, memory_seconds)
  return {
    'source': 'shapes',
    'fits': state + temporary <= budget,
    'memory': {
      'budget': budget,
      'peak': state + temporary,
      'arguments': arguments,
      'beside': {},
      'temporary': temporary,
      'parts': parts,
    },
    'flops': {'products': work, 'kernels': 0.0, 'model': model / mesh.size},
    'collectives': traffic,
    'kernels': None,
    'roofline': {
      'compute_s': compute,
      'kernels_s': 0.0,
      'collectives_s': collectives,
      'exposed_s': exposed,
      'memory_s': memory_seconds,
      'step_s': step,
    },
    'mfu': model / mesh.size / peak / step,
    'trace_s': None,
    'compile_s': None,
    'instructions': None,
    'replicated': given.replicated,
  }


def _device_rows(settings: config_lib.Settings, shares: _Shares) -> float:
  """Rows of a batch on one device, a part of one where devices share it."""
  return settings.train.batch_size / shares.rows / shares.length


def _parts(settings: config_lib.Settings) -> int:
  return settings.train.microbatches


def _itemsize(settings: config_lib.Settings) -> int:
  return jnp.dtype(settings.compute.dtype).itemsize


def _rows(settings: config_lib.Settings, taught: bool) -> Iterator[_Row]:
  """Every stack that reads in a step, the teacher's last."""
  lengths, model = settings.data.train.lengths, settings.model
  if 'encoder' in model.stacks:
    yield _Row(model.encoder, lengths.encoder, 0, True)
    yield _Row(model.decoder, lengths.decoder, lengths.encoder, True)
  else:
    length = lengths.teacher if lengths.encoder else lengths.decoder
    yield _Row(model.decoder, length, 0, True)
  if taught:
    alone = programs.alone(model.decoder).decoder
    yield _Row(alone, lengths.teacher, 0, False)


def _tokens(settings, row: _Row, shares: _Shares) -> float:
  """Positions of one microbatch on one device."""
  rows = settings.train.batch_size / shares.rows / _parts(settings)
  return rows * row.length / shares.length


def _saved(row: _Row, remat: str, shares: _Shares, item: int) -> float:
  """Bytes that one layer keeps of a token for its backward pass.

  Without rematerialisation these are keys and values of all shards of a row.
  """
  stack = row.stack
  heads = stack.heads * stack.head_dim / shares.tensor
  both = 2 * stack.kv_heads * stack.head_dim / shares.tensor
  attentions = 1 + bool(row.source_length)
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


def _activations(settings, rows, shares: _Shares) -> float:
  """What layers keep, and the most that one of them has in its own pass."""
  compute, item = settings.compute, _itemsize(settings)
  kept, largest = 0.0, 0.0
  for row in rows:
    stack, tokens = row.stack, _tokens(settings, row, shares)
    if row.trained:
      kept += stack.layers * tokens * _saved(row, compute.remat, shares, item)
    inside = 4 * stack.width
    inside += (
      4 * (stack.mlp_width + stack.heads * stack.head_dim) / (shares.tensor)
    )
    working = tokens * inside * item
    if shares.length > 1:
      # Keys and values of all shards of a row, and their gradients.
      both = 2 * stack.kv_heads * stack.head_dim / shares.tensor
      working += 2 * tokens * shares.length * both * item
    if compute.attention != 'splash':
      # Scores of a chunk of queries, and their gradient.
      keys = max(row.length, row.source_length)
      queries = min(compute.attention_chunk, row.length)
      pairs = tokens / row.length * queries * keys
      working += 2 * pairs * stack.heads / shares.tensor * _FP32
    largest = max(largest, working)
  return kept + largest


def _loss(settings, shares: _Shares, taught: bool) -> float:
  """A chunk of logits, the gradients it makes, and those of the table."""
  stack, item = settings.model.decoder, _itemsize(settings)
  lengths = settings.data.train.lengths
  own = settings.train.batch_size / shares.rows / _parts(settings)
  own *= lengths.decoder / shares.length
  rows = min(settings.loss.chunk, own) * shares.exchange
  columns = stack.table_rows / shares.vocabulary
  logits = rows * columns * _FP32 * (3 if taught else 2)
  states = rows * stack.width * (item + _FP32)
  return (
    logits + states + columns * stack.width * _FP32 + own * (stack.width * item)
  )


def _recomputed(settings, rows) -> float:
  """FLOPs of all devices that the backward pass does once more."""
  remat, total = settings.compute.remat, 0
  for row in (row for row in rows if row.trained):
    stack, shape = row.stack, model_flops.stack_shape(row.stack)
    lengths = dict(length=row.length, source_length=row.source_length)
    if remat in ('full', 'attention'):
      total += flops.forward(shape, **lengths)
    if remat == 'attention':
      total -= flops.scores(shape, **lengths)
    if remat == 'narrow_dots':  # Both products that widen.
      total += 4 * stack.layers * row.length * stack.width * stack.mlp_width
  return float(total * settings.train.batch_size)


def _traffic(
  settings, mesh: Mesh, where: chips.Slice, shares: _Shares, rows: list[_Row]
) -> list[dict[str, Any]]:
  """Collectives of a step, by what they are for."""
  network = roofline.Network(mesh, where)
  passes, result = _parts(settings), []
  for name, (axes, kind, size) in _exchanges(
    settings, mesh, shares, rows
  ).items():
    sent, seconds = network.along(axes, kind, size * passes)
    if sent:
      result.append(
        {
          'kind': kind,
          'axes': '+'.join(axes),
          'for': name,
          'count': passes,
          'bytes': sent,
          'seconds': seconds,
          'exposed': (1 - HIDDEN) * seconds,
        }
      )
  return result


def _exchanges(
  settings, mesh: Mesh, shares: _Shares, rows: list[_Row]
) -> dict[str, tuple[tuple[str, ...], str, float]]:
  """Mesh axes, kind, and bytes of the whole array, of one microbatch."""
  rules, item = settings.rules.as_dict(), _itemsize(settings)
  counts = parameters.count_by_stack(settings.model).values()
  weights = sum(c.other + c.cross for c in counts) / shares.tensor
  read = 2 * weights
  if not rows[-1].trained:
    alone = programs.alone(settings.model.decoder)
    read += parameters.count_by_stack(alone)['decoder'].other / shares.tensor
  tokens = (*rules['batch'], *rules['length'])
  exchange = tuple(a for a in tokens if a in rules['vocab'])
  # Logits are formed of the decoder's states.
  decoder = next(r for r in rows if r.stack is settings.model.decoder)
  states = _tokens(settings, decoder, shares) * decoder.stack.width
  rest = tuple(a for a in tokens if a not in rules['embed'])
  shards = math.prod(mesh.shape[a] for a in rules['embed'])
  # Sums of what each share of the heads and of the feed-forward adds.
  sums = sum(
    _tokens(settings, row, shares)
    * row.stack.width
    * row.stack.layers
    * (2 + bool(row.source_length))
    * (3 if row.trained else 1)
    for row in rows
  )
  return {
    'weights': (rules['embed'], 'all-gather', read * item),
    'gradients': (rules['embed'], 'reduce-scatter', weights * _FP32),
    'replicas': (rest, 'all-reduce', weights * _FP32 / shards),
    'hidden states': (exchange, 'all-gather', states * shares.exchange * item),
    'their gradients': (
      exchange,
      'reduce-scatter',
      states * shares.exchange * _FP32,
    ),
    'activations': (rules['mlp'], 'all-reduce', sums * item),
    'keys': (
      rules['length'],
      'all-gather',
      sum(_gathered(settings, row, shares) for row in rows) * item,
    ),
  }


def _gathered(settings, row: _Row, shares: _Shares) -> float:
  """Elements of keys and values that the shards of a row exchange.

  Forward; where a backward pass follows, once more, and their gradients. A
  window needs no more than what it reaches (`ops.attention_shards`).
  """
  stack = row.stack
  of_position = 2 * stack.kv_heads * stack.head_dim / shares.tensor
  rows = _tokens(settings, row, shares) * shares.length / row.length
  sides = 1 if stack.role == 'causal' else 2
  positions = stack.layers * row.source_length
  for window in model_flops.stack_shape(stack).windows:
    positions += min(row.length, sides * (window or row.length))
  return (3 if row.trained else 1) * rows * of_position * positions


def stand_in_devices(count: int) -> np.ndarray:
  """Devices that only have to be as many as those planned for.

  The first call, before anything else asks JAX for devices, has to be that
  for the most.
  """
  jax.config.update('jax_platforms', 'cpu')
  if jax.config.jax_num_cpu_devices < count:
    jax.config.update('jax_num_cpu_devices', count)
  return np.array(jax.devices()[:count])
