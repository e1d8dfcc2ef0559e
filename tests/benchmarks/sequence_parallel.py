"""Gathered keys against a ring, for attention whose length is sharded.

One attention of Gemma 2 2B's heads, forward and backward, compiled for fake
devices and not run: what a device sends, by kind of collective, and the
temporary memory of its program. The ring is written for this comparison. It
passes keys and values on and adds up their softmax, and in the backward pass
their gradients too; scores exist for a chunk of queries, as in ours.
"""

from collections.abc import Callable, Sequence
import functools
import os
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from encdec_adapt.ops import attention, masks, partition
from encdec_adapt.planning import hlo
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import rules
from tests.benchmarks import results

_HIDDEN = -1e30


def make_masks(window: int) -> dict[str, Callable[..., masks.MaskSpec]]:
  """Masks of self-attention by name, from (segments, positions)."""
  return {
    'full': functools.partial(masks.bidirectional, aligned=True),
    'causal': functools.partial(masks.causal, aligned=True),
    'full exclusive window': functools.partial(
      masks.bidirectional, window=window, aligned=True
    ),
  }


def _scores(q, k, spec, scale):
  """Visible scores [B, K, G, T, S]."""
  q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
  scores = scale * jnp.einsum(
    'BTKGH,BSKH->BKGTS', q, k, preferred_element_type=jnp.float32
  )
  return jnp.where(masks.dense_mask(spec)[:, None, None], scores, _HIDDEN)


def _by_chunks(function, chunk: int, *arrays):
  """Runs `function` on chunks of queries, dimension 1 of the arrays."""

  def split(x):
    x = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)

  return jax.lax.map(lambda c: function(*c), jax.tree.map(split, arrays))


def _joined(x):
  """[chunks, B, chunk, ...] -> [B, T, ...]."""
  x = jnp.moveaxis(x, 0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _ring(q, k, v, spec, scale, chunk):
  """Ring attention on one shard of axis 'sequence': [B, T, N, H]."""
  return _ring_forward(q, k, v, spec, scale, chunk)[0]


def _pass_on(tree):
  count = jax.lax.axis_size('sequence')
  pairs = [(i, (i + 1) % count) for i in range(count)]
  return jax.tree.map(lambda x: jax.lax.ppermute(x, 'sequence', pairs), tree)


def _ring_forward(q, k, v, spec, scale, chunk):
  groups = q.shape[2] // k.shape[2]

  def visit(carry, held):
    """Adds the held keys to values, peaks and sums of weights."""
    k, v, segments, positions = held

    def add(q, q_segments, q_positions, total, peak, weight):
      part = spec.replace(
        q_segments=q_segments,
        q_positions=q_positions,
        kv_segments=segments,
        kv_positions=positions,
      )
      scores = _scores(q, k, part, scale)  # [B, K, G, T, S]
      by_query = 'BKGT->BTKG'
      most = jnp.einsum(by_query, jnp.max(scores, axis=-1))
      higher = jnp.maximum(peak, most)
      weights = jnp.exp(scores - jnp.einsum('BTKG->BKGT', higher)[..., None])
      shrink = jnp.exp(peak - higher)
      total = total * shrink[..., None]
      total += jnp.einsum('BKGTS,BSKH->BTKGH', weights.astype(v.dtype), v)
      weight = weight * shrink + jnp.einsum(by_query, jnp.sum(weights, axis=-1))
      return total, higher, weight

    out = _by_chunks(add, chunk, q, spec.q_segments, spec.q_positions, *carry)
    return jax.tree.map(_joined, out)

  sums = (*q.shape[:2], k.shape[2], groups)
  carry = (
    jnp.zeros((*sums, q.shape[3]), jnp.float32),
    jnp.full(sums, _HIDDEN / 10),
    jnp.zeros(sums),
  )
  held = k, v, spec.kv_segments, spec.kv_positions

  def step(state, _):
    carry, held = state
    held = _pass_on(held)
    return (visit(carry, held), held), None

  (carry, _), _ = jax.lax.scan(
    step, (visit(carry, held), held), length=jax.lax.axis_size('sequence') - 1
  )
  total, peak, weight = carry
  weight = jnp.where(weight == 0, 1, weight)
  out = (total / weight[..., None]).reshape(q.shape).astype(q.dtype)
  return out, (q, k, v, spec, out, peak + jnp.log(weight))


def _ring_backward(scale, chunk, saved, d_out):
  q, k, v, spec, out, log_sums = saved
  inner = jnp.sum(out * d_out, axis=-1).reshape(log_sums.shape)

  def visit(d_q, held):
    """Adds to the gradients: the queries' own and those held."""
    k, v, segments, positions, d_k, d_v = held

    def add(q, q_segments, q_positions, d_out, log_sums, inner):
      part = spec.replace(
        q_segments=q_segments,
        q_positions=q_positions,
        kv_segments=segments,
        kv_positions=positions,
      )
      grouped = (*q.shape[:2], k.shape[2], -1, q.shape[3])
      d_out = d_out.reshape(grouped)
      scores = _scores(q, k, part, scale)
      weights = jnp.exp(scores - jnp.einsum('BTKG->BKGT', log_sums)[..., None])
      d_weights = jnp.einsum('BTKGH,BSKH->BKGTS', d_out, v)
      d_scores = weights * (
        d_weights - jnp.einsum('BTKG->BKGT', inner)[..., None]
      )
      return (
        scale * jnp.einsum('BKGTS,BSKH->BTKGH', d_scores, k).reshape(q.shape),
        scale * jnp.einsum('BKGTS,BTKGH->BSKH', d_scores, q.reshape(grouped)),
        jnp.einsum('BKGTS,BTKGH->BSKH', weights, d_out),
      )

    parts = _by_chunks(
      add, chunk, q, spec.q_segments, spec.q_positions, d_out, log_sums, inner
    )
    held = (
      k,
      v,
      segments,
      positions,
      d_k + parts[1].sum(0),
      d_v + parts[2].sum(0),
    )
    return d_q + _joined(parts[0]), held

  def step(state, _):
    d_q, held = state
    return visit(d_q, _pass_on(held)), None

  zeros = jax.tree.map(jnp.zeros_like, (q, k, v))
  held = k, v, spec.kv_segments, spec.kv_positions, *zeros[1:]
  (d_q, held), _ = jax.lax.scan(
    step, visit(zeros[0], held), length=jax.lax.axis_size('sequence') - 1
  )
  # Gradients of keys are one shard short of home.
  d_k, d_v = _pass_on(held[4:])
  return d_q, d_k, d_v, None


_ring.defvjp(_ring_forward, _ring_backward)


def attend_ring(q, k, v, spec, *, scale: float, chunk: int) -> jax.Array:
  """Attention by a ring over the active mesh's axis 'sequence'."""
  sharded = PartitionSpec(None, 'sequence')
  return jax.shard_map(
    functools.partial(_ring, scale=scale, chunk=chunk),
    mesh=partition.active().mesh,
    in_specs=(*[sharded] * 3, jax.tree.map(lambda _: sharded, spec)),
    out_specs=sharded,
    check_vma=False,
  )(q, k, v, spec)


def gradient(attend, mesh, make_mask) -> Callable[..., Any]:
  """Jitted gradient by q, k and v from (q, k, v, segments, positions)."""

  @jax.jit
  def run(q, k, v, segments, positions):
    with partition.use(mesh, rules.named('fsdp').as_dict()):

      def loss(*arrays):
        return jnp.sum(jnp.sin(attend(*arrays, make_mask(segments, positions))))

      return jax.grad(loss, (0, 1, 2))(q, k, v)

  return run


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Compiles and prints."""
  parser = results.parser(__doc__)
  parser.add_argument('--shards', type=int, default=8)
  for name, size in {
    'length': 32768,
    'window': 4096,
    'heads': 8,
    'kv_heads': 4,
    'head_dim': 256,
    'chunk': 256,
  }.items():
    parser.add_argument(f'--{name}', type=int, default=size)
  arguments = parser.parse_args(argv)
  flag = '--xla_force_host_platform_device_count'
  flags = os.environ.get('XLA_FLAGS', '')
  if flag not in flags:  # Read when the first device is asked for.
    os.environ['XLA_FLAGS'] = f'{flags} {flag}={arguments.shards}'
  mesh = mesh_lib.make_mesh(
    mesh_lib.MeshConfig(fsdp=1, sequence=arguments.shards),
    jax.devices('cpu')[: arguments.shards],
  )
  rows = []
  options = {'scale': 1.0, 'chunk': arguments.chunk}
  for name, make_mask in make_masks(arguments.window).items():
    for way, attend in (
      ('gathered', functools.partial(attention.attention, **options)),
      ('ring', functools.partial(attend_ring, **options)),
    ):
      rows.append(
        {'mask': name, 'keys': way}
        | _measure(gradient(attend, mesh, make_mask), mesh, arguments)
      )
  return results.report('sequence_parallel', rows, arguments)


def _measure(run, mesh, arguments) -> dict[str, float]:
  """What a device sends and keeps."""
  sharding = jax.NamedSharding(mesh, PartitionSpec(None, 'sequence'))

  def describe(*shape, dtype=jnp.float32):
    shape = 1, arguments.length, *shape
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  q = describe(arguments.heads, arguments.head_dim)
  k = describe(arguments.kv_heads, arguments.head_dim)
  ids = describe(dtype=jnp.int32)
  start = time.perf_counter()
  compiled = run.lower(q, k, k, ids, ids).compile()
  seconds = time.perf_counter() - start
  sent: dict[str, float] = {}
  others = (arguments.shards - 1) / arguments.shards
  # On CPU all have one channel, by which those cut into parts are told.
  text = re.sub(r'channel_id=\d+, ', '', compiled.as_text())
  for one in hlo.totals(text).collectives.values():
    share = {'collective-permute': 1.0, 'all-reduce': 2 * others}
    size = one.bytes * one.times * share.get(one.kind, others)
    sent[one.kind] = sent.get(one.kind, 0.0) + size / 2**20
  kinds = 'all-gather', 'reduce-scatter', 'all-reduce', 'collective-permute'
  return {
    'sent MiB': sum(sent.values()),
    **{f'of it {kind}': sent.get(kind, 0.0) for kind in kinds},
    'temporary MiB': compiled.memory_analysis().temp_size_in_bytes / 2**20,
    'compile s': seconds,
  }


if __name__ == '__main__':
  main()
