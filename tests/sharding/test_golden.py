"""Where every array of the shipped configurations lives, as stored in golden/.

    python -m tests.sharding.test_golden

writes the files anew, after a change of rules, of meshes or of parameters
that is meant.
"""

import dataclasses
import importlib
import json
import pathlib

import jax
from jax.sharding import AbstractMesh, AxisType
import pytest

from encdec_adapt import config as config_lib
from encdec_adapt import job
from encdec_adapt.planning import programs
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import placement

FOLDER = pathlib.Path(__file__).parent / 'golden'


@dataclasses.dataclass(frozen=True)
class Case:
  """A configuration and the mesh on which it is placed."""

  module: str
  argument: str | None = None
  rules: str = 'fsdp'
  replica: int = 1
  fsdp: int = 1
  tensor: int = 1

  def place(self):
    """The mesh, and the name, the shape and the sharding of every array."""
    sizes = mesh_lib.MeshConfig(self.replica, self.fsdp, 1, self.tensor)
    devices = self.replica * self.fsdp * self.tensor
    mesh = AbstractMesh(
      sizes.sizes(devices), mesh_lib.AXES, axis_types=(AxisType.Auto,) * 4
    )
    module = importlib.import_module(f'configs.{self.module}')
    config = module.get_config(*[self.argument] if self.argument else [])
    config.mesh.rules = self.rules
    # One row a device, which the shipped batches are multiples of.
    config.train.eval_batch_size = devices
    settings = config_lib.load(config, sources=False)
    where = job.place_model(settings, settings.model, mesh)
    return mesh, {
      'parameters': where.abstract_params(),
      'batch': programs.batch(settings, where, devices),
      'caches': programs.decode(settings, mesh).arguments['caches'],
    }


CASES = {
  'base': Case('base', fsdp=4, tensor=2),
  'gemma2_2b_2b': Case('gemma2', 'size=2b_2b', fsdp=16),
  'gemma2_2b_2b_ul2': Case('gemma2', 'size=2b_2b,objective=ul2', fsdp=64),
  'gemma2_9b_2b': Case(
    'gemma2', 'size=9b_2b', 'fsdp_replica', replica=4, fsdp=64
  ),
  'gemma2_9b_9b': Case(
    'gemma2', 'size=9b_9b', 'fsdp_replica', replica=4, fsdp=64
  ),
  'gemma2_9b_9b_two_slices': Case('gemma2', 'size=9b_9b', replica=8, fsdp=64),
  'presets_gemma3_1b': Case(
    'presets', 'encoder=gemma3_1b,target=t5gemma2', fsdp=16
  ),
}


def describe(case: Case) -> dict[str, dict[str, str]]:
  """The mesh, and the mesh axes of every dimension of every array."""
  mesh, trees = case.place()
  parts = {
    part: {
      placement.path_string(path): _dimensions(leaf)
      for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    for part, tree in trees.items()
  }
  sizes = {axis: str(size) for axis, size in mesh.shape.items()}
  return {'mesh': sizes, **parts}


def _dimensions(leaf: jax.ShapeDtypeStruct) -> str:
  """'-, replica.fsdp, tensor': the mesh axes of each dimension."""
  spec = [*leaf.sharding.spec, *[None] * (leaf.ndim - len(leaf.sharding.spec))]
  axes = [(axis,) if isinstance(axis, str) else axis or '-' for axis in spec]
  return ', '.join('.'.join(names) for names in axes)


@pytest.mark.parametrize('name', CASES)
def test_arrays_are_where_they_were(name):
  stored = json.loads((FOLDER / f'{name}.json').read_text())
  found = describe(CASES[name])
  assert found.keys() == stored.keys()
  for part, specs in found.items():
    assert specs == stored[part], part


def test_every_file_is_of_a_case():
  assert {path.stem for path in FOLDER.glob('*.json')} == CASES.keys()


if __name__ == '__main__':
  FOLDER.mkdir(exist_ok=True)
  for name, case in CASES.items():
    text = json.dumps(describe(case), indent=1)
    (FOLDER / f'{name}.json').write_text(text + '\n')
