"""Search of meshes, rematerialisation and rows for given chips.

`ranked` compares how fast the chips could train: its candidates have batches
of their own. `remedies` makes one job fit, and keeps the batch of a training
step. Both rank by the analytic `cost_model`; `encdec_adapt.plan --search`
compiles the best and ranks them again.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import itertools
from typing import Any

from encdec_adapt import config as config_lib
from encdec_adapt.cli import errors
from encdec_adapt.files import disk
from encdec_adapt.models import execution
from encdec_adapt.planning import chips, cost_model, programs
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import rules as rules_lib
from encdec_adapt.training import setup

# Largest ratio of estimated memory to the budget that is worth compiling:
# estimates for `configs/plans` are 0.88 to 1.18 of what was compiled.
DOUBT = 1.2
_ROWS = (1, 2, 4, 8)  # Rows of a device, or of devices that share a row.
_SHARDS = (1, 2, 4, 8)  # Shards of heads, or of the length.
# Least tokens in a shard of the length: a block of the attention kernels.
_SHORTEST = 512
_REMEDIES = 3  # Most remedies that are named.
# Changes of the optimizer that keep less state on the devices, tried in turn.
# The last two are named together: one costs time, the other is another recipe.
_OPTIMIZERS = (
  ({},),
  ({'optimizer.moment_dtype': 'bfloat16'},),
  (
    {'optimizer.offload': True},
    {
      'optimizer.kind': 'adafactor',
      'optimizer.moment_dtype': 'float32',
      'optimizer.second_moment_dtype': 'float32',
    },
  ),
)


@dataclasses.dataclass(frozen=True)
class Candidate:
  """One way to run a program.

  Attributes:
    settings: changed settings of the job.
    flags: flags that change them.
    plan: analytic plan, or the compiled one that replaces it.
    rows: rows of a batch of the program.
  """

  settings: config_lib.Settings
  flags: tuple[str, ...]
  plan: dict[str, Any]
  rows: int

  @property
  def rate(self) -> float:
    """Rows per second; 0 if the plan has no times."""
    times = self.plan['roofline']
    return self.rows / times['step_s'] if times else 0.0


class _Planner:
  """Plans one program with changed settings on the same devices.

  Arguments are computed once for all meshes that shard parameters alike and
  all optimizers that keep the same state, since that takes most of the time.
  """

  def __init__(
    self,
    name: str,
    settings: config_lib.Settings,
    where: chips.Slice,
    devices,
    budget: float,
  ):
    self.name, self.settings, self.where = name, settings, where
    self.devices, self.budget = devices, budget
    self.least = float('inf')  # Bytes of the smallest plan so far.
    self._given: dict[Any, cost_model.Arguments] = {}

  def plan(self, changes: Mapping[str, Any], doubt: float = 1.0) -> Candidate:
    """Returns the candidate with changed configuration keys.

    Args:
      changes: configuration key, as in 'train.batch_size', to value.
      doubt: factor by which estimates of memory are multiplied.
    """
    settings = _changed(self.settings, changes)
    mesh = mesh_lib.make_mesh(settings.mesh, self.devices)
    plan = cost_model.describe(
      self.name,
      settings,
      mesh,
      self.where,
      self.budget / doubt,
      self._arguments(settings, mesh),
    )
    self.least = min(self.least, doubt * plan['memory']['peak'])
    flags = (f'--config.{key}={value}' for key, value in changes.items())
    train = settings.train
    rows = train.batch_size if self.name == 'train' else train.eval_batch_size
    return Candidate(settings, tuple(flags), plan, rows)

  def _arguments(self, settings, mesh) -> cost_model.Arguments:
    rules, place = settings.rules, settings.rules.on(mesh)
    key = (settings.optimizer, self.name != 'train' and mesh) + tuple(
      tuple(mesh.shape[axis] for axis in axes)
      for axes in (rules.embed, rules.vocab, rules.heads)
    )
    if key not in self._given:
      # Any batch size that divides is valid.
      rows = place.size('batch')
      sizes = {'train.batch_size': rows, 'train.microbatches': 1}
      if self.name != 'train':
        sizes = {'train.eval_batch_size': rows}
      smallest = _changed(settings, sizes)
      program = programs.PROGRAMS[self.name](smallest, mesh)
      self._given[key] = cost_model.Arguments.of(
        program, self.name, smallest, mesh
      )
    return self._given[key]

  def nothing_fits(self) -> str:
    """Returns the message for a job that no candidate makes fit."""
    return (
      f'nothing fits into {self.where.name} x {self.where.count}: the least'
      f' that any candidate needs is {disk.format_bytes(self.least)} of'
      f' {disk.format_bytes(self.budget)} a device. Take more chips, chips'
      ' with more memory, or shorter rows (config.data.encoder_length,'
      ' config.data.decoder_length).'
    )


def _changed(
  settings: config_lib.Settings, changes: Mapping[str, Any]
) -> config_lib.Settings:
  """Returns the settings with other values of configuration keys.

  The keys of a section change at once: each alone may be refused, as another
  batch is that does not divide into the old number of microbatches.
  """
  sections: dict[str, dict[str, Any]] = {}
  for key, value in changes.items():
    section, name = key.split('.')
    sections.setdefault(section, {})[name] = value
  changed: dict[str, Any] = {}
  for section, values in sections.items():
    if 'rules' in values:
      changed['rules'] = rules_lib.named(values.pop('rules'))
    changed[section] = dataclasses.replace(getattr(settings, section), **values)
  return dataclasses.replace(settings, **changed)


def ranked(
  settings: config_lib.Settings, where: chips.Slice, devices, budget: float
) -> list[Candidate]:
  """Returns training candidates that may fit, the fastest first.

  Args:
    settings: settings of the job.
    where: chips of the job.
    devices: devices of the chips, or stand-ins.
    budget: bytes of memory that a device may use.

  Raises:
    UserError: no candidate fits.
  """
  planner = _Planner('train', settings, where, devices, budget)
  found = []
  for mesh in meshes(settings, where):
    shards = mesh['mesh.replica'] * mesh['mesh.fsdp']
    for remat, rows in itertools.product(execution.REMAT_POLICIES, _ROWS):
      batch = {'train.batch_size': rows * shards, 'train.microbatches': 1}
      one = planner.plan({**mesh, 'compute.remat': remat, **batch})
      if one.plan['memory']['peak'] <= DOUBT * budget:
        found.append(one)
  if not found:
    raise errors.UserError(
      f'{planner.nothing_fits()} Or keep less optimizer state:'
      ' --config.optimizer.moment_dtype=bfloat16, .kind=adafactor or'
      ' .offload=True.'
    )
  return sorted(found, key=lambda candidate: -candidate.rate)


def remedies(
  name: str,
  settings: config_lib.Settings,
  plan: Mapping[str, Any],
  where: chips.Slice,
  devices,
) -> dict[str, Any]:
  """Returns flags with which a program fits the same chips.

  A training step keeps its batch: first mesh, rematerialisation and
  microbatches change, then the optimizer. Evaluation and decoding change the
  mesh and the rows of a batch.

  Args:
    name: name of the program in `programs.PROGRAMS`.
    settings: settings of the job.
    plan: plan of the program, which does not fit. If it was compiled, its
      memory scales the estimates.
    where: chips of the job.
    devices: devices of the chips, or stand-ins.

  Returns:
    `remedies`, flags of up to three ways, the fastest first; and `advice`,
    what to do if there is none, or None.
  """
  peak, budget = plan['memory']['peak'], plan['memory']['budget']
  planner = _Planner(name, settings, where, devices, budget)
  doubt = max(1.0, peak / planner.plan({}).plan['memory']['peak'])
  for tier in _OPTIMIZERS if name == 'train' else _OPTIMIZERS[:1]:
    found = []
    for changes in tier:
      adafactor = settings.optimizer.kind == 'adafactor'
      if adafactor and changes.keys() == {'optimizer.moment_dtype'}:
        continue  # It has no first moments.
      fit = list(_fitting(planner, changes, doubt))
      found.append(sorted(fit, key=lambda one: -one.rate)[:_REMEDIES])
    # The best of each change, then the second of each.
    mixed = itertools.chain(*itertools.zip_longest(*found))
    flags = [' '.join(one.flags) for one in mixed if one][:_REMEDIES]
    if flags:
      return {'remedies': flags, 'advice': None}
  return {'remedies': [], 'advice': planner.nothing_fits()}


def _fitting(planner, changes, doubt) -> Iterator[Candidate]:
  """Yields candidates that fit, with the fewest microbatches, or most rows."""
  settings, train = planner.settings, planner.name == 'train'
  for mesh in meshes(settings, planner.where):
    shards = mesh['mesh.replica'] * mesh['mesh.fsdp']
    if train:
      rows, rest = divmod(settings.train.batch_size, shards)
      batch = {'train.batch_size': settings.train.batch_size}
      if rest:
        continue
      ways = [
        [
          {'compute.remat': remat, **batch, 'train.microbatches': n}
          for n in _divisors(rows)
        ]
        for remat in sorted(execution.REMAT_POLICIES, key='full'.__ne__)
      ]
    else:
      largest = max(1, settings.train.eval_batch_size // shards)
      ways = [
        [
          {'train.eval_batch_size': shards * largest // n}
          for n in _divisors(largest)
        ]
      ]
    for way in ways:
      tried = (planner.plan({**mesh, **changes, **one}, doubt) for one in way)
      fits = next((one for one in tried if one.plan['fits']), None)
      if not fits and way is ways[0]:
        break  # 'full' comes first, and nothing needs less memory.
      if fits:
        yield fits


def _divisors(rows: int) -> list[int]:
  """Returns powers of two that divide, and the rows themselves."""
  powers = [2**n for n in range(rows.bit_length()) if rows % 2**n == 0]
  return sorted({*powers, rows})


def meshes(
  settings: config_lib.Settings, where: chips.Slice
) -> Iterator[dict[str, Any]]:
  """Yields configuration keys of the meshes that a model divides over.

  Evaluation batches that do not divide are enlarged; training batches are not
  looked at.
  """
  for sizes, name in _meshes(settings, where):
    changes = dict(zip(mesh_lib.AXES, sizes, strict=True))
    changes = {f'mesh.{axis}': size for axis, size in changes.items()}
    changes['mesh.rules'] = name
    rows, shards = settings.train.eval_batch_size, sizes[0] * sizes[1]
    if rows % shards:
      changes['train.eval_batch_size'] = rows + -rows % shards
    yield changes


def _meshes(settings, where) -> Iterator[tuple[tuple[int, ...], str]]:
  """Yields sizes of the mesh axes, and the name of the rules."""
  stacks = settings.model.stacks.values()
  sizes = [n for s in stacks for n in (s.heads, s.kv_heads, s.mlp_width)]
  widths = {s.width for s in stacks}
  tables = [2**n for n in range(rules_lib.VOCABULARY_GROUP.bit_length())]
  for tensor, sequence, fsdp in itertools.product(_SHARDS, _SHARDS, tables):
    replica, rest = divmod(where.devices, tensor * sequence * fsdp)
    if rest or replica % where.count or any(n % tensor for n in sizes):
      continue
    if any(s.width % fsdp or s.table_rows % (fsdp * tensor) for s in stacks):
      continue
    if sequence > 1 and any(
      n % sequence or n < sequence * _SHORTEST for n in _lengths(settings)
    ):
      continue
    if where.chip.kind == 'tpu' and replica == tensor == 1 and fsdp > 2:
      # Shards as with `fsdp`, but for sums over a whole slice, which a TPU's
      # compiler does not scatter (`ops.partition.sum_gradient_in_stages`).
      yield (2, fsdp // 2, sequence, tensor), 'whole_slice'
      continue
    yield (replica, fsdp, sequence, tensor), 'fsdp'
    both = replica * fsdp
    if where.count > 1 or replica == 1 or any(w % both for w in widths):
      continue
    rows = [s.table_rows for s in stacks]
    if both not in tables or any(n % (both * tensor) for n in rows):
      yield (replica, fsdp, sequence, tensor), 'fsdp_replica'


def _lengths(settings: config_lib.Settings) -> list[int]:
  """Returns lengths of all rows that a step reads."""
  read = settings.data.train.lengths
  found = [n for n in (read.encoder, read.decoder) if n]
  teacher = setup.reads_teacher_row(
    settings.model, read, settings.loss.distillation
  )
  return found + [read.teacher] * teacher


def text(candidates: list[Candidate]) -> str:
  """Returns a table of candidates, the fastest first."""
  lines = [f'{"rows/s":>9} {"MFU":>6} {"GiB":>6}  by         flags']
  for one in sorted(candidates, key=lambda candidate: -candidate.rate):
    lines.append(
      f'{one.rate:>9.2f} {one.plan["mfu"]:>6.1%}'
      f' {one.plan["memory"]["peak"] / 2**30:>6.1f}  {one.plan["source"]:<9}'
      f'  {" ".join(one.flags)}'
    )
  return '\n'.join(lines)
