"""A stack's parameters as one tree per layer, and back."""

import jax
import jax.numpy as jnp

from encdec_adapt.models import layers_index


def get_layer(stack, params, i):
  """Parameters of layer `i`, without the leading axis."""
  prefix, index = layers_index.layer_location(stack, i)
  block = layers_index.get_block(params, prefix)
  return block if index is None else jax.tree.map(lambda x: x[index], block)


def join_layers(stack, blocks):
  """The 'blocks' and 'tail' of a stack from one tree per layer, in order."""
  members = {}
  for i, block in enumerate(blocks):
    prefix, _ = layers_index.layer_location(stack, i)
    members.setdefault(prefix, []).append(block)

  def join(prefix, repeats):
    if repeats is None:
      return members[prefix][0]
    return jax.tree.map(lambda *x: jnp.stack(x), *members[prefix])

  return layers_index.map_blocks(stack, join)
