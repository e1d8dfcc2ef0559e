"""Packed rows, masks by name, and comparison with the reference attention."""

import contextlib
import functools
import re

from hypothesis import strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
import numpy as np

from encdec_adapt.ops import attention_reference, masks
from encdec_adapt.planner import hlo

MASKS = (
  'causal',
  'causal window',
  'full',
  'full centered window',
  'full exclusive window',
  'full inclusive window',
)
AXES = ('replica', 'fsdp', 'sequence', 'tensor')


def make_mesh(shape, axes=AXES):
  devices = jax.devices()[: int(np.prod(shape))]
  return jax.make_mesh(
    shape, axes, axis_types=(AxisType.Auto,) * len(axes), devices=devices
  )


def packed(length, rows=2):
  """Segments and positions of two examples and some padding in each row."""
  segments, positions = np.zeros((2, rows, length), np.int32)
  for row in range(rows):
    first = length // 3 + row
    second = length - first - min(5 + row, length // 4)
    segments[row, :first] = 1
    segments[row, first : first + second] = 2
    positions[row, :first] = np.arange(first)
    positions[row, first : first + second] = np.arange(second)
  return jnp.asarray(segments), jnp.asarray(positions)


def of_sizes(rows, length):
  """Segments and positions of examples of these sizes in each row."""
  segments, positions = np.zeros((2, len(rows), length), np.int32)
  for row, sizes in enumerate(rows):
    start = 0
    for number, size in enumerate(sizes, 1):
      slots = np.arange(start, min(start + size, length))
      segments[row, slots], positions[row, slots] = number, slots - start
      start += size
  return jnp.asarray(segments), jnp.asarray(positions)


@st.composite
def rows(draw, length):
  """Segments and positions [1, length] of a packed row, padding at its end."""
  sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
  segments = [n for n, size in enumerate(sizes, 1) for _ in range(size)]
  positions = [i for size in sizes for i in range(size)]
  padding = [0] * length
  return tuple(
    jnp.array([(x + padding)[:length]], jnp.int32)
    for x in (segments, positions)
  )


def make_spec(name, tokens, memory, window, aligned=True):
  """The mask of a name of `MASKS`, 'merged' or 'cross', of given tokens."""
  if name == 'cross':
    return masks.cross(tokens[0], memory)
  if name == 'merged':
    return masks.with_memory(masks.causal(*tokens, window=window), memory)
  make = masks.causal
  if name.startswith('prefix'):
    make = functools.partial(masks.prefix, kv_prefix=jnp.int32(tokens[1] < 4))
  if name.startswith('full'):
    rule = name.split()[1] if 'window' in name else 'exclusive'
    make = functools.partial(masks.bidirectional, window_rule=rule)
  window = window if 'window' in name else None
  return make(*tokens, window=window, aligned=aligned)


def spec_of(name, length, *, rows=2, window=17, aligned=True):
  """The mask of that name for packed rows."""
  tokens = packed(length, rows)
  memory = packed(length + 8, rows)[0] if name == 'cross' else tokens[0]
  return make_spec(name, tokens, memory, window, aligned)


def blind_cross():
  """Cross-attention of 100 queries, some of which see none of 200 keys."""
  q_segments = jnp.array([[1] * 50 + [3] * 40 + [0] * 10] * 2, jnp.int32)
  kv_segments = jnp.array([[1] * 100 + [2] * 90 + [0] * 10] * 2, jnp.int32)
  return masks.cross(q_segments, kv_segments)


def qkv(queries, keys, *, rows=2, heads=(4, 2), head_dim=32, dtype=jnp.float32):
  rng = np.random.default_rng(0)
  shapes = ((queries, heads[0]), (keys, heads[1]), (keys, heads[1]))
  return tuple(
    jnp.asarray(rng.normal(size=(rows, *s, head_dim)), dtype) for s in shapes
  )


def compiled(attend, softcap=5.0, context=contextlib.nullcontext):
  """Jitted function of cases, name -> ((q, k, v, ..), mask).

  It returns the output, and gradients of a loss that weighs every query, of
  every case.

  Args:
    attend: attention.
    softcap: cap of the scores.
    context: makes the context in which all cases are traced, as one program.
  """

  def one(arrays, spec):
    def loss(*arrays):
      out = attend(*arrays, spec, scale=0.3, softcap=softcap)
      weights = jnp.linspace(0.5, 1.5, out.shape[1])[:, None, None]
      return jnp.sum(jnp.sin(out.astype(jnp.float32)) * weights), out

    which = tuple(range(len(arrays)))
    gradients, out = jax.grad(loss, which, has_aux=True)(*arrays)
    return out, *gradients

  @jax.jit
  def run(cases):
    with context():
      return {name: one(*case) for name, case in cases.items()}

  return run


def results(attend, cases, softcap=5.0, context=contextlib.nullcontext):
  """The results of `compiled` for these cases."""
  return compiled(attend, softcap, context)(cases)


def large_copies(text, size):
  """Copies and selects inside loops, of arrays [.., ..] of at least a size."""
  computations, _ = hlo.parse(text)
  called = {
    name: {x for op in ops for x in re.findall(r'%([\w.\-]+)', op.attributes)}
    for name, ops in computations.items()
  }
  inside, bodies = (
    set(),
    {
      op.attribute('body')
      for ops in computations.values()
      for op in ops
      if op.opcode == 'while'
    },
  )
  while bodies:
    name = bodies.pop()
    inside.add(name)
    bodies |= (called[name] & set(computations)) - inside
  return [
    op
    for name in inside
    for op in computations[name]
    if op.opcode in ('copy', 'copy-start', 'select', 'conditional')
    if any(np.prod(shape) >= size for _, shape in hlo.arrays(op.type))
  ]


def assert_same(got, expected, tolerance):
  for name in expected:
    for x, y in zip(got[name], expected[name], strict=True):
      assert x.dtype == y.dtype
      x, y = (np.asarray(a, np.float32) for a in (x, y))
      np.testing.assert_allclose(
        x, y, rtol=tolerance, atol=tolerance, err_msg=name
      )


def assert_like_reference(attend, q, k, v, spec, softcap=5.0, tolerance=5e-5):
  cases = {'': ((q, k, v), spec)}
  expected = results(attention_reference.attend, cases, softcap)
  assert_same(results(attend, cases, softcap), expected, tolerance)
