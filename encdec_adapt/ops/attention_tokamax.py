"""Attention on Hopper and Blackwell GPUs: tokamax's Mosaic kernels.

Gradients of wide heads are computed by XLA (`attention_gradients`).

The kernels mask by a range of keys for each query. Packed rows, causal masks,
prefixes, windows and cross-attention are such ranges wherever the tokens of a
segment are neighbours in order of their positions; the memory of merged
attention would be a second range. On a mesh the kernels run under
`attention_shards`, with the ranges of the shard's mask.

tokamax (extra `gpu`) needs Python 3.12; see `load`.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import backend
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from encdec_adapt.ops import (
  attention_gradients,
  attention_shards,
  attention_tiles,
  masks,
  partition,
)

# Largest head dimension of the kernels' backward pass. With 256 the sums of a
# block of gradients do not fit in the registers; XLA's products are faster
# (tests/benchmarks/README.md).
KERNEL_HEAD_DIM = 128


@dataclasses.dataclass(frozen=True)
class _Call:
  """What does not change within a program.

  Attributes:
    op: attention of tokamax, with its backward pass `op.vjp`.
    causal: whether ranges end at the query itself. The kernels then skip the
      blocks of later keys in the backward pass too, where they ignore ranges
      until they have computed the scores.
    scale: factor of the scores.
    softcap: cap of the scores.
    device: device of the mesh; None without a mesh.
  """

  op: Any
  causal: bool
  scale: float
  softcap: float | None
  device: jax.Device | None

  def bind(self, q, k, v, first, last) -> Any:
    """Returns tokamax's arguments of an attention."""
    from tokamax._src.ops.attention import base

    ranges = {'k_start': first} | ({} if self.causal else {'k_end': last})
    mask = base.Mask(**ranges, is_causal=self.causal)
    options = dict(logits_scale=self.scale, logits_soft_cap=self.softcap)
    return self.op.bind(q, k, v, mask=mask, return_residuals=True, **options)

  @contextlib.contextmanager
  def choices(self) -> Iterator[None]:
    """Makes tokamax choose kernels for the mesh's device, by its heuristics.

    It asks for JAX's default device, which is not the one that a program is
    compiled for ahead of time; and it looks for timings of every shape, of
    which it has none for attention, and warns of each.
    """
    from tokamax import config

    default = backend.get_default_device
    if self.device is not None:
      backend.get_default_device = lambda: self.device
    try:
      with config.ignore_autotuning_cache(True):
        yield
    finally:
      backend.get_default_device = default


def load() -> None:
  """Imports tokamax if it is installed, before any program is traced.

  tokamax adds values to JAX's context, which is a part of the key of every
  program: a step that was traced before would be compiled again when it is
  called for the second time.
  """
  with contextlib.suppress(ImportError):
    from tokamax._src.ops.attention import pallas_mosaic_gpu  # noqa: F401


def attend(
  q: Float[Array, 'B T N H'],
  k: Float[Array, 'B S K H'],
  v: Float[Array, 'B S K H'],
  spec: masks.MaskSpec,
  *,
  scale: float,
  softcap: float | None,
  op: Any = None,
) -> Float[Array, 'B T N H']:
  """Attention by tokamax's kernels; see `attention.attention`.

  Args:
    q: queries.
    k: keys.
    v: values.
    spec: a mask that is aligned, or a full one without a window.
    scale: factor of the scores.
    softcap: cap of the scores.
    op: attention of tokamax instead of its GPU kernels.

  Raises:
    ValueError: heads or lengths do not divide over the active mesh.
  """
  if op is None:
    from tokamax._src.ops.attention import pallas_mosaic_gpu

    op = pallas_mosaic_gpu.PallasMosaicGpuFlashAttention()
  device = partition.active().device

  def local(q, k, v, spec):
    # Not aligned where keys are gathered: they have other indices than queries.
    causal = spec.aligned and spec.kind == 'causal'
    call = _Call(op, causal, scale, softcap, device)
    first, last = key_ranges(spec)
    return _flash(q, k, v, spec, first[:, None], last[:, None], call)

  out = attention_shards.run(local, q, k, v, spec)
  return masks.zero_queries_without_keys(out, spec)


def key_ranges(
  spec: masks.MaskSpec,
) -> tuple[Int[Array, 'B T'], Int[Array, 'B T']]:
  """Returns the keys that each query sees as a range of indices.

  Args:
    spec: a mask that is aligned, or was until keys were gathered from other
      shards; or a full one without a window.

  Returns:
    The first key, and the key after the last. A query that sees none has the
    range of a single key, near it: the kernels are not made for ranges without
    keys.
  """
  visible = masks.dense_mask(spec)  # Only inside the fused reductions.
  queries, keys = visible.shape[1:]
  index = jnp.arange(keys, dtype=jnp.int32)
  first = jnp.min(jnp.where(visible, index, keys), axis=-1)
  last = jnp.max(jnp.where(visible, index + 1, 0), axis=-1)
  sees = last > 0
  near = jnp.minimum(jnp.arange(queries, dtype=jnp.int32), keys - 1)
  return jnp.where(sees, first, near), jnp.where(sees, last, near + 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _flash(q, k, v, spec, first, last, call: _Call):
  """Returns the output [B, T, N, H]; ranges of keys are [B, 1, T]."""
  return _forward(q, k, v, spec, first, last, call)[0]


def _forward(q, k, v, spec, first, last, call):
  bound = call.bind(q, k, v, first, last)
  with call.choices():
    results = call.op(*bound.args, **bound.kwargs)
  # Named here, where a policy can save both: with tokamax's own derivative
  # rule the forward kernel would run again for the softmax's sums.
  out, sums = jax.tree.map(
    lambda x: checkpoint_name(x, attention_shards.SAVED), results
  )
  return out, (q, k, v, spec, first, last, out, sums)


def _backward(call, saved, d_out):
  q, k, v, spec, *ranges, out, sums = saved
  if q.shape[-1] > KERNEL_HEAD_DIM:
    maxima, totals = sums
    log_sums = jnp.moveaxis(maxima + jnp.log(totals), 1, 2)
    tiling = attention_tiles.Tiling(
      attention_gradients.SIZE, call.scale, call.softcap
    )
    *d_qkv, _ = attention_gradients.gradients(
      q, k, v, spec, None, out, log_sums, d_out, tiling
    )
    return *d_qkv, None, None, None
  bound = call.bind(q, k, v, *ranges)
  options = bound.kwargs | {'return_residuals': False}
  with call.choices():
    gradients = call.op.vjp(sums, out, d_out, *bound.args, **options)
  return *(gradients[name] for name in 'qkv'), None, None, None


_flash.defvjp(_forward, _backward)
