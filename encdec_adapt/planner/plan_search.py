"""Search over meshes, rematerialisation and microbatches for given chips.

`ranked` ranks training configurations by speed, `remedies` finds changes that
make a job fit; both keep the training batch size and rank with
`analytic_estimate`. `encdec_adapt.plan --search` compiles the best candidates
and ranks them again. This module compiles nothing, and must not import
`plan_report`.
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

# Rows per microbatch on a device, or on the devices that share a row.
_ROWS = (1, 2, 4, 8)
# Relative difference within which candidates tie, the accuracy of estimates.
_EQUAL = 0.02
_SHARDS = (1, 2, 4, 8)  # Shards of heads, or of the length.
# Minimum tokens in a sequence shard: a block of the attention kernels.
_SHORTEST = 512
_REMEDIES = 3  # Maximum number of reported remedies.
# Optimizer changes that reduce device state, tried in turn. The last two are
# offered together: offloading costs time and Adafactor changes the training, so
# neither is always better.
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
  """A changed configuration of a program, with its plan.

  Attributes:
    job: the changed job, on its mesh.
    flags: flags of the changes.
    plan: analytic plan, or the compiled plan that replaces it.
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
    """Hours of the whole training run; None without times."""
    steps = self.job.settings.train.steps
    return steps * self.job.rows / self.rate / 3600 if self.rate else None


@dataclasses.dataclass
class _Planner:
  """Plans a program with changed settings on the same devices.

  Argument sizes take most of the time, so they are cached by optimizer and
  parameter sharding.

  Attributes:
    job: the job.
    hardware: chips of the job.
    doubt: safety factor of memory estimates.
    least: peak bytes of the smallest plan so far.
  """

  job: programs.Job
  hardware: chips.Slice
  doubt: float = 1.0
  least: float = float('inf')
  _sizes: dict[Any, analytic_estimate.Arguments] = dataclasses.field(
    default_factory=dict
  )

  def plan(self, changes: Mapping[str, Any]) -> Candidate:
    """Plans the job with changed configuration keys.

    Args:
      changes: values by configuration key, such as 'train.batch_size'.
    """
    job = _changed(self.job, changes)
    plan = analytic_estimate.describe(job, self.hardware, self._arguments(job))
    peak = self.doubt * plan['memory']['peak']
    plan['fits'] = peak <= self.hardware.chip.hbm_bytes
    self.least = min(self.least, peak)
    flags = (f'--config.{key}={value}' for key, value in changes.items())
    return Candidate(job, tuple(flags), plan)

  def _arguments(self, job: programs.Job) -> analytic_estimate.Arguments:
    rules = job.settings.rules
    # These axes alone determine the sizes of trained parameters. Arguments of
    # other programs, such as caches, are sharded over other axes too.
    key = (job.settings.optimizer, not job.trains and job.mesh) + tuple(
      tuple(job.mesh.shape[axis] for axis in axes)
      for axes in (rules.embed, rules.vocab, rules.heads)
    )
    if key not in self._sizes:
      # Any divisible batch works, since its size is scaled.
      rows = rules.on(job.mesh).size('batch')
      changes = {'train.batch_size': rows, 'train.microbatches': 1}
      if not job.trains:
        changes = {'train.eval_batch_size': rows}
      smallest = _changed(job, changes)
      sizes = analytic_estimate.Arguments.of(smallest, smallest.program())
      self._sizes[key] = sizes
    return self._sizes[key]

  def nothing_fits(self) -> str:
    """Returns the message for a job without fitting candidates."""
    chip, hardware = self.hardware.chip, self.hardware
    return (
      f'nothing fits into {hardware.name} x {hardware.count}: the least'
      f' that any candidate needs is {disk.format_bytes(self.least)} of'
      f' {disk.format_bytes(chip.hbm_bytes)} a device. Take more'
      ' chips, chips with more memory, or shorter rows'
      ' (config.data.encoder_length, config.data.decoder_length).'
    )


def _changed(job: programs.Job, changes: Mapping[str, Any]) -> programs.Job:
  """Returns the job with changed configuration keys.

  All keys of a section change at once, since a single change may be invalid,
  such as a batch size not divisible by the old number of microbatches.
  """
  sections: dict[str, dict[str, Any]] = {}
  for key, value in changes.items():
    section, name = key.split('.')
    sections.setdefault(section, {})[name] = value
  if remat := sections.pop('compute', {}).get('remat'):
    job = job.with_remat(remat)
  settings = dataclasses.replace(
    job.settings,
    **{
      name: dataclasses.replace(getattr(job.settings, name), **values)
      for name, values in sections.items()
    },
  )
  mesh = job.mesh
  if 'mesh' in sections:
    mesh = mesh_lib.make_mesh(settings.mesh, list(mesh.devices.flat))
  return dataclasses.replace(job, mesh=mesh, settings=settings)


def ranked(job: programs.Job, hardware: chips.Slice) -> list[Candidate]:
  """Returns training candidates that may fit, fastest first.

  Args:
    job: the training step, on any mesh of the devices or stand-ins.
    hardware: chips of the job.

  Raises:
    UserError: no candidate fits.
  """
  planner, size = _Planner(job, hardware), job.settings.train.batch_size
  most = step_estimate.DOUBT * hardware.chip.hbm_bytes
  candidates = []
  for mesh in meshes(job, hardware):
    shards = mesh['mesh.replica'] * mesh['mesh.fsdp']
    # Row counts must divide the batch size, which stays unchanged.
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
  """Sorts candidates by speed, then ties by memory."""
  remaining = sorted(candidates, key=lambda candidate: -candidate.rate)
  ordered: list[Candidate] = []
  while remaining:
    least = (1 - _EQUAL) * remaining[0].rate
    count = sum(candidate.rate >= least for candidate in remaining)
    # Lower memory leaves room for estimation errors.
    equals = sorted(remaining[:count], key=lambda c: c.plan['memory']['peak'])
    ordered, remaining = ordered + equals, remaining[count:]
  return ordered


def remedies(
  job: programs.Job, plan: Mapping[str, Any], hardware: chips.Slice
) -> dict[str, Any]:
  """Returns flags that make a program fit the same chips.

  A training step keeps its batch size: mesh, rematerialisation and microbatches
  change first, then the optimizer. Evaluation and decoding change the mesh and
  the batch size.

  Args:
    job: the program that does not fit.
    plan: plan of the program. Estimates are scaled up to its peak memory.
    hardware: chips of the job.

  Returns:
    `remedies`: up to three sets of flags, fastest first; `advice`: text if
    there are none, else None.
  """
  estimate = _Planner(job, hardware).plan({}).plan['memory']['peak']
  # Trusts the compiled plan: if the analytic estimate is too low for it, so are
  # the estimates of its variants.
  doubt = max(1.0, plan['memory']['peak'] / estimate)
  planner = _Planner(job, hardware, doubt)
  for tier in _OPTIMIZERS if job.trains else _OPTIMIZERS[:1]:
    remedies_of_changes = []
    for changes in tier:
      adafactor = job.settings.optimizer.kind == 'adafactor'
      if adafactor and changes.keys() == {'optimizer.moment_dtype'}:
        continue  # It has no first moments.
      fitting = _fastest(_fitting(planner, changes))
      remedies_of_changes.append(fitting[:_REMEDIES])
    # The best candidate of each change, then the second best of each.
    mixed = itertools.chain(*itertools.zip_longest(*remedies_of_changes))
    flags = [' '.join(candidate.flags) for candidate in mixed if candidate]
    if flags:
      return {'remedies': flags[:_REMEDIES], 'advice': None}
  return {'remedies': [], 'advice': planner.nothing_fits()}


def _fitting(
  planner: _Planner, changes: Mapping[str, Any]
) -> Iterator[Candidate]:
  """Yields fitting candidates with the fewest microbatches or largest batch."""
  train = planner.job.settings.train
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
      # 'full' comes first: it needs the least memory.
      names = sorted(execution.REMAT_POLICIES, key='full'.__ne__)
      policies = [{'compute.remat': name} for name in names]
    else:
      rows = max(1, train.eval_batch_size // shards)
      batches = [
        {'train.eval_batch_size': shards * rows // n} for n in _divisors(rows)
      ]
      policies = [{}]
    for policy in policies:
      # Lazy: stops planning at the first fit.
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
  """Yields configuration changes for meshes that the model divides over.

  Indivisible evaluation batches are enlarged; training batches are not checked.
  """
  keys = [f'mesh.{axis}' for axis in mesh_lib.AXES]
  for sizes, rules in _meshes(job, hardware):
    changes = dict(zip(keys, sizes, strict=True)) | {'mesh.rules': rules}
    rows, shards = job.settings.train.eval_batch_size, sizes[0] * sizes[1]
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
    # Only replicas span slices: the network between slices is slow.
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
      # Shards like `fsdp`, but avoids gradient sums over a whole slice, which
      # XLA:TPU does not scatter (`ops.partition.sum_gradient_in_stages`).
      yield (2, fsdp // 2, sequence, tensor), 'whole_slice'
      continue
    yield sizes, 'fsdp'
    if hardware.count > 1 or replica == 1:
      continue
    # 'fsdp_replica' is redundant if a larger fsdp axis exists and divides the
    # embedding tables.
    shards = replica * fsdp
    covered = shards in tables and not any(
      stack.table_rows % (shards * tensor)
      for stack in job.model.stacks.values()
    )
    if not covered and _divides(job, sizes, 'fsdp_replica'):
      yield sizes, 'fsdp_replica'


def _divides(job: programs.Job, sizes: tuple[int, ...], rules: str) -> bool:
  table = parameters.parameter_table(job.model)
  # Abstract, since most meshes are rejected here.
  mesh = AbstractMesh(sizes, mesh_lib.AXES)
  try:
    placement.parameter_shardings(table, mesh, rules_lib.RULES[rules])
  except ValueError:
    return False
  return True


def text(
  candidates: Iterable[Candidate], hardware: chips.Slice, price: float = 0.0
) -> str:
  """Formats a table of candidates, best first.

  Args:
    candidates: candidates with times.
    hardware: chips of the job.
    price: price per chip-hour; 0 omits the cost.
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
