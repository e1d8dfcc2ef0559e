"""Attention: one function, several backends, no silent substitution.

A backend declares its limits as data (`Backend`). `attention` derives the
needs of a call from its arguments and refuses a backend that does not support
all of them. To add a kernel, write
`attend(q, k, v, spec, *, scale, softcap[, chunk])` in a new module and
add a `Backend` to `BACKENDS`; the tests run over all backends.

Pallas's Triton lowering, which the backend 'triton' uses, is deprecated since
jax 0.11 and warns in 0.12; its announced successor is tokamax. A tokamax
backend would declare `platforms={'gpu'}`, `unaligned=False` (it masks by index,
which equals masking by position only where `MaskSpec.aligned` holds),
`memory=False`, and its limits on dtypes and head dimension. It supports
segments: its per-query ranges of keys ([first, last) of each query) express
packed rows, causal masks and windows at once, because the segments of an
aligned row are contiguous. It sets `kernels=True` and runs its kernels under
`attention_shards.run`, with ranges computed from the shard's `MaskSpec`.
"""

from collections.abc import Callable
import dataclasses
import functools

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from encdec_adapt.ops import (
  attention_chunked,
  attention_reference,
  attention_shards,
  attention_splash,
  attention_triton,
  masks,
  partition,
)

PLATFORMS = frozenset({'cpu', 'gpu', 'tpu'})
DEFAULT_CHUNK = 256
# Checkpoint name of the values that a rematerialisation policy keeps so that
# attention is not run again: outputs, and the normalisers of kernels.
SAVED = attention_shards.SAVED


@dataclasses.dataclass(frozen=True)
class Backend:
  """An implementation and its limits; by default it has none.

  Every backend supports segments, causal and full masks, windows and
  soft-capped scores; a backend without them would need a new field here.

  Attributes:
    attend: the function, with the signature in the module docstring.
    takes_chunk: whether `attend` has the argument `chunk`.
    kernels: whether it consists of custom kernels. Such a backend calls
      `attention_shards.run` itself on every mesh, names the results that
      rematerialisation keeps (`SAVED`), and is not used for the few queries
      of a decoding step.
    memory: keys that have no position (`MaskSpec.memory`).
    prefix: masks of kind 'prefix'.
    unaligned: masks in which positions are not indices (`MaskSpec.aligned`).
    dtypes: supported dtypes of q, k and v, by name.
    max_head_dim: largest head dimension; None for no limit.
    platforms: platforms that it runs on.
  """

  attend: Callable[..., jax.Array]
  takes_chunk: bool = False
  kernels: bool = False
  memory: bool = True
  prefix: bool = True
  unaligned: bool = True
  dtypes: frozenset[str] = frozenset({'float32', 'bfloat16', 'float16'})
  max_head_dim: int | None = None
  platforms: frozenset[str] = PLATFORMS


BACKENDS: dict[str, Backend] = {
  'reference': Backend(attention_reference.attend),
  'chunked': Backend(attention_chunked.attend, takes_chunk=True),
  'splash': Backend(
    attention_splash.attend,
    kernels=True,
    memory=False,
    prefix=False,
    unaligned=False,
    dtypes=frozenset({'float32', 'bfloat16'}),
    platforms=frozenset({'tpu'}),
  ),
  'triton': Backend(
    attention_triton.attend,
    kernels=True,
    prefix=False,
    max_head_dim=attention_triton.MAX_HEAD_DIM,
    platforms=frozenset({'gpu'}),
  ),
}


def on_platform(platform: str) -> list[str]:
  """Returns the backends that run on a platform ('cpu', 'gpu', 'tpu')."""
  return sorted(
    name for name, backend in BACKENDS.items() if platform in backend.platforms
  )


def unsupported(
  backend: Backend, q: Float[Array, 'B T N H'], spec: masks.MaskSpec
) -> list[str]:
  """Names the features of a call that a backend does not support."""
  dtype, head_dim = q.dtype.name, q.shape[3]
  # Shapes are inferred before the distributed runtime starts, and asking for
  # the platform initialises the devices: ask only where it matters.
  portable = backend.platforms == PLATFORMS
  platform = None
  if not portable:
    # The mesh comes first: programs are compiled ahead of time for platforms
    # that this machine does not have.
    platform = partition.active().platform or jax.default_backend()
  checks = {
    f'{spec.memory} keys without a position': (
      not spec.memory or backend.memory
    ),
    'a bidirectional prefix': spec.kind != 'prefix' or backend.prefix,
    'positions that are not indices': (
      not spec.needs_positions or spec.aligned or backend.unaligned
    ),
    f'dtype {dtype}': dtype in backend.dtypes,
    f'a head dimension of {head_dim}': (
      head_dim <= (backend.max_head_dim or head_dim)
    ),
    f'platform {platform!r}': portable or platform in backend.platforms,
  }
  return [feature for feature, honoured in checks.items() if not honoured]


def attention(
  q: Float[Array, 'B T N H'],
  k: Float[Array, 'B S K H'],
  v: Float[Array, 'B S K H'],
  spec: masks.MaskSpec,
  *,
  scale: float,
  softcap: float | None = None,
  backend: str = 'chunked',
  chunk: int = DEFAULT_CHUNK,
) -> Float[Array, 'B T N H']:
  """Computes masked, soft-capped, grouped-query attention.

  Scores and softmax are fp32; both products take their operands in the input
  dtype and accumulate in fp32. Query head n reads key/value head n // (N/K).

  Args:
    q: queries.
    k: keys; N is a multiple of K.
    v: values.
    spec: the mask; queries that see no key give zeros.
    scale: factor of the scores, applied before the soft-cap.
    softcap: positive cap of the scores; None for no cap.
    backend: a key of `BACKENDS`.
    chunk: queries per chunk, at least 1; only chunked backends use it.

  Returns:
    Weighted sums of the values [B, T, N, H] in the dtype of `q`.

  Raises:
    ValueError: the backend cannot honour the call.
  """
  chosen = BACKENDS[backend]
  refused = unsupported(chosen, q, spec)
  if refused:
    able = sorted(
      name
      for name, candidate in BACKENDS.items()
      if not unsupported(candidate, q, spec)
    )
    raise ValueError(
      f'attention backend {backend!r} cannot honour {"; ".join(refused)}.'
      f' Backends that can: {", ".join(able) or "none"}'
    )
  options = {'chunk': chunk} if chosen.takes_chunk else {}
  attend = functools.partial(
    chosen.attend, scale=scale, softcap=softcap, **options
  )
  with jax.named_scope(f'attention_{backend}'):
    if chosen.kernels:
      # It names its output itself, inside its derivative rule: a name out here
      # would save the output and still run the kernel again for its sums.
      return attend(q, k, v, spec)
    if partition.active().size('length') > 1:
      # Otherwise XLA would run each chunk on the shard that holds its queries
      # while the other shards wait.
      attend = functools.partial(attention_shards.run, attend)
    return checkpoint_name(attend(q, k, v, spec), SAVED)
