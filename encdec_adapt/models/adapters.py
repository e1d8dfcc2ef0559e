"""Low-rank adapters (LoRA, arXiv:2106.09685) of a model over a frozen base.

Trainable and frozen parameters of a model, the table of the trainable
parameters, and the tree of parameters for `apply`, with `ops.kernel_forms` in
place of kernels. `stored` reads the base.
"""

from collections.abc import Mapping
import dataclasses
import functools
import math
from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp

from encdec_adapt.base import errors, keys
from encdec_adapt.models import block, layers_index, model_config, parameters
from encdec_adapt.ops import kernel_forms

LABEL = 'config.train.lora'
A, B = 'lora_a', 'lora_b'  # Below the path of the kernel.
BASES = ('', 'int8', 'nf4')
_PROJECTIONS = frozenset('query key value output gate up down'.split())
# Target names of modules with other names: the shared expert of a layer is an
# 'mlp', and the projections of an embedding model are its 'head'.
_PARTS = {'embedder': 'embeddings', 'shared': 'mlp', 'embedding': 'head'}


@dataclasses.dataclass(frozen=True)
class Options:
  """Keys of `config.train.lora`."""

  rank: int = keys.key(
    0,
    'Columns of A and rows of B in low-rank adapters over a frozen model'
    ' (configs/lora.md); 0: all parameters train.',
    at_least=0,
  )
  alpha: float = keys.key(
    0.0, 'The update is alpha / rank A B; 0: twice the rank.', at_least=0
  )
  targets: tuple[str, ...] = keys.key(
    (),
    "Projections with adapters, such as \"('attention','mlp')\"; () for all.",
    names=True,
  )
  full: tuple[str, ...] = keys.key(
    (),
    'Parameters that train whole, such as "(\'norms\',)".',
    names=True,
  )
  dropout: float = keys.key(
    0.0, 'Dropout of the inputs of A in training.', at_least=0, below=1
  )
  rslora: bool = keys.key(
    False, 'Scale the update by alpha / sqrt(rank) (arXiv:2312.03732).'
  )
  base: str = keys.key(
    '',
    "Frozen projections are held in 8 bits by 'int8', in 4 by 'nf4'; '' for"
    ' the compute dtype.',
    one_of=BASES,
  )

  def __post_init__(self):
    keys.check(self, f'{LABEL}.')

  def __str__(self) -> str:
    defaults, values = keys.defaults(Options), keys.values_of(self)
    changes = {k: v for k, v in values.items() if v != defaults[k]}
    return ', '.join(f'{k} {v!r}' for k, v in changes.items())

  @property
  def numerator(self) -> float:
    """Numerator of `scale`: alpha, by default twice the rank."""
    return self.alpha or 2.0 * self.rank

  @property
  def scale(self) -> float:
    """Factor of A B: alpha / rank, or with `rslora` alpha / sqrt(rank)."""
    divisor = self.rank**0.5 if self.rslora else self.rank
    return self.numerator / divisor


@dataclasses.dataclass(frozen=True)
class Adapters:
  """The adapters of a model; holds no arrays.

  Attributes:
    model: the model with the base's parameters.
    options: rank, scale, targets.
  """

  model: model_config.ModelConfig
  options: Options

  def __post_init__(self):
    rank = self.options.rank
    for path in self.kernels:
      start, middle = self._split(path)
      shape = self._base_table[path].shape
      sides = math.prod(shape[start:middle]), math.prod(shape[middle:])
      if rank > min(sides):
        raise errors.UserError(
          f'{LABEL}.rank is {rank}, and {path} is {sides[0]} x {sides[1]};'
          f' lower it to at most {min(sides)}, or choose other targets.'
        )
    if not self.kernels:
      raise errors.UserError(
        f'{LABEL}.full is {self.options.full} and has every target, so that'
        ' nothing is adapted; name less, or tune all parameters with rank 0.'
      )
    for path in self.quantized:
      self._block(path)

  @functools.cached_property
  def full(self) -> tuple[str, ...]:
    """Paths of the fully trained parameters."""
    names = {path: _names(path) for path in self._base_table}
    trainable = {k: v for k, v in names.items() if not parameters.is_buffer(k)}
    paths = self._matches('full', trainable)
    # Heads other than token heads may start untrained, so they always train.
    head = self.model.decoder.head
    fresh = head.fresh if head.predicts_tokens else head.modules
    paths |= {path for path in names if path.split('/')[1] in fresh}
    return tuple(sorted(paths))

  @functools.cached_property
  def kernels(self) -> tuple[str, ...]:
    """Paths of the kernels with adapters."""
    names = {
      path: _names(path)
      for path, info in self._base_table.items()
      if _is_projection(path, info) or _is_table(path)
    }
    if self.options.targets:
      paths = self._matches('targets', names)
    else:
      paths = {path for path in names if not _is_table(path)}
    return tuple(sorted(paths - {*self.full}))

  @functools.cached_property
  def frozen(self) -> tuple[str, ...]:
    """Paths of the frozen parameters, in the order of the parameter table."""
    return tuple(path for path in self._base_table if path not in self.full)

  @functools.cached_property
  def quantized(self) -> frozenset[str]:
    """Paths of the quantised frozen parameters."""
    paths = self.frozen if self.options.base else ()
    return frozenset(p for p in paths if _is_projection(p, self._base_table[p]))

  @functools.cached_property
  def table(self) -> Mapping[str, parameters.ParamInfo]:
    """Shape, dtype and logical axes of every trainable parameter by path."""
    table = {path: self._base_table[path] for path in self.full}
    for path in self.kernels:
      info, (start, middle) = self._base_table[path], self._split(path)
      dims = [*zip(info.shape, info.axes, strict=True)]
      rank = [(self.options.rank, 'rank')]
      outputs = dims[:start] + rank + dims[middle:]
      for name, chosen in ((A, dims[:middle] + rank), (B, outputs)):
        shape, axes = zip(*chosen, strict=True)
        entry = parameters.ParamInfo(shape, info.dtype, axes)
        table[f'{path}/{name}'] = entry
    return table

  def init(self, rng: jax.Array) -> dict[str, Any]:
    """Initialises the adapters as PEFT does, with an update of zero.

    A is uniform in +-1 / sqrt(inputs), `kaiming_uniform_(a=sqrt(5))` in torch,
    and B zero; for tables A is zero and B normal
    (peft.tuners.lora.layer.LoraLayer.reset_lora_parameters).

    Args:
      rng: random key.

    Returns:
      Nested parameters, without the fully trained parameters.
    """
    flat = {}
    for i, path in enumerate(self.kernels):
      key, (start, middle) = jax.random.fold_in(rng, i), self._split(path)
      a, b = (self.table[f'{path}/{name}'].shape for name in (A, B))
      if _is_table(path):
        values = jnp.zeros(a), jax.random.normal(key, b)
      else:
        bound = math.prod(a[start:middle]) ** -0.5
        values = jax.random.uniform(key, a, float, -bound, bound), jnp.zeros(b)
      flat[f'{path}/{A}'], flat[f'{path}/{B}'] = values
    return traverse_util.unflatten_dict(flat, sep='/')

  def attach(
    self, base: Any, trained: Any, key: jax.Array | None = None
  ) -> dict[str, Any]:
    """Returns the parameters to apply the model with.

    Args:
      base: the frozen parameters, nested.
      trained: parameters of `table`, nested; kernels without adapters there
        stay as in the base.
      key: random key of dropout; None for no dropout.
    """
    flat = traverse_util.flatten_dict(base, sep='/')
    flat_trained = traverse_util.flatten_dict(trained, sep='/')
    flat |= {path: flat_trained[path] for path in self.full}
    dropout = self.options.dropout if key is not None else 0.0
    for i, path in enumerate(self.kernels):
      a, b = (flat_trained.get(f'{path}/{name}') for name in (A, B))
      masks = jax.random.fold_in(key, i) if dropout else None
      if dropout and layers_index.is_stacked(path):
        masks = jax.random.split(masks, a.shape[0])
      if a is not None:
        scales = self.options.scale, dropout
        flat[path] = kernel_forms.Adapted(flat[path], a, b, masks, *scales)
    return traverse_util.unflatten_dict(flat, sep='/')

  def freeze(self, path: str, kernel: jax.Array, dtype: Any) -> Any:
    """Casts or quantises a frozen parameter.

    Args:
      path: path of the parameter.
      kernel: the parameter, float32 or as stored.
      dtype: compute dtype, for kernels; norms are float32.

    Returns:
      An array, or `Quantized` for the paths in `quantized`.
    """
    info = self._base_table[path]
    if path not in self.quantized:
      return kernel.astype(dtype if info.inputs else jnp.float32)
    if self.options.base == 'int8':
      return kernel_forms.quantize_int8(kernel, info.inputs)
    return kernel_forms.quantize_nf4(kernel, *self._block(path))

  def base_axes(self, path: str, leaf: Any) -> Any:
    """Returns the logical axes of a frozen parameter.

    Args:
      path: path of the parameter.
      leaf: result of `freeze`, or its shapes.

    Returns:
      A tuple of names; for `Quantized`, a tuple in place of each array.
    """
    info = self._base_table[path]
    if not isinstance(leaf, kernel_forms.Quantized):
      return info.axes
    # Scales are not sharded along dimensions they reduce: inputs or blocks.
    sizes = zip(info.axes, info.shape, leaf.scale.shape, strict=True)
    scale = tuple(name if size == n else None for name, size, n in sizes)
    return leaf.replace(values=info.axes, scale=scale)

  @property
  def description(self) -> str:
    """Summary of the trainable parameters, for users."""
    count = sum(math.prod(info.shape) for info in self.table.values())
    return f'{count:,} parameters train; adapters of {self.options}'

  @property
  def _base_table(self) -> Mapping[str, parameters.ParamInfo]:
    return parameters.parameter_table(self.model)

  def _split(self, path: str) -> tuple[int, int]:
    """Returns the first dimension of a kernel's inputs and of its outputs."""
    start = int(layers_index.is_stacked(path))
    # A table is a product with one-hot tokens.
    inputs = 1 if _is_table(path) else len(self._base_table[path].inputs)
    return start, start + inputs

  def _block(self, path: str) -> tuple[int, int]:
    """Returns the axis of a kernel's blocks, from the end, and their size."""
    info = self._base_table[path]
    # fsdp shards none of these axes.
    axis = next(
      i
      for i, x in enumerate(info.axes)
      if x in ('head_dim', 'mlp', 'layer_inputs')
    )
    size = math.gcd(kernel_forms.BLOCK, info.shape[axis])
    if size % 2 and self.options.base == 'nf4':
      raise errors.UserError(
        f"{LABEL}.base is 'nf4', which stores pairs of values, and {path} has"
        f" {info.axes[axis]} {info.shape[axis]}; set it to 'int8'."
      )
    return axis - len(info.axes), size

  def _matches(
    self, option: str, names: Mapping[str, frozenset[str]]
  ) -> set[str]:
    """Returns the paths matched by the names of an option.

    Each part of a name such as 'decoder/mlp' must match.

    Args:
      option: 'targets' or 'full'.
      names: names of the parts of every parameter, by path.

    Raises:
      UserError: a name matches nothing.
    """
    matches = set()
    for name in getattr(self.options, option):
      parts = {*name.split('/')}
      paths = {path for path in names if parts <= names[path]}
      if option == 'targets' and 'embeddings' not in parts:
        paths = {path for path in paths if not _is_table(path)}
      if not paths:
        choices = sorted(frozenset().union(*names.values()))
        unknown = next((x for x in name.split('/') if x not in choices), name)
        raise errors.UserError(
          f'{LABEL}.{option} has {name!r}, which matches nothing of the model'
          f'{errors.nearest(unknown, choices)}; it has {", ".join(choices)}.'
        )
      matches |= paths
    return matches


def make(model: model_config.ModelConfig, options: Options) -> Adapters | None:
  """Returns the adapters of a model; None for rank 0.

  Raises:
    UserError: the options are invalid for the model.
  """
  return Adapters(model, options) if options.rank else None


def name_of(path: str) -> str:
  """Returns the name of a parameter, of all layers, in `targets` or `full`."""
  stack, leaf = path.split('/')[0], path.split('/')[-1]
  module = path.split('/')[-2]  # The stack, of a relative position bias.
  return '/'.join(dict.fromkeys((stack, _PARTS.get(module, module), leaf)))


def _names(path: str) -> frozenset[str]:
  """Returns the names of a parameter: stack, part, projection and groups."""
  # A stack's relative position bias is in no module.
  stack, *_, leaf = path.split('/')
  module = path.split('/')[-2]
  names = {stack, leaf, _PARTS.get(module, module)}
  if module.endswith('norm') or leaf.endswith('_norm'):
    names.add('norms')
  if path.endswith('/layer_inputs/table'):
    names.add('embeddings')
  if module in block.CROSS:
    names.add('cross_attention')
  return frozenset(names)


def _is_projection(path: str, info: parameters.ParamInfo) -> bool:
  name = path.rpartition('/')[2]
  return name in _PROJECTIONS and 'experts' not in info.axes


def _is_table(path: str) -> bool:
  return path.endswith('/embedder/table')
