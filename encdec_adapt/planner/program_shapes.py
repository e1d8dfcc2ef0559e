"""Jitted functions with abstract arguments, and the arguments' sizes.

This module must not import jobs or chips.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

from encdec_adapt.sharding import layout_report


@dataclasses.dataclass(frozen=True)
class Program:
  """A jitted function with its abstract, sharded arguments.

  Attributes:
    function: the jitted function.
    arguments: trees of ShapeDtypeStruct by part: 'parameters', 'optimizer',
      'teacher', 'reward model 1', 'batch', 'caches'.
    call: returns the arguments in the function's order.
    axes: trees of the arguments' logical axes by part, a tuple per leaf.
    donated: parts with donated buffers.
    temporaries: trees inside the program, by part: 'gradients'.
    beside: other trees in the job's memory, which are not arguments.
  """

  function: Any
  arguments: Mapping[str, Any]
  call: Callable[[Mapping[str, Any]], tuple[Any, ...]]
  axes: Mapping[str, Any]
  donated: tuple[str, ...] = ()
  temporaries: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  beside: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def lower(self, mesh: Mesh) -> jax.stages.Lowered:
    """Lowers the program for the platform of a mesh."""
    # JAX lowers for 'gpu' only if a GPU is present.
    platform = mesh.devices.flat[0].platform.replace('gpu', 'cuda')
    with jax.set_mesh(mesh):
      traced = self.function.trace(*self.call(self.arguments))
      return traced.lower(lowering_platforms=(platform,))

  def rows(self) -> list[layout_report.Row]:
    """Returns the arguments' rows of the sharding report."""
    return layout_report.describe(self.arguments, self.axes)

  def host_bytes(self) -> float:
    """Returns bytes copied between a device and its host.

    Arguments in host memory are read; donated arguments are also written back.
    """
    return sum(
      layout_report.device_bytes(tree, host=True) * (1 + (name in self.donated))
      for name, tree in self.arguments.items()
    )

  def moved_bytes(self) -> float:
    """Returns a lower bound on argument bytes read and written per device.

    All arguments are read once, and donated arguments are written, except
    caches: a step writes only a single entry.
    """
    return sum(
      size * (1 + (name in self.donated and name != 'caches'))
      for name, size in tree_bytes(self.arguments).items()
    )


def tree_bytes(trees: Mapping[str, Any]) -> dict[str, float]:
  """Returns per-device bytes of each tree in device memory, if any."""
  sizes = {k: layout_report.device_bytes(v) for k, v in trees.items()}
  return {name: size for name, size in sizes.items() if size}
