"""Chooses the fastest `compute.remat` policy that fits device memory.

A policy that saves more values recomputes less and needs more memory. The
estimate (`step_estimate`) ranks the policies, and at most two steps are
compiled to measure their memory; the chosen program is reused. If neither fits,
`full` is compiled at its first call.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
import os
import re
from typing import Any

import jax

from encdec_adapt.base import errors
from encdec_adapt.cluster import distributed
from encdec_adapt.files import disk
from encdec_adapt.models import execution
from encdec_adapt.sharding import compiler, layout_report
from encdec_adapt.telemetry import environment
from encdec_adapt.training import state as state_lib
from encdec_adapt.training import step_estimate, workload

FREE = 0.1  # Fraction of memory kept free, for fragmentation.
LAST = 'full'  # No policy needs less memory.
# XLA appends `.remat` to instructions it rematerialises to save memory, and
# `.rematerialized` to copies of broadcasts in any case.
_BY_XLA = re.compile(r'%[\w.-]*\.remat(?:_\w+)?(?:\.\d+)* = ')
# Fractions of GPU memory: JAX's default, and the advice in the message.
_DEFAULT_SHARE, _LARGEST_SHARE = 0.75, 0.95


@dataclasses.dataclass(frozen=True)
class Trial:
  """A policy with its compiled step.

  Attributes:
    policy: name of the policy.
    bytes: device memory of the step and of the job's other arrays; inf if the
      compiler ran out of memory.
    program: the compiled step, or its plan.
    repeats: whether XLA itself rematerialises, for lack of memory.
  """

  policy: str
  bytes: float
  program: Any = None
  repeats: bool = False

  def fits(self, limit: float) -> bool:
    """Returns whether the step fits without rematerialisation by XLA."""
    return self.bytes <= limit and not self.repeats

  def describe(self) -> str:
    """Returns its memory as text."""
    if math.isinf(self.bytes):
      return 'more than the compiler has'
    repeats = ', in which XLA rematerialises' if self.repeats else ''
    return f'{disk.format_bytes(self.bytes)} compiled{repeats}'


@dataclasses.dataclass(frozen=True)
class Choice:
  """The chosen policy.

  Attributes:
    policy: name of the policy.
    memory: memory of a device; the fraction `FREE` is kept free.
    estimates: estimated bytes by policy, the fastest first.
    trials: the compiled steps, at most two.
  """

  policy: str
  memory: float
  estimates: Mapping[str, float]
  trials: Sequence[Trial]

  @property
  def fits(self) -> bool:
    """Whether the step fits; `LAST` may use all of the memory."""
    last = self.trials[-1]
    return last.policy != LAST or last.bytes <= self.memory

  @property
  def program(self) -> Any:
    """The compiled step; None if not compiled yet."""
    programs = {trial.policy: trial.program for trial in self.trials}
    return programs.get(self.policy)

  def describe(self) -> str:
    """Describes the choice, its memory and its reason."""
    sizes = {}
    # The chosen policy and the faster policies, which do not fit.
    for name, size in self.estimates.items():
      sizes[name] = f'{disk.format_bytes(size)} by the estimate'
      if name == self.policy:
        break
    sizes |= {trial.policy: trial.describe() for trial in self.trials}
    reason = 'the fastest that fits into'
    if self.policy == LAST:
      reason = 'which needs the least memory, as no other fits into'
    limit = disk.format_bytes((1 - FREE) * self.memory)
    return (
      f'compute.remat is {self.policy!r}, {reason} {limit},'
      f' {1 - FREE:.0%} of the memory of a device: '
      + ', '.join(f'{name!r} needs {size}' for name, size in sizes.items())
    )


def estimates(
  work: workload.Workload, held: float, trained: float, platform: str
) -> dict[str, float]:
  """Returns bytes of a step per device by policy, the fastest first.

  Policies with equal recomputed FLOPs are sorted by size.

  Args:
    work: work of the step, with any policy.
    held: bytes of its arguments and of the job's other arrays.
    trained: bytes of the trained parameters.
    platform: 'tpu' or 'gpu'.
  """
  rows = []
  for name in execution.REMAT_POLICIES:
    compute = dataclasses.replace(work.compute, remat=name)
    changed = dataclasses.replace(work, compute=compute)
    parts = step_estimate.parts(changed, trained, platform)
    size = held + sum(parts.values())
    rows.append((step_estimate.recomputed(changed), size, name))
  return {name: size for _, size, name in sorted(rows)}


def choose(
  estimates: Mapping[str, float],
  memory: float,
  compile_step: Callable[[str], Trial],
) -> Choice:
  """Chooses the fastest policy that fits.

  Args:
    estimates: estimated bytes by policy, the fastest first.
    memory: memory of a device.
    compile_step: compiles the step of a policy.
  """
  limit, order = (1 - FREE) * memory, list(estimates)

  def fastest(names: Sequence[str], ratio: float) -> str:
    fit = (name for name in names if ratio * estimates[name] <= limit)
    return next(fit, LAST)

  # Estimates may be too high by the factor `DOUBT`.
  trials = [compile_step(fastest(order, 1 / step_estimate.DOUBT))]
  first = trials[0]
  if first.policy != LAST and not first.fits(limit):
    needed = first.bytes if math.isfinite(first.bytes) else limit
    # Steps rematerialised by XLA would need more memory than they use.
    ratio = max(needed, limit) / estimates[first.policy]
    slower = order[order.index(first.policy) + 1 :]
    trials.append(compile_step(fastest(slower, ratio)))
  last = trials[-1]
  # `LAST` may use the reserve too: no policy needs less.
  policy = last.policy if last.fits(limit) else LAST
  return Choice(policy, memory, estimates, trials)


def compile_trial(
  policy: str, lower: Callable[[str], jax.stages.Lowered], beside: float
) -> Trial:
  """Compiles the step of a policy.

  Args:
    policy: name of the policy.
    lower: traces the step with a policy.
    beside: bytes of the job's arrays other than arguments of the step.
  """
  try:
    program = lower(policy).compile()
  except jax.errors.JaxRuntimeError as error:
    # The message may give only the size of temporary arrays.
    if not compiler.ran_out_of_memory(str(error)):
      raise
    return Trial(policy, math.inf)
  size = compiler.device_bytes(program)
  repeats = repeats_work(program.as_text())
  return Trial(policy, beside + size, program, repeats)


def repeats_work(text: str) -> bool:
  """Returns whether XLA rematerialised instructions of a compiled program."""
  return bool(_BY_XLA.search(text))


def earlier_compute(
  saved: Mapping[str, Any], fingerprint: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns `config.compute` of a checkpoint for resuming.

  Drops `remat` if it was chosen for other devices or another mesh.

  Args:
    saved: `meta` of the checkpoint.
    fingerprint: fingerprint of this start.
  """
  # `convert` saves no fingerprint; the caller rejects its checkpoints.
  before = saved.get('fingerprint', {})
  same = all(before.get(k) == fingerprint[k] for k in ('device_kind', 'mesh'))
  compute = saved['config']['compute']
  return {k: v for k, v in compute.items() if same or k != 'remat'}


def for_job(
  lower: Callable[[str], jax.stages.Lowered],
  work: workload.Workload,
  arguments: tuple[state_lib.TrainState, Any, Any, Any],
  loaded: Any,
  frozen: Any,
  log: Callable[[str], None],
) -> Choice:
  """Chooses the policy of a job on its devices; all processes call it together.

  Counts the step of the last phase, which trains the most parameters, and the
  job's other arrays. Caches of sampling and evaluation and copies of a save
  are freed before the next step and not counted.

  Args:
    lower: traces the step of the last phase with a policy.
    work: work of the step.
    arguments: state, batch, references and base, or their shapes.
    loaded: those arguments that are already in memory.
    frozen: shapes of parameters not loaded yet (reward models).
    log: prints a line.

  Raises:
    UserError: no step fits, or the device memory is unknown.
  """
  device = work.partition.device
  limit, used = environment.memory_limit_and_use()
  if limit is None:
    raise errors.UserError(
      f"config.compute.remat is 'auto', and the memory of {device.device_kind}"
      f" cannot be read; name a policy: 'dots' is the fastest, {LAST!r} needs"
      ' the least memory.'
    )
  size = layout_report.device_bytes
  # Negative if a reference shares arrays with the base: a step counts both.
  beside = used - size(loaded) + size(frozen)
  limits, besides = zip(
    *distributed.gather('memory', (limit, beside)), strict=True
  )
  limit, beside = float(min(limits)), max(besides)
  log(f'memory of a device: {disk.format_bytes(limit)}{_advice(device, limit)}')

  def compile_step(policy: str) -> Trial:
    policy = distributed.from_lead(lambda: policy, 'remat')
    log(f'compiling the step with compute.remat={policy!r}')
    trial = compile_trial(policy, lower, beside)
    sizes, repeats = zip(
      *distributed.gather('remat', (trial.bytes, trial.repeats)), strict=True
    )
    return dataclasses.replace(trial, bytes=max(sizes), repeats=any(repeats))

  held, trained = beside + size(arguments), size(arguments[0].params)
  ranked = estimates(work, held, trained, device.platform)
  choice = choose(ranked, limit, compile_step)
  if not choice.fits:
    needed = choice.trials[-1].bytes
    needed = needed if math.isfinite(needed) else ranked[LAST]
    raise errors.UserError(
      f'no policy of config.compute.remat fits: with {LAST!r} a step needs'
      f' {disk.format_bytes(needed)} of a device, which has'
      f' {disk.format_bytes(limit)}. Compute fewer rows at a time'
      ' (config.train.batch_size, or more of config.train.microbatches),'
      ' shorten them (config.data.encoder_length, config.data.decoder_length),'
      ' or take chips with more memory or more of them; `python -m'
      ' encdec_adapt.plan` prints settings that fit.'
    )
  log(choice.describe())
  return choice


def _advice(device: jax.Device, limit: float) -> str:
  names = 'XLA_PYTHON_CLIENT_MEM_FRACTION', 'XLA_CLIENT_MEM_FRACTION'
  if device.platform != 'gpu' or any(name in os.environ for name in names):
    return ''
  size = limit * _LARGEST_SHARE / _DEFAULT_SHARE
  return f'; {names[0]}={_LARGEST_SHARE} would give {disk.format_bytes(size)}'
