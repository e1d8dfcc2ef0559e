"""Mixture of experts: routing, router losses, and a dropless feed-forward.

Every token goes to its `K` most probable experts, without a capacity limit:
(token, expert) pairs are sorted by expert and multiplied with ragged matmuls
(`jax.lax.ragged_dot`). XLA has a kernel for them on TPUs; on CPUs it multiplies
every row by every expert.

If the active partition shards 'experts', each device computes its experts for
its shard of the batch, and a psum over the experts' mesh axes combines the
results. Nothing is random and every sum has a defined order, so results are
bitwise reproducible.

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

from encdec_adapt.ops import partition

# Checkpoint name of the experts' products, for rematerialisation policies.
PRODUCT = 'expert_product'

Activation = Callable[[jax.Array], jax.Array]


@flax.struct.dataclass
class RouterLosses:
  """Router losses: fp32 means over all tokens except padding.

  Attributes:
    balance: X sum_e f_e p_e, where f_e is the fraction of assignments to expert
      e and p_e its mean probability (Switch Transformer, arXiv 2101.03961,
      equations 4 to 6; 1 for equal load). The loss of Mixtral and Qwen in
      transformers counts assignments per token and is K times as large. Only
      the probabilities have a gradient.
    z: squared log-normaliser of the router (ST-MoE, arXiv 2202.08906,
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
  """Chooses the experts of each token and their weights in its output.

  Args:
    logits: router logits, float32.
    real: False for padding, which gets no expert.
    per_token: number K of experts per token.
    normalise: whether to divide the K probabilities by their sum.

  Returns:
    Expert ids, most probable first (X, an invalid id, for padding), and their
    float32 probabilities.
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
  """Computes the router losses of the global batch.

  Args:
    logits: router logits, float32.
    real: False for padding.
    chosen: expert ids from `route`.
  """
  experts, per_token = logits.shape[-1], chosen.shape[-1]
  tokens = jnp.maximum(jnp.sum(real.astype(jnp.float32)), 1.0)
  weights = real[..., None] / tokens
  probability = jnp.sum(weights * jax.nn.softmax(logits), axis=(0, 1))
  # X, the id of padding, matches no expert.
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
  """Computes sum_experts share * down(activation(gate x) * up x) per token.

  Args:
    x: states.
    chosen: expert ids; X for no expert.
    shares: weight of each chosen expert.
    gate: kernels in the dtype of `x`, sharded over 'experts'.
    up: kernels like `gate`.
    down: kernels like `gate`.
    activation: elementwise function.

  Returns:
    The sum in the dtype of `x`, sharded as ('batch', 'length', None).

  Raises:
    ValueError: shapes are not divisible over the mesh.
  """
  active = partition.active()
  # Experts sharded over token axes are gathered there, as FSDP gathers weights.
  owners = active.only(['experts'], partition.TOKENS)
  on_device = functools.partial(
    _on_device,
    activation=activation,
    tokens=active.mesh_axes(*partition.TOKENS),
    owners=owners,
  )
  if active.mesh is None:
    return on_device(x, chosen, shares, gate, up, down)
  active.check('states', x.shape[:2], partition.TOKENS)
  active.check('experts', gate.shape[:1], ['experts'])
  of_token = active.spec(*partition.TOKENS, None)
  of_expert = jax.sharding.PartitionSpec(owners or None)
  return jax.shard_map(
    on_device,
    mesh=active.mesh,
    in_specs=(of_token,) * 3 + (of_expert,) * 3,
    out_specs=of_token,
  )(x, chosen, shares, gate, up, down)


def _on_device(
  x, chosen, shares, gate, up, down, *, activation, tokens, owners
):
  """Computes `feed_forward` for a device's tokens and experts.

  `tokens` and `owners` are the mesh axes of tokens and experts.
  """
  # Declared explicitly: the derivative of `_permute` cannot infer it.
  x, chosen, shares = (_vary(a, owners) for a in (x, chosen, shares))
  gate, up, down = (_vary(a, tokens) for a in (gate, up, down))
  experts, per_token = gate.shape[0], chosen.shape[-1]
  first = jax.lax.axis_index(owners) * experts if owners else 0
  expert = chosen.reshape(-1) - first
  is_local = (expert >= 0) & (expert < experts)
  # Pairs with other devices' experts and padding sort last.
  expert = jnp.where(is_local, expert, experts)
  order = jnp.argsort(expert)
  inverse = jnp.argsort(order)
  sizes = jnp.sum(expert[:, None] == jnp.arange(experts), axis=0)
  # A ragged product leaves rows beyond its groups undefined.
  in_group = (jnp.arange(len(expert)) < jnp.sum(sizes))[:, None]

  def product(rows: jax.Array, kernels: jax.Array) -> jax.Array:
    products = jax.lax.ragged_dot(rows, kernels, sizes.astype(jnp.int32))
    return checkpoint_name(products, PRODUCT)

  pairs = jnp.repeat(x.reshape(-1, x.shape[-1]), per_token, axis=0)
  # Masked before and after the products: the backward pass leaves the gradients
  # of such rows undefined too.
  rows = jnp.where(in_group, _permute(pairs, order, inverse), 0)
  hidden = activation(product(rows, gate)) * product(rows, up)
  rows = jnp.where(in_group, product(hidden, down), 0)
  pairs = _permute(rows, inverse, order).reshape(*chosen.shape, x.shape[-1])
  out = jnp.einsum(
    'BLKD,BLK->BLD',
    pairs,
    shares.astype(x.dtype),
    preferred_element_type=jnp.float32,
  ).astype(x.dtype)
  return jax.lax.psum(out, owners) if owners else out


def _vary(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
  return jax.lax.pcast(x, axes, to='varying') if axes else x


@jax.custom_vjp
def _permute(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
  # Custom derivative, a permutation: indexing would differentiate to a
  # scatter-add, whose order is undefined on GPUs.
  del inverse
  return x.at[order].get(unique_indices=True, mode='promise_in_bounds')


def _permute_forward(x: jax.Array, order: jax.Array, inverse: jax.Array):
  return _permute(x, order, inverse), (order, inverse)


def _permute_backward(residuals, cotangent: jax.Array):
  order, inverse = residuals
  return _permute(cotangent, inverse, order), None, None


_permute.defvjp(_permute_forward, _permute_backward)
