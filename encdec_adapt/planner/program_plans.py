"""Plans for the programs of a job on chips elsewhere."""

import math
from typing import Any

import jax
from jax.sharding import Mesh

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.files import disk
from encdec_adapt.models import execution
from encdec_adapt.planner import (
  analytic_estimate,
  chips,
  hlo,
  plan_report,
  plan_search,
  programs,
)
from encdec_adapt.sharding import layout_report
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.telemetry import environment, progress
from encdec_adapt.training import remat_choice, setup

# Host memory for compilation: the recipes for H100 and H200 took 1.6 GiB
# (maximum resident set size), with scanned layers.
_COMPILER_BYTES = 4 * 2**30


def make(
  settings: config_lib.Settings,
  slices: chips.Slice,
  names: list[str],
  examples: int = 1,
) -> dict[str, dict[str, Any]]:
  """Plans the named programs; see `plan_report.describe`.

  Raises:
    UserError: the mesh or a batch is not divisible, libtpu is missing, the
      topology does not exist, or the compiler fails.
  """
  mesh, plans = make_mesh(settings, slices), {}
  for name in progress.counted(names, 'planning'):
    job = programs.Job.of(name, settings, slices.chip.kind, mesh, examples)
    job, plans[name] = choose_and_plan(job, slices)
    if not plans[name]['fits']:
      plans[name] |= plan_search.remedies(job, plans[name], slices)
  return plans


def make_mesh(settings: config_lib.Settings, slices: chips.Slice) -> Mesh:
  """Creates a job's mesh on abstract devices of the chips.

  Raises:
    UserError: the mesh or a batch is not divisible.
  """
  try:
    mesh = mesh_lib.make_mesh(settings.mesh, chips.devices_of(slices))
  except ValueError as error:
    raise errors.UserError(str(error)) from error
  lengths = settings.data.train.lengths
  setup.check_batches(settings.train, lengths, mesh, settings.rules)
  return mesh


def plan(job: programs.Job, slices: chips.Slice) -> dict[str, Any]:
  """Plans a program, and compiles it if a compiler is installed.

  Raises:
    UserError: the compiler fails for a reason other than memory, or the
      compiled program has an unsupported form.
  """
  program = job.program()
  notes = {
    # Listed because a replicated array takes its full size on every device.
    'replicated': layout_report.replicated(program.rows()),
    'missing_rewards': job.rewards.missing,
  }
  compiler = chips.compiler(slices.chip.kind)
  if not compiler:
    arguments = analytic_estimate.Arguments.of(job, program)
    return analytic_estimate.describe(job, slices, arguments) | notes
  subject = f'program {job.name!r} for {slices.name} x {slices.count}'
  free = (environment.memory_free() or 0) * jax.local_device_count()
  if 0 < free < _COMPILER_BYTES:
    raise errors.UserError(
      f'{subject}: the compiler needs {disk.format_bytes(_COMPILER_BYTES)} of'
      f" this machine's memory, of which {disk.format_bytes(free)} are free."
      ' Stop other processes, or plan on another machine.'
    )
  # Flushed: compilation takes a minute, or hours for many chips.
  print(f'compiling {subject} by {compiler} ..', flush=True)
  try:
    return plan_report.describe(job, slices, program) | notes
  except hlo.UnknownProgramError as error:
    raise errors.UserError(
      f'{subject}, has parts that are not understood: {error}. Please report'
      f' this, with {compiler} and the command. --search first prints estimates'
      ' that compile nothing.'
    ) from error
  except errors.UserError:
    raise
  except ValueError as error:  # Decoding shares no length, for example.
    raise errors.UserError(f'{subject}: {error} Change config.mesh.') from error
  except jax.errors.JaxRuntimeError as error:
    raise errors.UserError(
      f'{compiler} fails on {subject}: {first_line(error)}. Change'
      ' config.mesh, the topology or its version.'
    ) from error


def choose_and_plan(
  job: programs.Job, slices: chips.Slice
) -> tuple[programs.Job, dict[str, Any]]:
  """Plans a program, choosing the remat policy of a training step.

  If `compute.remat` is 'auto', the policy is chosen as in a training job, and
  the plan has `policies`: per-device bytes and seconds of each planned policy.

  Returns:
    The job with its remat policy, and its plan.

  Raises:
    UserError: see `plan`.
  """
  if not (job.trains and job.resolved.compute.remat == execution.AUTO):
    return job, plan(job, slices)
  sizes = analytic_estimate.Arguments.of(job, job.program())
  held = sum((*sizes.bytes.values(), *sizes.beside.values()))
  trained, kind = sizes.bytes['parameters'], slices.chip.kind
  plans, jobs = {}, {}

  def trial(policy: str) -> remat_choice.Trial:
    jobs[policy] = job.with_remat(policy)
    result = plans[policy] = plan(jobs[policy], slices)
    memory = result['memory']
    # No times: the compiler ran out of memory.
    peak = memory['peak'] if result['roofline'] else math.inf
    repeats = memory.get('repeats', False)
    return remat_choice.Trial(policy, peak, result, repeats)

  estimates = remat_choice.estimates(job.work, held, trained, kind)
  memory = float(slices.chip.hbm_bytes)
  choice = remat_choice.choose(estimates, memory, trial)
  if choice.program is None:
    trial(choice.policy)
  policies = {
    name: {
      'bytes': result['memory']['peak'],
      'seconds': result['roofline'] and result['roofline']['step_s'],
    }
    for name, result in plans.items()
  }
  chosen = choice.policy
  return jobs[chosen], plans[chosen] | {'policies': policies}


def first_line(error: Exception) -> str:
  """Returns the first line of an error, without stack frames or HLO."""
  return str(error).strip().splitlines()[0]
