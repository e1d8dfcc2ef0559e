"""Attention: one function, several backends, no silent substitution.

A backend declares its limits as data (`Backend`). `attention` derives the
needs of a call from its arguments and refuses a backend without support for
all of them. To add a kernel, write `attend(q, k, v, spec, *, scale, softcap)`
in a new module and add a `Backend` to `BACKENDS`; the tests run over all
backends. Backends without kernels take a bias, or None, after `spec`. Each
names the results to save under rematerialisation (`SAVED`), inside its
derivative rule if it has one: with only the output named, the backward pass
would recompute the softmax's sums.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import importlib.util
from typing import Any

import jax
from jaxtyping import Array, Float

from encdec_adapt.base import errors, packages
from encdec_adapt.ops import (
  attention_chunked,
  attention_reference,
  attention_shards,
  attention_splash,
  attention_tokamax,
  masks,
  partition,
  relative_bias,
)

PLATFORMS = frozenset({'cpu', 'gpu', 'tpu'})
DEFAULT_CHUNK = 256
# Checkpoint name of attention outputs and of the kernels' normalisers. A
# rematerialisation policy that saves them does not run attention again.
SAVED = attention_shards.SAVED
# GPU generations by major compute capability, for error messages.
_GENERATIONS = {9: 'Hopper (H100, H200)', 10: 'Blackwell (B200)'}


@dataclasses.dataclass(frozen=True)
class Backend:
  """An implementation and its limits; none by default.

  Every backend supports segments, causal and full masks, windows and
  soft-capped scores; a backend without them would need a new field here.

  Attributes:
    attend: the function, with the signature in the module docstring.
    takes_chunk: whether `attend` has the argument `chunk`.
    kernels: whether it consists of custom kernels. Kernels mask by index, so
      they support no keys without a position (`MaskSpec.memory`), no unaligned
      masks with positions (`MaskSpec.aligned`) and no relative position bias.
      Such a backend calls `attention_shards.run` itself on every mesh, and is
      not used for the few queries of a decoding step.
    prefix: masks of kind 'prefix'.
    dtypes: supported dtypes of q, k and v, by name.
    platforms: supported platforms.
    head_dims: largest head dimension, by major compute capability of the
      supported GPUs; None for no limit.
    extra: extra of setup.py with the required package, named like the backend;
      '' for none.
    load: imports that package, before programs are traced.
  """

  attend: Callable[..., jax.Array]
  takes_chunk: bool = False
  kernels: bool = False
  prefix: bool = True
  dtypes: frozenset[str] = frozenset({'float32', 'bfloat16', 'float16'})
  platforms: frozenset[str] = PLATFORMS
  head_dims: Mapping[int, int] | None = None
  extra: str = ''
  load: Callable[[], Any] = lambda: None


BACKENDS: dict[str, Backend] = {
  'reference': Backend(attention_reference.attend),
  'chunked': Backend(attention_chunked.attend, takes_chunk=True),
  'splash': Backend(
    attention_splash.attend,
    kernels=True,
    prefix=False,
    dtypes=frozenset({'float32', 'bfloat16'}),
    platforms=frozenset({'tpu'}),
  ),
  'tokamax': Backend(
    attention_tokamax.attend,
    kernels=True,
    # The kernels would silently round float32 to bfloat16.
    dtypes=frozenset({'bfloat16'}),
    platforms=frozenset({'gpu'}),
    head_dims={9: 256, 10: 256},
    extra='gpu',
    load=attention_tokamax.load,
  ),
}


def on_platform(platform: str) -> list[str]:
  """Returns the backends that run on a platform ('cpu', 'gpu', 'tpu')."""
  return sorted(
    name for name, backend in BACKENDS.items() if platform in backend.platforms
  )


def for_heads(name: str, head_dim: int) -> str:
  """Returns the backend of layers with heads of a dimension.

  It is 'chunked' for heads beyond the limit of a kernel, so that a model with
  heads of two dimensions (Gemma 4) has the kernel in its other layers.

  Args:
    name: a key of `BACKENDS`.
    head_dim: dimension of a head.
  """
  limits = BACKENDS[name].head_dims
  return 'chunked' if limits and head_dim > max(limits.values()) else name


def unsupported(
  name: str,
  spec: masks.MaskSpec,
  dtype: str,
  head_dim: int,
  device: jax.Device | None = None,
  *,
  bias: bool = False,
) -> list[str]:
  """Returns the features of a call unsupported by a backend.

  Args:
    name: a key of `BACKENDS`.
    spec: the mask; its arrays are not read.
    dtype: dtype of queries, keys and values, by name.
    head_dim: dimension of a head.
    device: device to run on; by default a device of the active mesh.
    bias: whether there is a relative position bias.
  """
  backend = BACKENDS[name]
  checks = {
    f'{spec.memory} keys without a position': (
      not spec.memory or not backend.kernels
    ),
    'a bidirectional prefix': spec.kind != 'prefix' or backend.prefix,
    'positions that are not indices': (
      not spec.needs_positions or spec.aligned or not backend.kernels
    ),
    'a relative position bias': not bias or not backend.kernels,
    f'dtype {dtype}': dtype in backend.dtypes,
  }
  refused = [feature for feature, honoured in checks.items() if not honoured]
  # Shapes are inferred before the distributed runtime starts, and
  # `jax.devices` would initialise the backends: call it only where it matters.
  if backend.platforms == PLATFORMS:
    return refused
  # The mesh comes first: programs may be compiled ahead of time for devices
  # missing on this machine.
  device = device or partition.active().device or jax.devices()[0]
  if device.platform not in backend.platforms:
    return [*refused, f'platform {device.platform!r}']
  if backend.head_dims is not None:
    limit = backend.head_dims.get(int(float(device.compute_capability)))
    if limit is None:
      kinds = ' and '.join(_GENERATIONS[n] for n in backend.head_dims)
      refused.append(f'{device.device_kind} GPUs, as it is for {kinds}')
    elif head_dim > limit:
      refused.append(f'a head dimension of {head_dim} on {device.device_kind}')
  if backend.extra and importlib.util.find_spec(name) is None:
    remedy = packages.install_command(backend.extra)
    refused.append(f'an environment without {name} ({remedy}, Python >= 3.12)')
  return refused


def check(
  name: str,
  spec: masks.MaskSpec,
  dtype: str,
  head_dim: int,
  device: jax.Device | None = None,
  *,
  bias: bool = False,
) -> None:
  """Checks that a backend supports a call; arguments as for `unsupported`.

  Raises:
    UserError: unsupported features; names them and the capable backends.
  """
  call = spec, dtype, head_dim, device
  if refused := unsupported(name, *call, bias=bias):
    able = [x for x in BACKENDS if not unsupported(x, *call, bias=bias)]
    raise errors.UserError(
      f'attention backend {name!r} cannot honour {"; ".join(refused)}.'
      ' Set config.compute.attention to one that can:'
      f' {", ".join(sorted(able)) or "none"}.'
    )


def attention(
  q: Float[Array, 'B T N H'],
  k: Float[Array, 'B S K H'],
  v: Float[Array, 'B S K H'],
  spec: masks.MaskSpec,
  *,
  scale: float,
  softcap: float | None = None,
  bias: relative_bias.RelativeBias | None = None,
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
    spec: the mask; queries without a visible key give zeros.
    scale: factor of the scores, applied before the soft-cap.
    softcap: positive cap of the scores; None for no cap.
    bias: added to the scores after the scale; None for none.
    backend: a key of `BACKENDS`.
    chunk: queries and keys per chunk, at least 1; for chunked backends.

  Returns:
    Weighted sums of the values [B, T, N, H] in the dtype of `q`.

  Raises:
    UserError: the backend does not support the call.
  """
  chosen = BACKENDS[backend]
  check(backend, spec, q.dtype.name, q.shape[3], bias=bias is not None)
  options = {'chunk': chunk} if chosen.takes_chunk else {}
  attend = functools.partial(
    chosen.attend, scale=scale, softcap=softcap, **options
  )
  with jax.named_scope(f'attention_{backend}'):
    if chosen.kernels:
      return attend(q, k, v, spec)
    is_split = chosen.takes_chunk and q.shape[1] > chunk
    if not is_split and partition.active().size('length') == 1:
      return attend(q, k, v, spec, bias)
    # Otherwise XLA would run each chunk on the shard with its queries while the
    # other shards wait, and gather the rows of the loop over chunks.
    by_head = partition.active().spec('act_heads', None)
    return attention_shards.run(
      attend, q, k, v, spec, operands=(bias,), operand_specs=(by_head,)
    )
