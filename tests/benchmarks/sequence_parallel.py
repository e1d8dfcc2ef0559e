"""Bytes that attention sends over devices that shard the length, by mask.

One attention of Gemma 2 2B's heads, forward and backward, compiled for fake
devices and not run: the bytes that a device sends, by kind of collective, and
the temporary memory of its program.
"""

from collections.abc import Sequence
import os
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from encdec_adapt.ops import attention, partition
from encdec_adapt.planning import hlo
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import rules
from tests.benchmarks import gpu_kernels, results


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Compiles and prints."""
  arguments = results.parser(
    __doc__,
    shards=8,
    batch=1,
    length=32768,
    window=4096,
    heads=8,
    kv_heads=4,
    head_dim=256,
    chunk=256,
  ).parse_args(argv)
  flag = '--xla_force_host_platform_device_count'
  flags = os.environ.get('XLA_FLAGS', '')
  if flag not in flags:  # Read when the first device is asked for.
    os.environ['XLA_FLAGS'] = f'{flags} {flag}={arguments.shards}'
  mesh = mesh_lib.make_mesh(
    mesh_lib.MeshConfig(fsdp=1, sequence=arguments.shards),
    jax.devices('cpu')[: arguments.shards],
  )
  masks = gpu_kernels.make_masks(arguments, examples=1)
  rows = [
    {'mask': name} | _measure(masks[name], mesh, arguments)
    for name in ('full', 'causal', 'full exclusive window')
  ]
  return results.report('sequence_parallel', rows, arguments)


def _measure(spec, mesh, arguments) -> dict[str, float]:
  """Returns what a device sends and keeps for an attention's gradient."""

  @jax.jit
  def run(q, k, v, spec):
    """Returns the gradient by q, k and v."""

    def loss(*arrays):
      out = attention.attention(*arrays, spec, scale=1.0, chunk=arguments.chunk)
      return jnp.sum(jnp.sin(out))

    with partition.use(mesh, rules.named('fsdp').as_dict()):
      return jax.grad(loss, (0, 1, 2))(q, k, v)

  sharding = jax.NamedSharding(mesh, PartitionSpec(None, 'sequence'))

  def describe(*shape, dtype=jnp.float32):
    shape = 1, arguments.length, *shape
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  q = describe(arguments.heads, arguments.head_dim)
  k = describe(arguments.kv_heads, arguments.head_dim)
  spec = jax.tree.map(lambda ids: describe(dtype=ids.dtype), spec)
  compiled = run.lower(q, k, k, spec).compile()
  sent: dict[str, float] = {}
  others = (arguments.shards - 1) / arguments.shards
  # On CPU all collectives have one channel, and `hlo.totals` would take them
  # for parts of one.
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
  }


if __name__ == '__main__':
  main()
