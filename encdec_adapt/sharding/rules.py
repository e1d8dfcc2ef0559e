"""What logical axis names mean on a mesh: named, checked rule sets.

Parameters and activations have names of their own because they need other
rules: FSDP shards `embed` of a weight and `batch` of an activation over the
same mesh axis.
"""

from collections.abc import Iterable, Mapping
import dataclasses

# Empty where an axis is not sharded.
MeshAxes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Rules:
  """The mesh axes of every logical axis, the outermost first."""

  # Parameters.
  embed: MeshAxes = ('fsdp',)
  table_embed: MeshAxes = ()
  vocab: MeshAxes = ('fsdp', 'tensor')
  heads: MeshAxes = ('tensor',)
  kv_heads: MeshAxes = ('tensor',)
  head_dim: MeshAxes = ()
  mlp: MeshAxes = ('tensor',)
  experts: MeshAxes = ('tensor',)
  expert_mlp: MeshAxes = ()
  router: MeshAxes = ()
  layers: MeshAxes = ()
  # Activations.
  batch: MeshAxes = ('replica', 'fsdp')
  length: MeshAxes = ('sequence',)
  kv_length: MeshAxes = ()
  act_embed: MeshAxes = ()
  act_heads: MeshAxes = ('tensor',)
  act_mlp: MeshAxes = ('tensor',)
  act_vocab: MeshAxes = ('tensor',)

  def as_dict(self) -> dict[str, MeshAxes]:
    """The mapping that `ops.partition.use` takes."""
    return dataclasses.asdict(self)

  def check(self, arrays: Mapping[str, Iterable[str | None]]) -> None:
    """Refuses a rule set that uses a mesh axis twice in one array.

    Args:
      arrays: logical axes of each array, by its name.

    Raises:
      ValueError: names the array and both logical axes.
    """
    rules = self.as_dict()
    for name, logical_axes in arrays.items():
      owner: dict[str, str] = {}
      for logical in logical_axes:
        for axis in rules[logical] if logical else ():
          if axis in owner:
            raise ValueError(
              f'sharding rules map both {owner[axis]!r} and {logical!r} of'
              f' {name} to mesh axis {axis!r}; an array uses a mesh axis'
              ' once.'
            )
          owner[axis] = logical


# `fsdp`: parameters and batch over fsdp, heads and mlp over tensor.
# `data_parallel`: parameters replicated, batch over every data axis; for
# models that fit on each device.
RULES = {
  'fsdp': Rules(),
  'fsdp_replica': Rules(embed=('replica', 'fsdp')),
  'data_parallel': Rules(embed=(), vocab=()),
}


def named(name: str) -> Rules:
  """The rule set of this name.

  Raises:
    ValueError: unknown name; lists the known ones.
  """
  if name not in RULES:
    raise ValueError(
      f'no sharding rules named {name!r}; known: {", ".join(RULES)}'
    )
  return RULES[name]
