"""Which mesh, rematerialisation and batch suit a job on given chips.

Candidates are ranked by their shapes (`planning.shapes`), which takes no
time; the best of them are compiled, and ranked again by what came out.
"""

from collections.abc import Iterator
import dataclasses
import itertools
from typing import Any

from encdec_adapt import config as config_lib
from encdec_adapt.models import execution
from encdec_adapt.planning import chips, shapes
from encdec_adapt.runtime import errors
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import rules as rules_lib

# Estimates of memory are allowed to be so far off before something is not
# worth compiling.
_DOUBT = 1.25
_ROWS = (1, 2, 4, 8)  # Of a device, or of the devices that share a row.
_TENSOR = (1, 2, 4, 8)
# Devices that share one table of the vocabulary; beyond, hidden states of too
# many are exchanged.
_LARGEST_TABLE_GROUP = 64


@dataclasses.dataclass(frozen=True)
class Candidate:
  """One way to run a job.

  Attributes:
    settings: of the job, changed.
    flags: the flags that change them.
    plan: by shapes; compiled ones replace it.
  """

  settings: config_lib.Settings
  flags: tuple[str, ...]
  plan: dict[str, Any]

  @property
  def rate(self) -> float:
    """Rows a second; 0 where a plan has no times."""
    times = self.plan['roofline']
    return self.settings.train.batch_size / times['step_s'] if times else 0.0


def ranked(
  settings: config_lib.Settings, where: chips.Slice, devices, budget: float
) -> list[Candidate]:
  """Candidates that may fit, the fastest first, by their shapes.

  Args:
    settings: of the job.
    where: its chips.
    devices: of the chips, or as many others.
    budget: bytes of memory of a device.

  Raises:
    UserError: none of them fits.
  """
  found, smallest = [], float('inf')
  for mesh_config, name in _meshes(settings, where):
    mesh = mesh_lib.make_mesh(mesh_config, devices)
    rules = rules_lib.named(name)
    rows_shards = mesh_config.replica * mesh_config.fsdp
    on_mesh = dataclasses.replace(
      settings,
      mesh=mesh_config,
      rules=rules,
      train=dataclasses.replace(
        settings.train, batch_size=rows_shards, microbatches=1
      ),
    )
    given = shapes.Arguments.of(on_mesh, mesh)
    for remat, rows in itertools.product(execution.REMAT_POLICIES, _ROWS):
      batch = rows * rows_shards
      changed = dataclasses.replace(
        on_mesh,
        compute=dataclasses.replace(settings.compute, remat=remat),
        train=dataclasses.replace(on_mesh.train, batch_size=batch),
      )
      plan = shapes.train(changed, mesh, where, budget, given)
      smallest = min(smallest, plan['memory']['peak'])
      if plan['memory']['peak'] <= _DOUBT * budget:
        flags = {f'mesh.{a}': getattr(mesh_config, a) for a in mesh_lib.AXES}
        flags |= {'mesh.rules': name, 'compute.remat': remat}
        flags |= {'train.batch_size': batch, 'train.microbatches': 1}
        words = tuple(f'--config.{k}={v}' for k, v in flags.items())
        found.append(Candidate(changed, words, plan))
  if not found:
    raise errors.UserError(
      f'nothing fits into {where.name} x {where.count}: the least that any'
      f' mesh, remat policy and batch needs is {smallest / 2**30:.1f} GiB of'
      f' {budget / 2**30:.1f} GiB a device. Take more chips, shorter rows or'
      ' --config.optimizer.kind=adafactor.'
    )
  return sorted(found, key=lambda candidate: -candidate.rate)


def _meshes(
  settings: config_lib.Settings, where: chips.Slice
) -> Iterator[tuple[mesh_lib.MeshConfig, str]]:
  """Meshes over the chips that the model divides over, with their rules."""
  stacks = settings.model.stacks.values()
  for tensor in _TENSOR:
    sizes = [(s.heads, s.kv_heads, s.mlp_width) for s in stacks]
    if any(n % tensor for size in sizes for n in size):
      continue
    for fsdp in (2**n for n in range(_LARGEST_TABLE_GROUP.bit_length())):
      if where.devices % (tensor * fsdp):
        continue
      replica = where.devices // (tensor * fsdp)
      if replica % where.count:
        continue
      config = mesh_lib.MeshConfig(replica=replica, fsdp=fsdp, tensor=tensor)
      yield config, 'fsdp'
      widths = {s.width for s in stacks}
      if where.count == 1 < replica and not any(
        width % (replica * fsdp) for width in widths
      ):
        yield config, 'fsdp_replica'


def text(candidates: list[Candidate]) -> str:
  """A table of candidates that have estimates, the fastest first."""
  lines = [f'{"rows/s":>9} {"MFU":>6} {"GiB":>6}  by         flags']
  for one in sorted(candidates, key=lambda candidate: -candidate.rate):
    lines.append(
      f'{one.rate:>9.2f} {one.plan["mfu"]:>6.1%}'
      f' {one.plan["memory"]["peak"] / 2**30:>6.1f}  {one.plan["source"]:<9}'
      f'  {" ".join(one.flags)}'
    )
  return '\n'.join(lines)
