"""Train state (a plain pytree) and the placement of its arrays on a mesh.

Imports no losses, phases or steps.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

from flax import traverse_util
import flax.struct
import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from encdec_adapt.models import adapters as adapters_lib
from encdec_adapt.models import build, parameters
from encdec_adapt.sharding import placement
from encdec_adapt.sharding import rules as rules_lib
from encdec_adapt.training import optimizers

Flat = dict[str, Any]
# Name of a parameter group -> paths of its parameters.
Groups = Mapping[str, Sequence[str]]


@flax.struct.dataclass
class TrainState:
  """Train state; leaves are arrays or their shapes.

  Attributes:
    step: number of steps so far, including skipped updates, int32.
    params: nested dictionary of parameters, float32; with adapters, only the
      trained parameters.
    groups: optimizer state of every unfrozen group.
    skipped: number of updates skipped as non-finite, int32.
    skipped_in_row: number of latest consecutive skipped updates, int32.
    dropout_key: random key of all dropout masks; None without dropout, so that
      the state has no such leaf.
  """

  step: Any
  params: Any
  groups: dict[str, optimizers.GroupState]
  skipped: Any
  skipped_in_row: Any
  dropout_key: Any = None


def flatten(params: Any) -> Flat:
  """Flattens a nested dictionary to path -> leaf."""
  return traverse_util.flatten_dict(params, sep='/')


def unflatten(flat: Mapping[str, Any]) -> Any:
  """Nests a dictionary of path -> leaf."""
  return traverse_util.unflatten_dict(dict(flat), sep='/')


@dataclasses.dataclass(frozen=True)
class Placement:
  """A model with the mesh and sharding rules of its parameters and state.

  Attributes:
    model: the model.
    mesh: the device mesh; abstract if nothing is computed.
    rules: mapping of logical to mesh axes.
    dtype: dtype of the parameters; None for the parameter table's (float32),
      as required for training.
    adapters: adapters over a frozen base; None for full training.
  """

  model: build.Model
  mesh: Mesh | AbstractMesh
  rules: rules_lib.Rules
  dtype: str | None = None
  adapters: adapters_lib.Adapters | None = None

  def with_remat(self, policy: str) -> 'Placement':
    """Returns the placement of the same model with another `compute.remat`."""
    compute = dataclasses.replace(self.model.compute, remat=policy)
    model = build.build(self.model.config, compute)
    return dataclasses.replace(self, model=model)

  @property
  def table(self) -> Mapping[str, parameters.ParamInfo]:
    """Path of every trained parameter -> shape and logical axes."""
    return self.adapters.table if self.adapters else self.model.table

  @functools.cached_property
  def parameters(self) -> dict[str, NamedSharding]:
    """Shardings of the parameters by path.

    Raises:
      ValueError: a parameter does not divide over the mesh.
    """
    return placement.parameter_shardings(self.table, self.mesh, self.rules)

  def abstract_params(self) -> Any:
    """Returns a nested dictionary of parameter shapes and shardings."""
    shardings = self.parameters
    return unflatten(
      {
        path: jax.ShapeDtypeStruct(
          info.shape, self.dtype or info.dtype, sharding=shardings[path]
        )
        for path, info in self.table.items()
      }
    )

  def abstract_base(self) -> Any:
    """Returns shapes and shardings of the frozen base; {} without adapters."""
    partition = self.rules.on(self.mesh)

    def shape(path: str) -> Any:
      leaf = jax.eval_shape(
        lambda x: self.adapters.freeze(path, x, self.model.compute.dtype),
        jax.ShapeDtypeStruct(self.model.table[path].shape, 'float32'),
      )
      return jax.tree.map(
        lambda x, axes: x.update(
          sharding=partition.sharding(path, x.shape, axes)
        ),
        leaf,
        self.adapters.base_axes(path, leaf),
      )

    paths = self.adapters.frozen if self.adapters else ()
    return unflatten({path: shape(path) for path in paths})

  def base_axes(self, base: Any) -> Any:
    """Returns logical axes of the leaves of the frozen base."""
    return unflatten(
      {
        path: self.adapters.base_axes(path, leaf)
        for path, leaf in flatten(base).items()
      }
    )

  def attach(self, base: Any, params: Any, key: Any = None) -> Any:
    """Merges base and trained parameters into the model's parameters.

    Args:
      base: the frozen base; {} without adapters.
      params: parameters of a state.
      key: random key of the adapters' dropout; None for no dropout.
    """
    if self.adapters is None:
      return params
    return self.adapters.attach(base, params, key)

  def axes(self, tree: Any) -> Any:
    """Returns logical axes of a tree made from parameters (nested or flat)."""
    return placement.axes_like_parameters(tree, self.table)

  def shardings(self, tree: Any) -> Any:
    """Returns shardings of a tree made from parameters (nested or flat)."""
    return placement.shardings(tree, self.axes(tree), self.mesh, self.rules)

  def place(self, make: Callable[..., Any], *args) -> Any:
    """Runs `make(*args)` under `jax.jit` with sharded outputs.

    `make` returns parameters, or a tree made from them.
    """
    shardings = self.shardings(jax.eval_shape(make, *args))
    return jax.jit(make, out_shardings=shardings)(*args)
