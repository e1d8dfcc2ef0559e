"""What logical axis names mean on a mesh: named, checked rule sets.

Parameters and activations have names of their own because they need other
rules: FSDP shards `embed` of a weight and `batch` of an activation over the
same mesh axis.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import math

from encdec_adapt.cli import keys

# Most devices with tokens of their own among which the vocabulary is split:
# each of them reads the hidden states of all, which from here on costs more
# than the memory that a smaller piece of the table saves.
VOCABULARY_GROUP = 64

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
  kv_length: MeshAxes = ('sequence',)
  act_embed: MeshAxes = ()
  act_heads: MeshAxes = ('tensor',)
  act_mlp: MeshAxes = ('tensor',)
  act_vocab: MeshAxes = ('tensor',)
  # No axis of an array: what gradients of the layers' weights are summed over
  # first, which otherwise is all at once
  # (`ops.partition.sum_gradient_in_stages`).
  summed_first: MeshAxes = ()

  def as_dict(self) -> dict[str, MeshAxes]:
    """The mapping that `ops.partition.use` takes."""
    return dict(vars(self))

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

  def check_vocabulary(self, sizes: Mapping[str, int]) -> None:
    """Refuses a mesh that splits the vocabulary among too many devices.

    Args:
      sizes: of the mesh axes, by name.

    Raises:
      ValueError: more than `VOCABULARY_GROUP` devices hold both tokens and
        rows of the table that no other has; names a mesh that would do.
    """
    shared = [a for a in self.vocab if a in self.batch + self.length]
    group = math.prod(sizes[axis] for axis in shared)
    if group <= VOCABULARY_GROUP:
      return
    split = (
      f'the vocabulary would be split among {group} devices (mesh axes'
      f' {", ".join(shared)}), each of which reads the hidden states of all;'
      f' the most is {VOCABULARY_GROUP}.'
    )
    whole = 'replica' in shared
    if whole:
      group //= sizes['replica']
    if group <= VOCABULARY_GROUP:
      raise ValueError(
        f'{split} Set config.mesh.rules to fsdp_replica, which shares a table'
        ' among the devices of fsdp alone.'
      )
    most = VOCABULARY_GROUP * sizes['fsdp'] // group
    fits = [n for n in range(1, most + 1) if sizes['fsdp'] % n == 0]
    fsdp = max(fits, default=1)
    rules = 'config.mesh.rules to fsdp_replica, ' if whole else ''
    raise ValueError(
      f'{split} Set {rules}config.mesh.replica to'
      f' {sizes["replica"] * sizes["fsdp"] // fsdp} and config.mesh.fsdp to'
      f' {fsdp}; with config.mesh.rules fsdp_replica the other parameters'
      ' stay sharded over all of these devices.'
    )


# `fsdp`: parameters and batch over fsdp, heads and mlp over tensor; gradients
# are summed over replica. For several slices, and for models whose state fits
# on the devices of one fsdp group.
# `fsdp_replica`: all but the tables also over replica, so that a device holds
# less of the state; for one slice of more devices than the vocabulary may be
# split among (parameters are gathered over replica, too, which between
# slices is slow).
# `whole_slice`: the tables too, and gradients are summed inside the boxes of
# fsdp first; for one slice whose state needs all of its devices.
# `data_parallel`: parameters replicated, batch over every data axis; for
# models that fit on each device.
RULES = {
  'fsdp': Rules(),
  'fsdp_replica': Rules(embed=('replica', 'fsdp')),
  'whole_slice': Rules(
    embed=('fsdp', 'replica'),
    vocab=('fsdp', 'replica', 'tensor'),
    summed_first=('fsdp',),
  ),
  'data_parallel': Rules(embed=(), vocab=()),
}


@dataclasses.dataclass(frozen=True)
class RulesConfig:
  """Key of `config.mesh` that names the sharding rules."""

  rules: str = keys.key(
    'fsdp',
    "'fsdp'; 'fsdp_replica', which shards all but the tables over replica"
    " too; 'whole_slice', which shards the tables too; or 'data_parallel'."
    ' Tables are sharded over at most 64 devices.',
    one_of=tuple(RULES),
  )

  def __post_init__(self):
    keys.check(self, 'config.mesh.')


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
