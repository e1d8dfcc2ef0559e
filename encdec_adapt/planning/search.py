"""Which mesh, rematerialisation and rows a chip suit a job on given chips.

The batch follows from the rows: what is ranked is how fast chips train, and
not one job; what makes a job fit as it is, says `planning.remedies`.
Candidates are ranked by their shapes (`planning.shapes`), which takes no time;
the best of them are compiled, and ranked again by what came out.
"""

from collections.abc import Iterator
import dataclasses
import itertools
from typing import Any

import jax

from encdec_adapt import config as config_lib
from encdec_adapt.cli import errors
from encdec_adapt.files import disk
from encdec_adapt.models import execution
from encdec_adapt.planning import chips, programs, shapes
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import rules as rules_lib
from encdec_adapt.training import setup

# Estimates of memory are allowed to be so far above the budget before something
# is not worth compiling: those of `configs/plans` are 0.88 to 1.18 of what was
# compiled.
DOUBT = 1.2
_ROWS = (1, 2, 4, 8)  # Of a device, or of the devices that share a row.
_SHARDS = (1, 2, 4, 8)  # Of heads, or of the length.
# Least tokens of a shard of the length: a block of the attention kernels.
_SHORTEST = 512


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
  found, least = [], float('inf')
  arguments = Known(devices)
  for on_mesh, words in on_meshes(settings, where):
    given, mesh = arguments.of(on_mesh)
    shards = on_mesh.mesh.replica * on_mesh.mesh.fsdp
    for remat, rows in itertools.product(execution.REMAT_POLICIES, _ROWS):
      changed = with_remat(on_mesh, remat, rows * shards, 1)
      plan = shapes.describe('train', changed, mesh, where, budget, given)
      least = min(least, plan['memory']['peak'])
      if plan['memory']['peak'] <= DOUBT * budget:
        found.append(Candidate(changed, words + training(changed), plan))
  if not found:
    tried = 'mesh, remat policy and rows a chip'
    raise errors.UserError(
      f'{nothing_fits(where, tried, least, budget)} Or keep less of an'
      ' optimizer: --config.optimizer.moment_dtype=bfloat16, .kind=adafactor'
      ' or .offload=True.'
    )
  return sorted(found, key=lambda candidate: -candidate.rate)


def nothing_fits(
  where: chips.Slice, tried: str, least: float, budget: float
) -> str:
  """Says that a device has less than the least that it would need.

  Args:
    where: the chips.
    tried: what was changed.
    least: bytes that any of it needs.
    budget: bytes that a device may use.
  """
  return (
    f'nothing fits into {where.name} x {where.count}: the least that any'
    f' {tried} needs is {disk.format_bytes(least)} of'
    f' {disk.format_bytes(budget)} a device. Take more chips, chips with more'
    ' memory, or shorter rows (config.data.encoder_length,'
    ' config.data.decoder_length).'
  )


def with_remat(
  settings: config_lib.Settings, remat: str, batch: int, microbatches: int
) -> config_lib.Settings:
  """The job with these of what `training` writes as flags."""
  return dataclasses.replace(
    settings,
    compute=dataclasses.replace(settings.compute, remat=remat),
    train=dataclasses.replace(
      settings.train, batch_size=batch, microbatches=microbatches
    ),
  )


def training(settings: config_lib.Settings) -> tuple[str, ...]:
  """Flags of rematerialisation, batch and microbatches."""
  return (
    f'--config.compute.remat={settings.compute.remat}',
    f'--config.train.batch_size={settings.train.batch_size}',
    f'--config.train.microbatches={settings.train.microbatches}',
  )


class Known:
  """What jobs on meshes of the same devices are given.

  Asked once for all meshes that shard parameters alike, for asking takes
  most of the time.
  """

  def __init__(self, devices):
    self._devices = devices
    self._arguments: dict[tuple, shapes.Arguments] = {}

  def of(
    self, settings: config_lib.Settings
  ) -> tuple[shapes.Arguments, jax.sharding.Mesh]:
    """Arguments and mesh; the settings differ in mesh, batch and remat only.

    The batch need not divide.
    """
    shards = settings.mesh.replica * settings.mesh.fsdp
    settings = with_remat(settings, settings.compute.remat, shards, 1)
    mesh = mesh_lib.make_mesh(settings.mesh, self._devices)
    rules = settings.rules
    key = tuple(
      tuple(mesh.shape[axis] for axis in axes)
      for axes in (rules.embed, rules.vocab, rules.heads)
    )
    if key not in self._arguments:
      program = programs.train(settings, mesh)
      given = shapes.Arguments.of(program, 'train', settings, mesh)
      self._arguments[key] = given
    return self._arguments[key], mesh


def on_meshes(
  settings: config_lib.Settings, where: chips.Slice
) -> Iterator[tuple[config_lib.Settings, tuple[str, ...]]]:
  """The job on every mesh that it divides over, with the flags for that.

  Evaluation batches that do not divide are made larger. What trains is not
  changed, and may not divide.
  """
  for config, name in _meshes(settings, where):
    flags = {f'mesh.{a}': getattr(config, a) for a in mesh_lib.AXES}
    flags['mesh.rules'] = name
    rows = settings.train.eval_batch_size
    shards = config.replica * config.fsdp
    if rows % shards:
      rows += -rows % shards
      flags['train.eval_batch_size'] = rows
    changed = dataclasses.replace(
      settings,
      mesh=config,
      rules=rules_lib.named(name),
      train=dataclasses.replace(settings.train, eval_batch_size=rows),
    )
    yield changed, tuple(f'--config.{k}={v}' for k, v in flags.items())


def _meshes(
  settings: config_lib.Settings, where: chips.Slice
) -> Iterator[tuple[mesh_lib.MeshConfig, str]]:
  """Meshes over the chips that the model divides over, with their rules."""
  stacks = settings.model.stacks.values()
  sizes = [n for s in stacks for n in (s.heads, s.kv_heads, s.mlp_width)]
  widths = {s.width for s in stacks}
  tables = [2**n for n in range(rules_lib.VOCABULARY_GROUP.bit_length())]
  for tensor, sequence, fsdp in itertools.product(_SHARDS, _SHARDS, tables):
    taken = tensor * sequence * fsdp
    if any(n % tensor for n in sizes) or where.devices % taken:
      continue
    if any(s.width % fsdp or s.table_rows % (fsdp * tensor) for s in stacks):
      continue
    if sequence > 1 and any(
      n % sequence or n < sequence * _SHORTEST for n in _lengths(settings)
    ):
      continue
    replica = where.devices // taken
    if replica % where.count:
      continue
    if where.chip.kind == 'tpu' and replica == tensor == 1 and fsdp > 2:
      # The same shards as of `fsdp`, whose gradients a TPU's compiler sums
      # whole where that is over all chips
      # (`ops.partition.sum_gradient_in_stages`).
      halves = mesh_lib.MeshConfig(2, fsdp // 2, sequence, tensor)
      yield halves, 'whole_slice'
      continue
    config = mesh_lib.MeshConfig(replica, fsdp, sequence, tensor)
    yield config, 'fsdp'
    both = replica * fsdp
    if where.count > 1 or replica == 1 or any(w % both for w in widths):
      continue
    rows = [s.table_rows for s in stacks]
    if both not in tables or any(n % (both * tensor) for n in rows):
      yield config, 'fsdp_replica'


def _lengths(settings: config_lib.Settings) -> list[int]:
  """Of all rows that a step reads."""
  read = settings.data.train.lengths
  found = [n for n in (read.encoder, read.decoder) if n]
  teacher = setup.reads_teacher_row(
    settings.model, read, settings.loss.distillation
  )
  return found + [read.teacher] * teacher


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
