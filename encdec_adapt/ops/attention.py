"""Attention: one function, several backends, no silent substitution.

Each backend states as data what it honours (`Capabilities`). `attention`
works out from its arguments what is asked for, and refuses where the chosen
backend does not honour all of it. To add a kernel: write
`attend(q, k, v, spec, *, scale, softcap[, chunk])` in a module of its own
and add a `Backend` to `BACKENDS`; the tests run over all of them.
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
# Name of what a rematerialisation policy keeps so that attention is not run
# again: the output, and of kernels also their normalisers.
SAVED = attention_shards.SAVED


@dataclasses.dataclass(frozen=True)
class Capabilities:
  """What a backend honours; whatever is absent is refused.

  Attributes:
    masks: masks by name, as `mask_name` gives them.
    segments: segment ids, so packed rows and padding; a backend without them
      is given masks that have none.
    softcap: soft-capped scores.
    grouped_heads: fewer key/value heads than query heads.
    cross_lengths: T different from S.
    memory: keys that have no position (`MaskSpec.memory`).
    unaligned: masks in which positions are not indices
      (`MaskSpec.aligned`).
    dtypes: dtypes of q, k and v by name.
    head_multiple: the head dimension must be a multiple of it.
    max_head_dim: and not greater than this; None for no limit.
    platforms: platforms that it runs on.
  """

  masks: frozenset[str]
  segments: bool
  softcap: bool
  grouped_heads: bool
  cross_lengths: bool
  memory: bool
  unaligned: bool
  dtypes: frozenset[str]
  head_multiple: int
  max_head_dim: int | None
  platforms: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Backend:
  """An implementation and what it honours.

  Attributes:
    attend: the function, called as the module docstring says.
    capabilities: what it honours.
    takes_chunk: whether `attend` has the argument `chunk`.
    kernels: whether it is made of kernels, which go through
      `attention_shards` on every mesh, name what is to be kept `SAVED`
      themselves, and are no work for the few queries of a decoding step.
  """

  attend: Callable[..., jax.Array]
  capabilities: Capabilities
  takes_chunk: bool = False
  kernels: bool = False


ALL_MASKS = frozenset(
  {
    'causal',
    'causal window',
    'full',
    'full exclusive window',
    'full inclusive window',
    'full centered window',
  }
)
_XLA = Capabilities(
  masks=ALL_MASKS,
  segments=True,
  softcap=True,
  grouped_heads=True,
  cross_lengths=True,
  memory=True,
  unaligned=True,
  dtypes=frozenset({'float32', 'bfloat16', 'float16'}),
  head_multiple=1,
  max_head_dim=None,
  platforms=PLATFORMS,
)
BACKENDS: dict[str, Backend] = {
  'reference': Backend(attention_reference.attend, _XLA),
  'chunked': Backend(attention_chunked.attend, _XLA, takes_chunk=True),
  'splash': Backend(
    attention_splash.attend,
    dataclasses.replace(
      _XLA,
      memory=False,
      unaligned=False,
      dtypes=frozenset({'float32', 'bfloat16'}),
      platforms=frozenset({'tpu'}),
    ),
    kernels=True,
  ),
  'triton': Backend(
    attention_triton.attend,
    dataclasses.replace(
      _XLA,
      max_head_dim=attention_triton.MAX_HEAD_DIM,
      platforms=frozenset({'gpu'}),
    ),
    kernels=True,
  ),
}


def on_platform(platform: str) -> list[str]:
  """Names of the backends that run on a platform ('cpu', 'gpu', 'tpu')."""
  return sorted(
    name
    for name, backend in BACKENDS.items()
    if platform in backend.capabilities.platforms
  )


def mask_name(spec: masks.MaskSpec) -> str:
  """Name of the mask in `Capabilities.masks`."""
  if spec.window is None:
    return spec.kind
  if spec.kind == 'causal':
    return 'causal window'
  return f'full {spec.window_rule} window'


def unsupported(
  capabilities: Capabilities,
  q: Float[Array, 'B T N H'],
  k: Float[Array, 'B S K H'],
  spec: masks.MaskSpec,
  softcap: float | None,
) -> list[str]:
  """What of a call a backend with these capabilities cannot honour."""
  name, dtype, head_dim = mask_name(spec), q.dtype.name, q.shape[3]
  # Shapes are inferred before jax knows its devices: only who has to asks.
  anywhere = capabilities.platforms == PLATFORMS
  platform = None if anywhere else _platform()
  checks = {
    f'a {name!r} mask': name in capabilities.masks,
    'segment ids (packed rows, padding)': (
      not spec.has_segments or capabilities.segments
    ),
    f'a soft-cap ({softcap})': softcap is None or capabilities.softcap,
    f'{q.shape[2]} query heads on {k.shape[2]} key/value heads': (
      q.shape[2] == k.shape[2] or capabilities.grouped_heads
    ),
    f'{q.shape[1]} queries on {k.shape[1]} keys': (
      q.shape[1] == k.shape[1] or capabilities.cross_lengths
    ),
    f'{spec.memory} keys without a position': (
      not spec.memory or capabilities.memory
    ),
    'positions that are not indices': (
      not spec.needs_positions or spec.aligned or capabilities.unaligned
    ),
    f'dtype {dtype}': dtype in capabilities.dtypes,
    f'a head dimension of {head_dim}': (
      head_dim % capabilities.head_multiple == 0
      and head_dim <= (capabilities.max_head_dim or head_dim)
    ),
    f'platform {platform!r}': anywhere or platform in capabilities.platforms,
  }
  return [what for what, honoured in checks.items() if not honoured]


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
  """Masked, soft-capped, grouped-query attention.

  Scores and softmax are fp32; both products take their operands in the input
  dtype and accumulate in fp32. Query head n reads key/value head n // (N/K).

  Args:
    q: queries.
    k: keys; N is a multiple of K.
    v: values.
    spec: who sees whom; rows that see no key give zeros.
    scale: factor of the scores, before the soft-cap.
    softcap: cap of the scores, positive; None for no cap.
    backend: a key of `BACKENDS`.
    chunk: queries per chunk, for the backends that work by chunks.

  Returns:
    Weighted values per query head, in the dtype of `q`.

  Raises:
    ValueError: the backend is unknown or cannot honour the call, or the
      arguments do not fit each other.
  """
  if backend not in BACKENDS:
    raise ValueError(
      f'unknown attention backend {backend!r}; choose one of'
      f' {", ".join(sorted(BACKENDS))}'
    )
  _check(q, k, v, spec, softcap, chunk)
  chosen = BACKENDS[backend]
  refused = unsupported(chosen.capabilities, q, k, spec, softcap)
  if refused:
    able = sorted(
      name
      for name, other in BACKENDS.items()
      if not unsupported(other.capabilities, q, k, spec, softcap)
    )
    raise ValueError(
      f'attention backend {backend!r} cannot honour {"; ".join(refused)}.'
      f' Backends that can: {", ".join(able) or "none"}'
    )
  if chosen.capabilities.segments:
    spec = masks.with_segments(spec, q.shape[0], q.shape[1], k.shape[1])
  options = {'chunk': chunk} if chosen.takes_chunk else {}
  attend = functools.partial(
    chosen.attend, scale=scale, softcap=softcap, **options
  )
  with jax.named_scope(f'attention_{backend}'):
    if chosen.kernels:
      return attend(q, k, v, spec)
    if attention_shards.Shards.active().length > 1:
      # XLA by itself would run a chunk of queries where they are, while the
      # other shards wait.
      out = attention_shards.run(attend, q, k, v, spec)
    else:
      out = attend(q, k, v, spec)
  return checkpoint_name(out, SAVED)


def _check(q, k, v, spec, softcap, chunk) -> None:
  """Raises ValueError where the arguments do not fit each other."""
  masks.check(spec, q.shape[0], q.shape[1], k.shape[1])
  if q.shape[2] % k.shape[2]:
    raise ValueError(
      f'{q.shape[2]} query heads are not a multiple of {k.shape[2]} key/value'
      ' heads'
    )
  if not q.dtype == k.dtype == v.dtype:
    raise ValueError(
      f'q, k and v have dtypes {q.dtype}, {k.dtype}, {v.dtype}; cast them to'
      ' one'
    )
  if softcap is not None and not softcap > 0:
    raise ValueError(f'softcap is {softcap}; it is positive, or None for none')
  if chunk < 1:
    raise ValueError(f'chunk is {chunk}; it is at least 1 query')


def _platform() -> str:
  """Platform of the active mesh (which may be compiled for ahead of time)."""
  active = partition.active()
  if active is None:
    return jax.default_backend()
  return active.mesh.devices.flat[0].platform
