"""layer_location is a bijection onto the leaves of the tree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.cli import errors
from encdec_adapt.models import layers_index, model_config, parameters
from tests import layer_trees

FIVE_TO_ONE = ('local',) * 5 + ('global',)
STACKS = {
  '26 layers, 5:1': {'layers': 26, 'pattern': FIVE_TO_ONE},
  '34 layers, 5:1': {'layers': 34, 'pattern': FIVE_TO_ONE},
  'one layer': {'layers': 1},
  'one layer, one kind': {'layers': 1, 'pattern': ('global',)},
  'no tail': {'layers': 4},
  'tail': {'layers': 5},
}


@pytest.fixture(params=STACKS.values(), ids=STACKS.keys())
def stack(request, small_stack):
  return small_stack(**request.param)


def test_location_is_a_bijection_onto_the_leaves(stack):
  slots = {}  # (prefix, index) -> paths of leaves
  table = parameters.parameter_table(model_config.DecoderOnlyConfig(stack))
  for path, info in table.items():
    parts = path.split('/')[1:]
    if parts[0] not in ('blocks', 'tail'):
      continue
    assert (info.axes[0] == 'layers') == (parts[0] == 'blocks')
    indices = range(info.shape[0]) if parts[0] == 'blocks' else [None]
    for index in indices:
      slots.setdefault(('/'.join(parts[:2]), index), set()).add(
        '/'.join(parts[2:])
      )
  locations = [
    layers_index.layer_location(stack, i) for i in range(stack.layers)
  ]
  assert len(set(locations)) == stack.layers
  assert set(locations) == set(slots)
  assert len(set(map(frozenset, slots.values()))) == 1


def test_paths_in_layers_and_stacked_paths(small_stack):
  pair = model_config.encoder_decoder(
    small_stack(layers=5), small_stack(layers=3, pattern=('global',))
  )
  found = {'outside': 0, 'tail': 0, 'stacked': 0}
  for path, info in parameters.parameter_table(pair).items():
    stacked = layers_index.is_stacked(path)
    assert stacked == ('layers' in info.axes), path
    assert layers_index.in_layer(path) == ('/layer_' in path), path
    where = 'tail' if '/layer_' in path else 'outside'
    found['stacked' if stacked else where] += 1
  assert all(found.values()), found


def test_join_layers_and_get_layer_are_inverse(stack):
  blocks = [
    {'a': jnp.full((2,), i), 'b': {'c': i}} for i in range(stack.layers)
  ]
  tree = layer_trees.join_layers(stack, blocks)
  assert set(tree) == {
    name
    for name, there in (('blocks', stack.repeats), ('tail', stack.tail))
    if there
  }
  for i, block in enumerate(blocks):
    got = layer_trees.get_layer(stack, tree, i)
    jax.tree.map(np.testing.assert_array_equal, got, block)


@pytest.mark.parametrize('i', [-1, 3])
def test_no_such_layer(small_stack, i):
  with pytest.raises(errors.UserError, match='layers 0 to 2'):
    layers_index.layer_location(small_stack(), i)
