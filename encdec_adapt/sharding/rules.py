"""Sharding rules: mesh axes of logical axis names.

Parameters and activations have different names because they need different
rules: FSDP shards `embed` of a weight and `batch` of an activation over the
same mesh axis.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import math

from jax.sharding import AbstractMesh, Mesh

from encdec_adapt.ops import partition

# Maximum number of devices with different tokens that share a vocabulary table.
# Each reads the hidden states of all of them; beyond this number that costs
# more than a smaller table shard saves.
VOCABULARY_GROUP = 64

# Empty if the axis is not sharded.
MeshAxes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Rules:
  """Mesh axes of every logical axis, outermost first."""

  # Parameters.
  embed: MeshAxes = ('fsdp',)
  table_embed: MeshAxes = ()
  vocab: MeshAxes = ('fsdp', 'tensor')
  reward: MeshAxes = ()
  heads: MeshAxes = ('tensor',)
  kv_heads: MeshAxes = ('tensor',)
  head_dim: MeshAxes = ()
  buckets: MeshAxes = ()
  mlp: MeshAxes = ('tensor',)
  experts: MeshAxes = ('tensor',)
  expert_mlp: MeshAxes = ()
  router: MeshAxes = ()
  rank: MeshAxes = ('fsdp',)
  layer_inputs: MeshAxes = ()
  layers: MeshAxes = ()
  # Activations.
  batch: MeshAxes = ('replica', 'fsdp')
  length: MeshAxes = ('sequence',)
  kv_length: MeshAxes = ('sequence',)
  act_embed: MeshAxes = ()
  act_heads: MeshAxes = ('tensor',)
  act_mlp: MeshAxes = ('tensor',)
  act_vocab: MeshAxes = ('tensor',)
  # Not an array axis: mesh axes over which gradients of layer weights are
  # summed first (`ops.partition.sum_gradient_in_stages`).
  summed_first: MeshAxes = ()

  def as_dict(self) -> dict[str, MeshAxes]:
    """Returns the mapping for `ops.partition.use`."""
    return dict(vars(self))

  def on(self, mesh: Mesh | AbstractMesh) -> partition.Partition:
    """Returns these rules on a mesh."""
    return partition.Partition(mesh, self.as_dict())

  def for_sampling(
    self, sizes: Mapping[str, int], counts: Iterable[int]
  ) -> 'Rules':
    """Returns the rules for a copy of the parameters used for decoding.

    Every decoding step would gather parameters sharded by width. Instead,
    heads, feed-forward layers and vocabulary are sharded over `fsdp` and
    `tensor`, and rows over the other axes. A model that does not divide that
    often is sharded over `tensor` only.

    Args:
      sizes: number of devices along each mesh axis, by name.
      counts: numbers of heads, widths and table rows, which must divide.
    """
    axes = self.mlp
    wide = ('fsdp', *axes)
    devices = math.prod(sizes[axis] for axis in wide)
    if self.embed and all(count % devices == 0 for count in counts):
      axes = wide
    divided = ('vocab', 'heads', 'kv_heads', 'mlp')
    divided += ('act_heads', 'act_mlp', 'act_vocab')
    # A decoding step has one token per row, so length is not sharded.
    whole = ('embed', 'table_embed', 'rank', 'length', 'kv_length')
    whole += ('summed_first',)
    return dataclasses.replace(
      self,
      **dict.fromkeys(divided, axes),
      **dict.fromkeys(whole, ()),
      batch=tuple(axis for axis in self.batch if axis not in axes),
    )

  def check_vocabulary(self, sizes: Mapping[str, int]) -> None:
    """Checks that the mesh does not split the vocabulary too often.

    Args:
      sizes: number of devices along each mesh axis, by name.

    Raises:
      ValueError: more than `VOCABULARY_GROUP` devices with different tokens
        share a table; names the limit.
    """
    shared = [a for a in self.vocab if a in self.batch + self.length]
    group = math.prod(sizes[axis] for axis in shared)
    if group > VOCABULARY_GROUP:
      raise ValueError(
        f'the vocabulary would be split among {group} devices (mesh axes'
        f' {", ".join(shared)}), each of which reads the hidden states of all;'
        f' the most is {VOCABULARY_GROUP}. Set config.mesh.fsdp to at most'
        f' {VOCABULARY_GROUP}, config.mesh.replica to the rest, and'
        ' config.mesh.rules to fsdp_replica, which keeps the other parameters'
        ' sharded over all of these devices.'
      )


# `fsdp`: parameters and batch over fsdp, heads and mlp over tensor; gradients
# are summed over replica. For several slices, and for models with a state that
# fits on an fsdp group.
# `fsdp_replica`: also shards all parameters but the tables over replica. For a
# slice of more than `VOCABULARY_GROUP` devices; between slices, gathering
# parameters would be slow.
# `whole_slice`: shards the tables too, and sums gradients inside the fsdp boxes
# first. For a slice with a state that needs all of its devices.
# `data_parallel`: parameters replicated, batch over every data axis. For
# models that fit on one device.
RULES = {
  'fsdp': Rules(),
  'fsdp_replica': Rules(embed=('replica', 'fsdp'), rank=('replica', 'fsdp')),
  'whole_slice': Rules(
    embed=('fsdp', 'replica'),
    rank=('fsdp', 'replica'),
    vocab=('fsdp', 'replica', 'tensor'),
    summed_first=('fsdp',),
  ),
  'data_parallel': Rules(embed=(), vocab=(), rank=()),
}
