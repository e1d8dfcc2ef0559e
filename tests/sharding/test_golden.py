"""Where every array of the shipped configurations lives, as stored in golden/.

    python -m tests.sharding.test_golden

rewrites the files after an intended change of rules, meshes or parameters.
Configurations with equal array shardings share a file, which has the rules and
the mesh of each.
"""

import importlib
import json
import pathlib
import re

import jax
from jax.sharding import AbstractMesh, AxisType
import pytest

from encdec_adapt import config as config_lib
from encdec_adapt.configs import gemma2
from encdec_adapt.planner import programs
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import placement

FOLDER = pathlib.Path(__file__).parent / 'golden'


def shipped(size: str, *places: str) -> tuple[str, ...]:
  """Arguments of configs/gemma2.py of a size for these topologies."""
  return tuple(f'size={size},topology={place}' for place in places)


LARGE = ('v5e:16x16', 'v6e:16x16', 'v5p:4x4x4')
# File: module below `configs`, arguments, devices (0: as the mesh says).
CASES = {
  'base': ('base', ('',), 8),
  'quickstart_decoder_only': ('quickstart', ('run=decoder_only',), 8),
  'quickstart_adapted': ('quickstart', ('run=adapted',), 8),
  'quickstart_unbalanced': ('quickstart', ('run=unbalanced',), 8),
  'presets_gemma3_1b': (
    ('presets', ('encoder=gemma3_1b,target=t5gemma2',), 16)
  ),
  'gemma2_balanced': (
    'gemma2',
    shipped('2b_2b', 'v6e:4x4')
    + shipped('9b_9b', *LARGE, 'v5e:16x16,slices=2')
    + shipped('27b_27b', 'v5p:8x8x8'),
    0,
  ),
  'gemma2_whole_slice': ('gemma2', shipped('2b_2b', 'v5e:4x4'), 0),
  'gemma2_9b_2b': (
    ('gemma2', shipped('9b_2b', *LARGE, 'v5p:4x4x4,slices=2'), 0)
  ),
  'gemma2_2b_2b_ul2': (
    ('gemma2', ('size=2b_2b,objective=ul2,topology=v5e:8x8',), 0)
  ),
  'gemma2_2b_2b_rloo': (
    ('gemma2', shipped('2b_2b,objective=rloo', 'v5e:4x4', 'v5p:2x2x4'), 0)
  ),
  'gemma2_9b_2b_rloo': (
    ('gemma2', shipped('9b_2b,objective=rloo', 'v5e:4x8', 'v5p:2x2x4'), 0)
  ),
  'gemma2_gpus': (
    'gemma2',
    shipped('2b_2b', 'h100:8', 'h100:16', 'h100:64', 'h200:1', 'h200:8')
    + shipped('9b_9b', 'h100:64', 'h200:64')
    + shipped('27b_27b', 'h100:64'),
    0,
  ),
  'gemma2_lora': (
    ('gemma2', shipped('9b_9b,objective=pairs,lora=16', 'v5e:2x4'), 0)
  ),
  'gemma2_lora_one_gpu': (
    'gemma2',
    shipped('2b_2b,objective=pairs,lora=16', 'l4:1')
    + shipped('9b_9b,objective=pairs,lora=16', 'h100:1'),
    0,
  ),
  'gemma2_one_gpu': (
    'gemma2',
    shipped('2b_2b,objective=ul2', 'h100:1')
    + shipped('2b_2b,objective=pairs', 'h100:1'),
    0,
  ),
}


def describe(name: str, argument: str) -> tuple[str, dict[str, dict]]:
  """Returns rules and mesh in a line, and each array's mesh axes by part."""
  module, _, devices = CASES[name]
  make = importlib.import_module(f'encdec_adapt.configs.{module}').get_config
  config = make(*[argument] if argument else [])
  if module == 'base':
    config.mesh.tensor = 2
  config.teacher.checkpoint = ''  # Then it has the decoder's shape.
  # An abstract mesh has no hosts; the axes of an array are the same.
  config.optimizer.offload = False
  settings = config_lib.load(config, sources=False)
  axes = settings.mesh
  sizes = axes.sizes(devices or axes.replica * axes.fsdp * axes.tensor)
  mesh = AbstractMesh(
    sizes, mesh_lib.AXES, axis_types=(AxisType.Auto,) * len(sizes)
  )

  def program(name):
    return programs.Job.of(name, settings, 'tpu', mesh).program()

  trees = {
    **program('train').arguments,
    'caches': program('decode').arguments['caches'],
  }
  arrays = {
    part: {
      placement.path_string(path): _dimensions(leaf)
      for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    for part, tree in trees.items()
  }
  arrays['caches'] = _fold_layers(arrays['caches'])
  arrays['optimizer'] = _fold(arrays['optimizer'], arrays['parameters'])
  sizes = (f'{axis}={size}' for axis, size in mesh.shape.items())
  return ', '.join([axes.rules, *sizes]), arrays


def _fold_layers(leaves: dict[str, str]) -> dict[str, str]:
  """Names the layers alike, as they have equal axes and differ in number."""
  found: dict[str, set[str]] = {}
  for path, axes in leaves.items():
    found.setdefault(re.sub(r'layer_\d+', 'layer_*', path), set()).add(axes)
  return {path: ' or '.join(sorted(axes)) for path, axes in found.items()}


def _fold(
  states: dict[str, str], parameters: dict[str, str]
) -> dict[str, str | int]:
  """Counts moments sharded as their parameters; lists the rest one by one."""
  found: dict[str, str | int] = {}
  for path, axes in states.items():
    parts = path.split('/')
    ends = ['/'.join(parts[i:]) for i in range(1, len(parts))]
    own = next((end for end in ends if end in parameters), None)
    if own and parameters[own] == axes:
      key = f'{path.removesuffix(own)}* as the parameters'
      found[key] = found.get(key, 0) + 1
    else:
      found[path] = axes
  return found


def _dimensions(leaf: jax.ShapeDtypeStruct) -> str:
  """'-, replica.fsdp, tensor': the mesh axes of each dimension."""
  spec = [*leaf.sharding.spec, *[None] * (leaf.ndim - len(leaf.sharding.spec))]
  axes = [(axis,) if isinstance(axis, str) else axis or '-' for axis in spec]
  return ', '.join('.'.join(names) for names in axes)


@pytest.mark.parametrize(
  'name, argument',
  [
    pytest.param(name, argument, marks=[pytest.mark.long] * bool(i))
    for name, (_, arguments, _) in CASES.items()
    for i, argument in enumerate(arguments)
  ],
)
def test_arrays_are_where_they_were(name, argument):
  stored = json.loads((FOLDER / f'{name}.json').read_text())
  mesh, arrays = describe(name, argument)
  assert mesh == stored['meshes'][argument]
  assert arrays.keys() == stored['arrays'].keys()
  for part, specs in arrays.items():
    assert specs == stored['arrays'][part], part


def test_every_shipped_recipe_has_a_file():
  stored = {path.stem for path in FOLDER.glob('*.json')}
  assert stored == CASES.keys()
  cases = [
    arguments for module, arguments, _ in CASES.values() if module == 'gemma2'
  ]
  assert {a for arguments in cases for a in arguments} == {*gemma2.SHIPPED}


if __name__ == '__main__':
  for name, (_, arguments, _) in CASES.items():
    found = {a: describe(name, a) for a in arguments}
    arrays = next(iter(found.values()))[1]
    assert all(other == arrays for _, other in found.values()), name
    meshes = {argument: mesh for argument, (mesh, _) in found.items()}
    text = json.dumps({'meshes': meshes, 'arrays': arrays}, indent=1)
    (FOLDER / f'{name}.json').write_text(text + '\n')
