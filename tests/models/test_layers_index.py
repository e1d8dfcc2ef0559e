"""Layer numbers, stored arrays and leaf names."""

import pytest

from encdec_adapt.models import (
  layer_leaves,
  layers_index,
  model_config,
  parameters,
)

FIVE_TO_ONE = ('local',) * 5 + ('global',)
STACKS = {
  '26 layers, 5:1': {'layers': 26, 'pattern': FIVE_TO_ONE},
  '34 layers, 5:1': {'layers': 34, 'pattern': FIVE_TO_ONE},
  'one layer': {'layers': 1},
  'one layer, one kind': {'layers': 1, 'pattern': ('global',)},
  'no tail': {'layers': 4},
  'tail': {'layers': 5},
}


@pytest.mark.parametrize('name', STACKS)
def test_leaves_are_a_bijection_onto_the_stored_arrays(name, small_stack):
  stack = small_stack(**STACKS[name])
  model = model_config.DecoderOnlyConfig(stack)
  table, parts = parameters.parameter_table(model), {}
  stored = []
  for name, leaf in layer_leaves.leaves_of(model).items():
    info = table[leaf.path]
    layer = layer_leaves.layer_of(name)
    assert layers_index.in_layer(leaf.path) == (layer is not None)
    assert layers_index.is_stacked(leaf.path) == ('layers' in info.axes)
    assert (leaf.index is not None) == ('layers' in info.axes)
    assert leaf.shape == info.shape[leaf.index is not None :]
    stored.append((leaf.path, leaf.index))
    parts.setdefault(layer, set()).add(name.partition(f'/{layer}/')[2])
  expected = [
    (path, index)
    for path, info in table.items()
    for index in (range(info.shape[0]) if 'layers' in info.axes else [None])
  ]
  assert sorted(stored, key=str) == sorted(expected, key=str)
  del parts[None]
  # 4 norms and 4 + 3 kernels.
  assert sorted(parts) == list(range(stack.layers))
  assert {len(names) for names in parts.values()} == {11}
