"""Where every array of the shipped configurations lives, as stored in golden/.

    python -m tests.sharding.test_golden

writes the files anew, after a change of rules, of meshes or of parameters
that is meant. Configurations whose arrays lie alike share a file, which says
of each its rules and its mesh.
"""

import dataclasses
import importlib
import json
import pathlib
import tempfile

import jax
from jax.sharding import AbstractMesh, AxisType
import pytest

from configs import gemma2
from encdec_adapt import config as config_lib
from encdec_adapt.planning import chips, programs
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import placement
from encdec_adapt.sharding import rules as rules_lib
from tests.e2e import folders

FOLDER = pathlib.Path(__file__).parent / 'golden'


@dataclasses.dataclass(frozen=True)
class Case:
  """Configurations whose arrays lie alike.

  Attributes:
    module: below `configs`.
    arguments: what stands after the colon, of each; a name in braces is a
      folder of `models`.
    devices: that they are placed on; 0 for the chips of their topologies.
    tensor: shards of heads.
  """

  module: str
  arguments: tuple[str, ...] = ('',)
  devices: int = 0
  tensor: int = 1

  def settings(self, argument: str) -> tuple[config_lib.Settings, int]:
    """One of the configurations, and how many devices it is for."""
    module = importlib.import_module(f'configs.{self.module}')
    with tempfile.TemporaryDirectory() as folder:
      filled = argument.format_map(_Models(folder))
      config = module.get_config(*[filled] if filled else [])
    devices = self.devices
    if not devices:
      given = dict(item.split('=') for item in argument.split(','))
      where = chips.parse(given['topology'], int(given.get('slices', 1)))
      devices = where.devices
    config.mesh.tensor = self.tensor
    config.teacher.checkpoint = ''  # Of the decoder's shape, then.
    # An abstract mesh has no hosts; where an array is sharded, is the same.
    config.optimizer.offload = False
    return config_lib.load(config, sources=False), devices


class _Models(dict):
  """Tiny models by the name of their shape in `folders`, made where named."""

  def __init__(self, folder: str):
    super().__init__()
    self._folder = pathlib.Path(folder)

  def __missing__(self, name: str) -> str:
    path = folders.make_folder(self._folder / name, getattr(folders, name))
    return str(path)


MANY = (
  'topology=v5e:16x16',
  'topology=v6e:16x16',
  'topology=v5p:4x4x4',
  'topology=v5e:16x16,slices=2',
)
CASES = {
  'base': Case('base', devices=8, tensor=2),
  'quickstart_decoder_only': Case('quickstart', ('run=decoder_only',), 8),
  'quickstart_adapted': Case('quickstart', ('run=adapted',), 8),
  'quickstart_unbalanced': Case('quickstart', ('run=unbalanced',), 8),
  'pretrained': Case('pretrained', ('encoder={LLAMA},decoder={GEMMA}',), 8),
  'presets_gemma3_1b': Case(
    'presets', ('encoder=gemma3_1b,target=t5gemma2',), 16
  ),
  'gemma2_balanced': Case(
    'gemma2',
    (
      'size=2b_2b,topology=v6e:4x4',
      *(f'size=9b_9b,{where}' for where in MANY),
      'size=27b_27b,topology=v5p:8x8x8',
    ),
  ),
  'gemma2_whole_slice': Case('gemma2', ('size=2b_2b,topology=v5e:4x4',)),
  'gemma2_9b_2b': Case(
    'gemma2',
    tuple(
      f'size=9b_2b,{where}' for where in (*MANY, 'topology=v5p:4x4x4,slices=2')
    ),
  ),
  'gemma2_2b_2b_ul2': Case(
    'gemma2', ('size=2b_2b,objective=ul2,topology=v5e:8x8',)
  ),
  'gemma2_gpus': Case(
    'gemma2',
    (
      'size=2b_2b,topology=h100:8',
      'size=2b_2b,topology=h100:64',
      'size=9b_9b,topology=h200:64',
      'size=27b_27b,topology=h100:64',
    ),
  ),
}


def describe(case: Case, argument: str) -> tuple[str, dict[str, dict]]:
  """Rules and mesh in a line, and the mesh axes of each array by its part."""
  settings, devices = case.settings(argument)
  sizes = settings.mesh.sizes(devices)
  mesh = AbstractMesh(
    sizes, mesh_lib.AXES, axis_types=(AxisType.Auto,) * len(sizes)
  )
  trees = {
    **programs.train(settings, mesh).arguments,
    'caches': programs.decode(settings, mesh).arguments['caches'],
  }
  arrays = {
    part: {
      placement.path_string(path): _dimensions(leaf)
      for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    for part, tree in trees.items()
  }
  arrays['optimizer'] = _fold(arrays['optimizer'], arrays['parameters'])
  rules = next(
    name for name, known in rules_lib.RULES.items() if known == settings.rules
  )
  axes = (f'{axis}={size}' for axis, size in mesh.shape.items())
  return ', '.join([rules, *axes]), arrays


def _fold(
  states: dict[str, str], parameters: dict[str, str]
) -> dict[str, str | int]:
  """Counts moments that lie as their parameters; the rest one by one."""
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
  [(name, a) for name, case in CASES.items() for a in case.arguments],
)
def test_arrays_are_where_they_were(name, argument):
  stored = json.loads((FOLDER / f'{name}.json').read_text())
  mesh, arrays = describe(CASES[name], argument)
  assert mesh == stored['meshes'][argument]
  assert arrays.keys() == stored['arrays'].keys()
  for part, specs in arrays.items():
    assert specs == stored['arrays'][part], part


def test_every_file_is_of_a_case():
  assert {path.stem for path in FOLDER.glob('*.json')} == CASES.keys()
  for name, case in CASES.items():
    stored = json.loads((FOLDER / f'{name}.json').read_text())
    assert tuple(stored['meshes']) == case.arguments


def test_every_planned_configuration_is_of_a_case():
  cases = [case for case in CASES.values() if case.module == 'gemma2']
  named = {argument for case in cases for argument in case.arguments}
  assert named >= set(gemma2.PLANNED)


def write(name: str, case: Case) -> None:
  """Writes the file of a case."""
  found = {a: describe(case, a) for a in case.arguments}
  arrays = next(iter(found.values()))[1]
  assert all(other == arrays for _, other in found.values()), name
  meshes = {argument: mesh for argument, (mesh, _) in found.items()}
  text = json.dumps({'meshes': meshes, 'arrays': arrays}, indent=1)
  (FOLDER / f'{name}.json').write_text(text + '\n')


if __name__ == '__main__':
  FOLDER.mkdir(exist_ok=True)
  for name, case in CASES.items():
    write(name, case)
