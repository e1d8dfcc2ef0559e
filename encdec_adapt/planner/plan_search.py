"""Search of meshes, rematerialisation and rows for given chips.

`ranked` compares how fast the chips could train, and `remedies` makes a given
job fit; both keep the batch of a training step. Both rank by
`analytic_estimate`; `encdec_adapt.plan --search` compiles the best and ranks
them again. This module compiles nothing, and must
not import `plan_report`.
"""

from collections.abc import Iterable, Iterator, Mapping
import dataclasses
import itertools
from typing import Any

from jax.sharding import AbstractMesh

from encdec_adapt.base import errors
from encdec_adapt.files import disk
from encdec_adapt.models import execution, parameters
from encdec_adapt.planner import analytic_estimate, chips, programs
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import placement
from encdec_adapt.sharding import rules as rules_lib
from encdec_adapt.training import step_estimate

# Rows at a time of a device, or of devices that share a row.
_ROWS = (1, 2, 4, 8)
# Candidates within this share are equals: estimates are no more accurate.
_EQUAL = 0.02
_SHARDS = (1, 2, 4, 8)  # Shards of heads, or of the length.
# Least tokens in a shard of the length: a block of the attention kernels.
_SHORTEST = 512
_REMEDIES = 3  # Most remedies that are named.
# Changes of the optimizer that keep less state on the devices, tried in turn.
# The last two are named together: offloading costs time, Adafactor is another
# recipe, so neither is better for everyone.
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
  """A way to run a program.

  Attributes:
    job: the changed job, on its mesh.
    flags: flags that change the configuration so.
    plan: analytic plan, or the compiled one that replaces it.
  """

  job: programs.Job
  flags: tuple[str, ...]
  plan: dict[str, Any]

  @property
  def rate(self) -> float:
    """Rows per second; 0 if the plan has no times."""
    times = self.plan['roofline']
    return self.job.rows / times['step_s'] if times else 0.0

  @property
  def hours(self) -> float | None:
    """Hours of the job's steps; None if steps or times are unknown."""
    steps = self.job.train.steps
    return steps * self.job.rows / self.rate / 3600 if self.rate else None


@dataclasses.dataclass
class _Planner:
  """Plans a program with changed settings on the same devices.

  Arguments are computed once for all meshes that shard parameters alike and
  all optimizers that keep the same state, since that takes most of the time.

  Attributes:
    job: the job.
    hardware: chips of the job.
    doubt: factor by which estimates of memory are multiplied.
    least: bytes of the smallest plan so far.
  """

  job: programs.Job
  hardware: chips.Slice
  doubt: float = 1.0
  least: float = float('inf')
  _sizes: dict[Any, analytic_estimate.Arguments] = dataclasses.field(
    default_factory=dict
  )

  def plan(self, changes: Mapping[str, Any]) -> Candidate:
    """Returns the candidate with changed configuration keys.

    Args:
      changes: configuration key, as in 'train.batch_size', to value.
    """
    job = _changed(self.job, changes)
    plan = analytic_estimate.describe(job, self.hardware, self._arguments(job))
    peak = self.doubt * plan['memory']['peak']
    plan['fits'] = peak <= self.hardware.chip.hbm_bytes
    self.least = min(self.least, peak)
    flags = (f'--config.{key}={value}' for key, value in changes.items())
    return Candidate(job, tuple(flags), plan)

  def _arguments(self, job: programs.Job) -> analytic_estimate.Arguments:
    rules = job.rules
    # Sizes of trained parameters follow from these axes alone. Other programs
    # have arguments, such as caches, that other axes shard: the mesh counts.
    key = (job.optimizer, not job.trains and job.mesh) + tuple(
      tuple(job.mesh.shape[axis] for axis in axes)
      for axes in (rules.embed, rules.vocab, rules.heads)
    )
    if key not in self._sizes:
      # Any batch that divides will do, since its size is scaled.
      rows = rules.on(job.mesh).size('batch')
      changes = {'train.batch_size': rows, 'train.microbatches': 1}
      if not job.trains:
        changes = {'train.eval_batch_size': rows}
      smallest = _changed(job, changes)
      sizes = analytic_estimate.Arguments.of(smallest, smallest.program())
      self._sizes[key] = sizes
    return self._sizes[key]

  def nothing_fits(self) -> str:
    """Returns the message for a job that no candidate makes fit."""
    chip, hardware = self.hardware.chip, self.hardware
    return (
      f'nothing fits into {hardware.name} x {hardware.count}: the least'
      f' that any candidate needs is {disk.format_bytes(self.least)} of'
      f' {disk.format_bytes(chip.hbm_bytes)} a device. Take more'
      ' chips, chips with more memory, or shorter rows'
      ' (config.data.encoder_length, config.data.decoder_length).'
    )


def _changed(job: programs.Job, changes: Mapping[str, Any]) -> programs.Job:
  """Returns the job with other values of configuration keys.

  All keys of a section change at once: a single change may be refused, such as
  a batch size that the old number of microbatches does not divide.
  """
  sections: dict[str, dict[str, Any]] = {}
  for key, value in changes.items():
    section, name = key.split('.')
    sections.setdefault(section, {})[name] = value
  changed: dict[str, Any] = {}
  if mesh := sections.pop('mesh', None):
    changed['rules'] = rules_lib.RULES[mesh['rules']]
    changed['mesh'] = mesh_lib.make_mesh(
      mesh_lib.MeshConfig(**mesh), list(job.mesh.devices.flat)
    )
  for section, values in sections.items():
    changed[section] = dataclasses.replace(getattr(job, section), **values)
  return dataclasses.replace(job, **changed)


def ranked(job: programs.Job, hardware: chips.Slice) -> list[Candidate]:
  """Returns training candidates that may fit, the fastest first.

  Args:
    job: the training step, on any mesh of the devices or of stand-ins.
    hardware: chips of the job.

  Raises:
    UserError: no candidate fits.
  """
  planner, size = _Planner(job, hardware), job.train.batch_size
  most = step_estimate.DOUBT * hardware.chip.hbm_bytes
  candidates = []
  for mesh in meshes(job, hardware):
    shards = mesh['mesh.replica'] * mesh['mesh.fsdp']
    # Rows that do not divide the batch would change it.
    counts = [size // (shards * n) for n in _ROWS if size % (shards * n) == 0]
    for remat, count in itertools.product(execution.REMAT_POLICIES, counts):
      batch = {'train.batch_size': size, 'train.microbatches': count}
      candidate = planner.plan({**mesh, 'compute.remat': remat, **batch})
      if candidate.plan['memory']['peak'] <= most:
        candidates.append(candidate)
  if planner.least == float('inf'):
    raise errors.UserError(
      f'config.train.batch_size is {size}, which divides over no mesh of the'
      f' {hardware.devices} devices of {hardware.name} x {hardware.count}; give'
      ' a multiple of a power of two up to their number.'
    )
  if not candidates:
    raise errors.UserError(
      f'{planner.nothing_fits()} Or keep less optimizer state:'
      ' --config.optimizer.moment_dtype=bfloat16, .kind=adafactor or'
      ' .offload=True.'
    )
  return _fastest(candidates)


def _fastest(candidates: Iterable[Candidate]) -> list[Candidate]:
  """Sorts candidates by speed, and equally fast ones by memory."""
  remaining = sorted(candidates, key=lambda candidate: -candidate.rate)
  ordered: list[Candidate] = []
  while remaining:
    least = (1 - _EQUAL) * remaining[0].rate
    count = sum(candidate.rate >= least for candidate in remaining)
    # Less memory leaves room for errors of the estimate.
    equals = sorted(remaining[:count], key=lambda c: c.plan['memory']['peak'])
    ordered, remaining = ordered + equals, remaining[count:]
  return ordered


def remedies(
  job: programs.Job, plan: Mapping[str, Any], hardware: chips.Slice
) -> dict[str, Any]:
  """Returns flags with which a program fits the same chips.

  A training step keeps its batch: first mesh, rematerialisation and
  microbatches change, then the optimizer. Evaluation and decoding change the
  mesh and the rows of a batch.

  Args:
    job: the program that does not fit.
    plan: plan of the program. If it was compiled, its memory scales the
      estimates.
    hardware: chips of the job.

  Returns:
    `remedies`, flags of up to three ways, the fastest first; and `advice` for
    a job without any, else None.
  """
  estimate = _Planner(job, hardware).plan({}).plan['memory']['peak']
  # The compiled plan is right: if the model's estimate for it is too low, so
  # are those of its variants.
  doubt = max(1.0, plan['memory']['peak'] / estimate)
  planner = _Planner(job, hardware, doubt)
  for tier in _OPTIMIZERS if job.trains else _OPTIMIZERS[:1]:
    remedies_of_changes = []
    for changes in tier:
      adafactor = job.optimizer.kind == 'adafactor'
      if adafactor and changes.keys() == {'optimizer.moment_dtype'}:
        continue  # It has no first moments.
      fitting = _fastest(_fitting(planner, changes))
      remedies_of_changes.append(fitting[:_REMEDIES])
    # The best of each change, then the second of each.
    mixed = itertools.chain(*itertools.zip_longest(*remedies_of_changes))
    flags = [' '.join(candidate.flags) for candidate in mixed if candidate]
    if flags:
      return {'remedies': flags[:_REMEDIES], 'advice': None}
  return {'remedies': [], 'advice': planner.nothing_fits()}


def _fitting(
  planner: _Planner, changes: Mapping[str, Any]
) -> Iterator[Candidate]:
  """Yields candidates that fit, with the fewest microbatches or most rows."""
  train = planner.job.train
  for mesh in meshes(planner.job, planner.hardware):
    shards = mesh['mesh.replica'] * mesh['mesh.fsdp']
    if planner.job.trains:
      rows, remainder = divmod(train.batch_size, shards)
      if remainder:
        continue
      batches = [
        {'train.batch_size': train.batch_size, 'train.microbatches': n}
        for n in _divisors(rows)
      ]
      # 'full' first: no policy needs less memory.
      names = sorted(execution.REMAT_POLICIES, key='full'.__ne__)
      policies = [{'compute.remat': name} for name in names]
    else:
      rows = max(1, train.eval_batch_size // shards)
      batches = [
        {'train.eval_batch_size': shards * rows // n} for n in _divisors(rows)
      ]
      policies = [{}]
    for policy in policies:
      # A generator: plans after the first that fits are not computed.
      tried = (
        planner.plan({**mesh, **changes, **policy, **batch})
        for batch in batches
      )
      candidate = next((c for c in tried if c.plan['fits']), None)
      if candidate:
        yield candidate
      elif policy is policies[0]:
        break  # Other policies need more memory.


def _divisors(rows: int) -> list[int]:
  powers = [2**n for n in range(rows.bit_length()) if rows % 2**n == 0]
  return sorted({*powers, rows})


def meshes(
  job: programs.Job, hardware: chips.Slice
) -> Iterator[dict[str, Any]]:
  """Yields configuration keys of the meshes that a model divides over.

  Evaluation batches that do not divide are enlarged; training batches are not
  looked at.
  """
  keys = [f'mesh.{axis}' for axis in mesh_lib.AXES]
  for sizes, rules in _meshes(job, hardware):
    changes = dict(zip(keys, sizes, strict=True)) | {'mesh.rules': rules}
    rows, shards = job.train.eval_batch_size, sizes[0] * sizes[1]
    if rows % shards:
      changes['train.eval_batch_size'] = rows + -rows % shards
    yield changes


def _meshes(
  job: programs.Job, hardware: chips.Slice
) -> Iterator[tuple[tuple[int, ...], str]]:
  lengths = [job.lengths.encoder, job.lengths.decoder]
  lengths.append(job.lengths.teacher * job.reads_teacher_row)
  tables = [2**n for n in range(rules_lib.VOCABULARY_GROUP.bit_length())]
  for tensor, sequence, fsdp in itertools.product(_SHARDS, _SHARDS, tables):
    replica, remainder = divmod(hardware.devices, tensor * sequence * fsdp)
    # Only replicas lie across slices: the network between these is slow.
    if remainder or replica % hardware.count:
      continue
    sizes = replica, fsdp, sequence, tensor
    if sequence > 1 and any(
      n % sequence or 0 < n < sequence * _SHORTEST for n in lengths
    ):
      continue
    if not _divides(job, sizes, 'fsdp'):
      continue
    if hardware.chip.kind == 'tpu' and replica == tensor == 1 and fsdp > 2:
      # Shards as with `fsdp`, but for sums over a whole slice, which a TPU's
      # compiler does not scatter (`ops.partition.sum_gradient_in_stages`).
      yield (2, fsdp // 2, sequence, tensor), 'whole_slice'
      continue
    yield sizes, 'fsdp'
    if hardware.count > 1 or replica == 1:
      continue
    # A larger fsdp would shard everything as 'fsdp_replica' does, unless there
    # is none or the tables do not divide over it.
    shards = replica * fsdp
    covered = shards in tables and not any(
      stack.table_rows % (shards * tensor)
      for stack in job.model.stacks.values()
    )
    if not covered and _divides(job, sizes, 'fsdp_replica'):
      yield sizes, 'fsdp_replica'


def _divides(job: programs.Job, sizes: tuple[int, ...], rules: str) -> bool:
  table = parameters.parameter_table(job.model)
  # Abstract, as most of the meshes are refused here.
  mesh = AbstractMesh(sizes, mesh_lib.AXES)
  try:
    placement.parameter_shardings(table, mesh, rules_lib.RULES[rules])
  except ValueError:
    return False
  return True


def text(
  candidates: Iterable[Candidate], hardware: chips.Slice, price: float = 0.0
) -> str:
  """Returns a table of candidates, the best first.

  Args:
    candidates: candidates with times.
    hardware: chips of the job.
    price: price of a chip for an hour; 0 leaves out the cost of the job.
  """
  cost = f' {"cost":>9}' if price else ''
  lines = [f'{"rows/s":>9} {"MFU":>6} {"GiB":>6} {"hours":>7}{cost}  flags']
  for candidate in _fastest(candidates):
    plan, hours = candidate.plan, candidate.hours or 0.0
    if price:
      cost = f' {hours * price * hardware.chips:>9,.0f}'
    lines.append(
      f'{candidate.rate:>9.2f} {plan["mfu"]:>6.1%}'
      f' {plan["memory"]["peak"] / 2**30:>6.1f} {hours:>7.1f}{cost}'
      f'  {" ".join(candidate.flags)}'
    )
  return '\n'.join(lines)
