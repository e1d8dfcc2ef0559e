"""tokamax's kernels, compiled for GPUs that are not here."""

from concurrent import futures
import contextlib
import importlib.util
import math
import multiprocessing

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import pytest

from encdec_adapt.ops import (
  attention,
  attention_gradients,
  attention_tiles,
  attention_tokamax,
  partition,
)
from encdec_adapt.planner import chips
from encdec_adapt.sharding import rules
from tests.ops import attention_cases

pytestmark = [
  pytest.mark.aot_gpu,
  pytest.mark.skipif(
    not importlib.util.find_spec('tokamax'), reason='needs tokamax'
  ),
]
ROWS, HEADS, KV_HEADS, WINDOW = 2, 8, 4, 1024
# Queries and keys: those of the shipped configurations, and unaligned ones.
SQUARE, LONG, SHORT, ODD = (4096, 4096), (8192, 8192), (512, 4096), (1000, 1500)
HEAD_DIMS = {'h100': (64, 128, 256), 'b200': (64, 128, 256)}
CASES = [
  (chip, head_dim, name, lengths)
  for chip, head_dims in HEAD_DIMS.items()
  for head_dim in head_dims
  for name, lengths in (('causal', SQUARE), ('cross', ODD))
]
# Of the other masks and lengths one head dimension each: the kernels differ in
# whether they are causal, and not in the ranges that they are given.
CASES += [
  ('h100', 256, 'full centered window', SQUARE),
  ('h100', 128, 'full', (1000, 1000)),
  ('h100', 256, 'cross', SHORT),
  ('b200', 128, 'causal window', LONG),
  ('b200', 64, 'prefix', SQUARE),
]


@pytest.fixture(scope='module')
def workers():
  """A process for each chip: kernels of a process are compiled for one kind."""
  with contextlib.ExitStack() as stack:
    spawn = multiprocessing.get_context('spawn')
    yield {
      chip: stack.enter_context(futures.ProcessPoolExecutor(1, spawn))
      for chip in HEAD_DIMS
    }


@pytest.mark.parametrize('chip, head_dim, name, lengths', CASES)
def test_kernels_compile_forward_and_backward(
  chip, head_dim, name, lengths, workers
):
  work = workers[chip].submit(compiled, chip, head_dim, name, lengths)
  program = work.result()
  if program is None:
    pytest.skip('needs jax[cuda13]')
  check(*program, head_dim, lengths)


@pytest.mark.parametrize('loop', ['while', 'cond'])
def test_no_loop_copies_the_sums_of_a_row(loop, workers):
  case = 'h100', 256, 'causal window', LONG
  program = workers['h100'].submit(compiled, *case, loop).result()
  if program is None:
    pytest.skip('needs jax[cuda13]')
  check(*program, 256, LONG)
  scores, sums = attention_gradients.SIZE**2 * HEADS, LONG[0] * HEADS * 256
  assert not attention_cases.large_copies(program[0], sums)
  # Masks select the scores of a pair, which are smaller.
  assert scores < sums and attention_cases.large_copies(program[0], scores)


def check(text, temporary, head_dim, lengths):
  """Checks the kernels of a program and its memory."""
  by_kernels = head_dim <= attention_tokamax.KERNEL_HEAD_DIM
  calls = 3 if by_kernels else 1
  assert text.count('custom_call_target="mosaic_gpu_v2"') == calls
  queries, keys = lengths
  arrays = ROWS * HEADS * head_dim * 2 * (queries + keys)
  # No mask of [queries, keys] lies in memory, not even as bytes, and scores
  # would be larger; or scores of a pair and their gradients, in both dtypes,
  # and sums of a row in float32.
  beside = ROWS * queries * keys / 2
  if not by_kernels:
    sizes = (min(attention_gradients.SIZE, length) for length in lengths)
    beside = HEADS * math.prod(sizes) * 3 * (4 + 2) + 2 * arrays / ROWS
  assert temporary < 2 * arrays + beside


def compiled(chip, head_dim, name, lengths, loop=attention_tiles.LOOP):
  """Text and temporary bytes of an attention with its gradients, or None."""
  attention_tiles.LOOP = loop
  devices = chips.devices_of(chips.parse(f'{chip}:1'))
  if devices[0].platform != 'gpu':
    return None
  axes = attention_cases.AXES
  mesh = jax.make_mesh(
    (1,) * 4, axes, axis_types=(AxisType.Auto,) * 4, devices=devices
  )

  def loss(q, k, v, tokens, memory):
    with partition.use(mesh, rules.RULES['fsdp'].as_dict()):
      spec = attention_cases.make_spec(name, tokens, memory, WINDOW)
      out = attention.attention(
        q, k, v, spec, scale=1.0, softcap=50.0, backend='tokamax'
      )
    return jnp.sum(out.astype(jnp.float32))

  def array(*shape, dtype=jnp.bfloat16):
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.ShapeDtypeStruct((ROWS, *shape), dtype, sharding=sharding)

  queries, keys = lengths
  ids, memory = (array(length, dtype=jnp.int32) for length in lengths)
  kv = array(keys, KV_HEADS, head_dim)
  program = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
  with jax.set_mesh(mesh):
    traced = program.trace(
      array(queries, HEADS, head_dim), kv, kv, (ids, ids), memory
    )
    result = traced.lower(lowering_platforms=('cuda',)).compile()
  return result.as_text(), result.memory_analysis().temp_size_in_bytes
