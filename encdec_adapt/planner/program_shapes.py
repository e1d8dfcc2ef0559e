"""A jitted function and the shapes of its arguments, and their sizes.

This module knows neither jobs nor chips.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

from encdec_adapt.sharding import layout_report


@dataclasses.dataclass(frozen=True)
class Program:
  """A jitted function and the shapes, with shardings, of its arguments.

  Attributes:
    function: the jitted function.
    arguments: trees of ShapeDtypeStruct by part: 'parameters', 'optimizer',
      'teacher', 'reward model 1', 'batch', 'caches'.
    call: returns the arguments in the function's order.
    axes: trees of the arguments' logical axes by part, a tuple for each leaf.
    donated: parts with memory that the results reuse.
    temporaries: trees that live inside the program, by part: 'gradients'.
    beside: trees that the job holds in memory and that are not arguments.
  """

  function: Any
  arguments: Mapping[str, Any]
  call: Callable[[Mapping[str, Any]], tuple[Any, ...]]
  axes: Mapping[str, Any]
  donated: tuple[str, ...] = ()
  temporaries: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  beside: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def lower(self, mesh: Mesh) -> jax.stages.Lowered:
    """Traces the program for the platform of a mesh."""
    # JAX lowers for 'gpu' only where a GPU is.
    platform = mesh.devices.flat[0].platform.replace('gpu', 'cuda')
    with jax.set_mesh(mesh):
      traced = self.function.trace(*self.call(self.arguments))
      return traced.lower(lowering_platforms=(platform,))

  def rows(self) -> list[layout_report.Row]:
    """Returns a row of the sharding report for every argument."""
    return layout_report.describe(self.arguments, self.axes)

  def host_bytes(self) -> float:
    """Returns bytes that a device copies from and to its host's memory.

    Arguments in the host's memory are read; donated ones are written back.
    """
    return sum(
      layout_report.device_bytes(tree, host=True) * (1 + (name in self.donated))
      for name, tree in self.arguments.items()
    )

  def moved_bytes(self) -> float:
    """Returns the least bytes of arguments that a device reads and writes.

    All are read once, and donated parts are written; of caches a step writes a
    single entry, which is not counted.
    """
    return sum(
      size * (1 + (name in self.donated and name != 'caches'))
      for name, size in tree_bytes(self.arguments).items()
    )


def tree_bytes(trees: Mapping[str, Any]) -> dict[str, float]:
  """Returns bytes of trees in a device's memory, by part that has any."""
  sizes = {k: layout_report.device_bytes(v) for k, v in trees.items()}
  return {name: size for name, size in sizes.items() if size}
