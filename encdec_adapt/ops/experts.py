"""Mixture of experts: routing, its losses, a feed-forward that drops nothing.

Every token goes to its `K` likeliest experts, however many others do: the
pairs of a token and an expert are sorted by expert, and the experts' products
are ragged (`jax.lax.ragged_dot`). XLA has a kernel for them on TPUs; on a CPU
it multiplies every row by every expert.

Where the active partition shards 'experts', each device computes its own
experts for the tokens of its shard of the batch, and a sum over the experts'
mesh axes assembles them. Nothing random, and no sum whose order is open: the
same input gives the same bits.

Letters besides the package's: X experts, K experts of a token.
"""

from collections.abc import Callable
import functools
from typing import Any

import flax.struct
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from encdec_adapt.ops import partition as partition_lib

# The name that the experts' products carry for rematerialisation policies.
PRODUCT = 'expert_product'

Activation = Callable[[jax.Array], jax.Array]


@flax.struct.dataclass
class RouterLosses:
  """Losses of a router: means over the tokens that are not padding, fp32.

  Attributes:
    balance: X sum_e f_e p_e, of the share f_e of assignments that expert e
      gets and its mean probability p_e (Switch Transformer, arXiv 2101.03961,
      equations 4 to 6; 1 where the load is equal). transformers' loss of
      Mixtral and Qwen counts assignments by token, so that it is K times as
      large. Its gradient is that of the probabilities.
    z: the squared log-normaliser of the router (ST-MoE, arXiv 2202.08906,
      equation 5).
  """

  balance: Any
  z: Any


def route(
  logits: Float[Array, 'B L X'],
  real: Bool[Array, 'B L'],
  per_token: int,
  *,
  normalise: bool,
) -> tuple[Int[Array, 'B L K'], Float[Array, 'B L K']]:
  """The experts of each token, and their shares in its output.

  Args:
    logits: of the router, float32.
    real: tokens that are not padding; the others get no expert.
    per_token: K.
    normalise: divide the K probabilities by their sum.

  Returns:
    Numbers of experts, the likeliest first, X (none) for padding; and their
    probabilities, float32.
  """
  shares, chosen = jax.lax.top_k(jax.nn.softmax(logits), per_token)
  if normalise:
    shares = shares / jnp.sum(shares, axis=-1, keepdims=True)
  return jnp.where(real[..., None], chosen, logits.shape[-1]), shares


def losses(
  logits: Float[Array, 'B L X'],
  real: Bool[Array, 'B L'],
  chosen: Int[Array, 'B L K'],
) -> RouterLosses:
  """Losses over the batch, that of all devices together.

  Args:
    logits: of the router, float32.
    real: tokens that are not padding.
    chosen: as `route` gives them.
  """
  experts, per_token = logits.shape[-1], chosen.shape[-1]
  tokens = jnp.maximum(jnp.sum(real.astype(jnp.float32)), 1.0)
  weights = real[..., None] / tokens
  probability = jnp.sum(weights * jax.nn.softmax(logits), axis=(0, 1))
  # Padding's number is X, which is nobody's.
  taken = chosen[..., None] == jnp.arange(experts)
  share = jnp.sum(taken, axis=(0, 1, 2)) / (per_token * tokens)
  log_normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
  return RouterLosses(
    balance=experts * jnp.sum(share * probability),
    z=jnp.sum(weights * jnp.square(log_normaliser)),
  )


def feed_forward(
  x: Float[Array, 'B L D'],
  chosen: Int[Array, 'B L K'],
  shares: Float[Array, 'B L K'],
  gate: Float[Array, 'X D F'],
  up: Float[Array, 'X D F'],
  down: Float[Array, 'X F D'],
  activation: Activation,
) -> Float[Array, 'B L D']:
  """Sum over a token's experts of share * down(activation(gate x) * up x).

  Args:
    x: states.
    chosen: numbers of experts; X for none.
    shares: theirs.
    gate: kernels in the dtype of `x`, sharded over 'experts'.
    up: as `gate`.
    down: as `gate`.
    activation: elementwise.

  Returns:
    In the dtype of `x`, sharded as ('batch', 'length', None).

  Raises:
    ValueError: shapes do not divide over the mesh.
  """
  partition = partition_lib.active()
  tokens: tuple[str, ...] = ()
  owners: tuple[str, ...] = ()
  if partition is not None:
    tokens = partition.mesh_axes('batch') + partition.mesh_axes('length')
    # Experts that are sharded over the tokens' own axes are gathered there,
    # as weights are.
    owners = tuple(a for a in partition.mesh_axes('experts') if a not in tokens)
  on_device = functools.partial(
    _on_device, activation=activation, tokens=tokens, owners=owners
  )
  if partition is None:
    return on_device(x, chosen, shares, gate, up, down)
  _check(partition, x.shape, gate.shape[0])
  of_token = partition.spec('batch', 'length', None)
  of_expert = jax.sharding.PartitionSpec(owners or None)
  return jax.shard_map(
    on_device,
    mesh=partition.mesh,
    in_specs=(of_token,) * 3 + (of_expert,) * 3,
    out_specs=of_token,
  )(x, chosen, shares, gate, up, down)


def _check(
  partition: partition_lib.Partition, shape: tuple[int, ...], experts: int
) -> None:
  sizes = {'batch': shape[0], 'length': shape[1], 'experts': experts}
  for name, size in sizes.items():
    if size % partition.size(name):
      raise ValueError(
        f'{name} of size {size} does not divide over mesh axes'
        f' {partition.mesh_axes(name)} of {partition.size(name)} devices'
      )


def _on_device(
  x: jax.Array,
  chosen: jax.Array,
  shares: jax.Array,
  gate: jax.Array,
  up: jax.Array,
  down: jax.Array,
  *,
  activation: Activation,
  tokens: tuple[str, ...],
  owners: tuple[str, ...],
) -> jax.Array:
  """`feed_forward` as seen by one device: its tokens, its experts.

  `tokens` and `owners` are the mesh axes over which each of them differ.
  """
  # Said, because the derivative of `_permute` cannot infer it.
  x, chosen, shares = (_vary(a, owners) for a in (x, chosen, shares))
  gate, up, down = (_vary(a, tokens) for a in (gate, up, down))
  experts, per_token = gate.shape[0], chosen.shape[-1]
  first = jax.lax.axis_index(owners) * experts if owners else 0
  expert = chosen.reshape(-1) - first
  mine = (expert >= 0) & (expert < experts)
  expert = jnp.where(mine, expert, experts)  # The others' are sorted last.
  order = jnp.argsort(expert)
  back = jnp.argsort(order)
  sizes = jnp.sum(expert[:, None] == jnp.arange(experts), axis=0)
  # What a ragged product makes of rows beyond its groups is not defined.
  inside = (jnp.arange(len(expert)) < jnp.sum(sizes))[:, None]

  def product(rows: jax.Array, kernels: jax.Array) -> jax.Array:
    made = jax.lax.ragged_dot(rows, kernels, sizes.astype(jnp.int32))
    return checkpoint_name(made, PRODUCT)

  pairs = jnp.repeat(x.reshape(-1, x.shape[-1]), per_token, axis=0)
  rows = jnp.where(inside, _permute(pairs, order, back), 0)
  hidden = activation(product(rows, gate)) * product(rows, up)
  rows = jnp.where(inside, product(hidden, down), 0)
  pairs = _permute(rows, back, order).reshape(*chosen.shape, x.shape[-1])
  out = jnp.einsum(
    'BLKD,BLK->BLD',
    pairs,
    shares.astype(x.dtype),
    preferred_element_type=jnp.float32,
  ).astype(x.dtype)
  return jax.lax.psum(out, owners) if owners else out


def _vary(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
  """The same array, told that it may differ over these mesh axes too."""
  return jax.lax.pcast(x, axes, to='varying') if axes else x


@jax.custom_vjp
def _permute(x: jax.Array, order: jax.Array, back: jax.Array) -> jax.Array:
  """Rows in another order; `back` undoes `order`.

  The derivative of indexing adds rows up one by one, in any order on a GPU.
  That of a permutation is a permutation.
  """
  del back
  return x.at[order].get(unique_indices=True, mode='promise_in_bounds')


def _permute_forward(x: jax.Array, order: jax.Array, back: jax.Array):
  return _permute(x, order, back), (order, back)


def _permute_backward(residuals, cotangent: jax.Array):
  order, back = residuals
  return _permute(cotangent, back, order), None, None


_permute.defvjp(_permute_forward, _permute_backward)
