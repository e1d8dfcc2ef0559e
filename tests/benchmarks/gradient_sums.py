"""How a TPU's compiler sums gradients of sharded weights, by rules and mesh.

One feed-forward layer, its tokens over all chips, forward and backward in
bfloat16: what a chip sends to sum the gradients of one microbatch, as a ratio
to the least, which is a reduce-scatter among the chips that share a copy and a
sum of the parts between copies.

    python -m tests.benchmarks.gradient_sums [--topologies v5e:4x4 v5p:4x4x4]
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from encdec_adapt.ops import partition
from encdec_adapt.planner import chips, hlo, roofline
from encdec_adapt.sharding import compiler
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import rules as rules_lib
from tests.benchmarks import results

_SUMS = ('all-reduce', 'reduce-scatter')
_BFLOAT16 = 2  # Bytes.
_AXES = ('embed', 'mlp')


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
  """Compiles and prints."""
  arguments = results.parser(
    __doc__,
    topologies=['v5e:2x4', 'v5e:4x4', 'v5p:4x4x4'],
    width=2304,
    mlp_width=9216,
    tokens=4096,  # Of a chip.
  ).parse_args(argv)
  rows = [
    _measure(chips.parse(topology), replica, rules, arguments)
    for topology in arguments.topologies
    for replica, rules in ((1, 'fsdp'), (2, 'fsdp'), (2, 'whole_slice'))
  ]
  return results.report('gradient_sums', rows, arguments)


def _measure(
  where: chips.Slice, replica: int, name: str, arguments
) -> dict[str, Any]:
  """One mesh: kinds of the sums, what they send, and the least."""
  sizes = mesh_lib.MeshConfig(replica=replica, fsdp=where.devices // replica)
  mesh = mesh_lib.make_mesh(sizes, chips.devices_of(where))
  rules = rules_lib.RULES[name]

  def describe(shape, *axes):
    """An array on the mesh, by its logical axes."""
    place = NamedSharding(mesh, rules.on(mesh).spec(*axes))
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place)

  tokens = describe(
    (arguments.tokens * where.devices, arguments.width), 'batch', None
  )
  weight = describe((arguments.width, arguments.mlp_width), *_AXES)

  def loss(weights, tokens):
    """Reads two weights, the second from the other side."""
    first, second = (
      partition.sum_gradient_in_stages(weight, *_AXES) for weight in weights
    )
    inner = jnp.tanh(tokens @ first)
    return jnp.sum((inner @ second.T).astype(jnp.float32) ** 2)

  def gradients(tokens, *weights):
    """Those of the weights."""
    with partition.use(mesh, rules.as_dict()):
      return jax.grad(loss)(weights, tokens)

  run = jax.jit(
    gradients,
    out_shardings=(weight.sharding,) * 2,
    compiler_options=compiler.options(mesh),
  )
  with jax.set_mesh(mesh):
    lowered = run.trace(tokens, weight, weight).lower(
      lowering_platforms=('tpu',)
    )
    totals = hlo.totals(lowered.compile().as_text())
  network, sent, kinds = roofline.Network(mesh, where), 0.0, set()
  for one in totals.collectives.values():
    if one.kind in _SUMS and one.bytes > 8:  # Not the loss itself.
      kinds.add(one.kind)
      sent += network.cost(one)[1] * one.times
  size = 2 * arguments.width * arguments.mlp_width * _BFLOAT16
  copies = 1 if 'replica' in rules.embed else replica
  sharing = where.devices / copies
  least = size * (sharing - 1) / sharing
  least += 2 * size / sharing * (copies - 1) / copies
  return {
    'chips': where.name,
    'rules': name,
    'replica': replica,
    'sums': ' + '.join(sorted(kinds)),
    'sent MiB': sent / 2**20,
    'of the least': sent / least,
  }


if __name__ == '__main__':
  main()
