r"""Trains a model: a full job, from configuration to last checkpoint.

    python -m encdec_adapt.train --config=configs/quickstart.py:run=adapted \
      --workdir=runs/adapted [--config.train.steps=500]

Repeating the command resumes an interrupted job.

`train` reads from top to bottom: models and start, data, state, loop objects,
steps, end. A recipe (`training/recipes/`) declares the inputs and metrics of a
kind of training, `training/jobs/` opens them, `training/start.py` reads the
initial state, and the update is in `training/step.py`.
"""

from collections.abc import Mapping
import contextlib
import functools
import time

from absl import flags
import jax
import ml_collections

from encdec_adapt import config as config_lib
from encdec_adapt.base import exit_status
from encdec_adapt.checkpoints import manager, resume_checks
from encdec_adapt.cli import command
from encdec_adapt.cluster import (
  code_limits,
  distributed,
  lock,
  preemption,
)
from encdec_adapt.cluster import watchdog as watchdog_lib
from encdec_adapt.evaluation import evaluators as evaluators_lib
from encdec_adapt.files import paths
from encdec_adapt.planner import job_memory
from encdec_adapt.stored import inherited_framing, run_artifacts
from encdec_adapt.telemetry import job_log, profiling
from encdec_adapt.training import job_telemetry, setup
from encdec_adapt.training import start as start_lib
from encdec_adapt.training import step as step_lib
from encdec_adapt.training.jobs import (
  completion_rewards,
  open_batches,
)
from encdec_adapt.training.jobs import job as job_lib
from encdec_adapt.training.jobs import resolved as resolved_lib

define_flags = command.define(
  command.define_config,
  command.string('workdir', 'Work directory of the job.'),
  command.boolean_or_all(
    'print_config',
    'Print the configuration and exit; =all with sections that are off.',
  ),
  command.boolean('dry_run', 'Print shapes, memory and adaptation; exit.'),
  command.boolean('allow_code', 'Run programs that the model generates.'),
  command.define_processes,
)


def main(values: flags.FlagValues) -> int:
  """Runs the command; returns the exit status."""
  command.require(values, 'config')
  if values.print_config:
    full = values.print_config == 'all'
    print(config_lib.page(values.config.to_dict(), full=full))
    return 0
  with profiling.listening(), command.processes(values):
    if values.dry_run:
      workdir = values.workdir or ''
      settings = config_lib.load(values.config, workdir, sources=False)
      print(job_memory.describe(settings))
      return 0
    command.require(values, 'workdir')
    explained = job_memory.explained(values['config'])
    with explained, code_limits.allowed(values.allow_code):
      made_by = command.made_by(values, 'train')
      return run(values.config, values.workdir, made_by)


def run(
  config: ml_collections.ConfigDict,
  workdir: str,
  made_by: Mapping[str, str] | None = None,
) -> int:
  """Validates the configuration, locks the work directory, and trains."""
  config = config_lib.pinned(config, workdir)
  config = inherited_framing.inherit(config, workdir)
  settings, made_by = config_lib.load(config, workdir), made_by or {}
  # Stated, so that opening a model needs neither loss nor vocabulary.
  config = config_lib.with_implied(config, settings.model)
  with contextlib.ExitStack() as stack:
    if distributed.is_lead():
      stack.enter_context(lock.hold(workdir))
      line = made_by.get('command', '')
      stack.enter_context(job_log.JobLog(workdir, line))
    return train(config, settings, workdir, made_by)


def train(
  config: ml_collections.ConfigDict,
  settings: config_lib.Settings,
  workdir: str,
  made_by: Mapping[str, str],
) -> int:
  """Trains to the last step, or until the job is preempted.

  Args:
    config: the configuration, saved with every checkpoint.
    settings: the validated configuration.
    workdir: work directory; an existing job there is resumed.
    made_by: description of the command, saved in the work directory.

  Returns:
    Exit status: 0, or `exit_status.RESTART` after saving at a preemption.

  Raises:
    UserError: bad input, found before the first step; all checkpoints are
      damaged; or too many consecutive updates or the final losses are not
      finite.
  """
  recipe = settings.recipe

  # -- Models and checkpoint to start from -------------------------------------

  mesh = setup.make_mesh(settings.mesh, settings.compute.compile_cache)
  setup.check_job(
    settings.train, settings.data, settings.compute, mesh, settings.rules
  )
  tasks = evaluators_lib.read_tasks(settings)
  checkpoints = manager.Checkpoints(
    paths.join(workdir, manager.FOLDER), settings.checkpoint
  )
  saved = checkpoints.latest()  # None for a new job.
  # Only opened: parameters are read below, after the other inputs are checked.
  phases, frozen = job_lib.open_models(settings, mesh, saved)
  steps = settings.train.steps
  setup.require_space(checkpoints, phases, settings.checkpoint, steps)
  if saved is None:
    checkpoints.check_not_lost()
  start = start_lib.Start(config, settings, saved, phases)

  # -- Data --------------------------------------------------------------------

  data = setup.open_data(settings.data)
  start.check_rows(data.train)
  frozen.check(data.train)
  loader = open_batches.open_loader(
    settings, data, phases.placement, frozen, start.cost, start.step
  )
  if not steps:  # The records determine the length of the job.
    steps = start.step + loader.remaining
    setup.require_space(checkpoints, phases, settings.checkpoint, steps)
  resolved = resolved_lib.Resolved.of(
    settings, phases.placement.model.compute, steps
  )
  job = job_lib.Job(workdir, settings, resolved, phases, frozen, data, loader)
  distributed.log(job.describe())

  # -- State -------------------------------------------------------------------

  state, trained, meta = start.begin(job, made_by)

  # -- Loop objects ------------------------------------------------------------

  telemetry = job_telemetry.JobTelemetry(
    workdir,
    settings.train,
    recipe.metrics,
    meta['config'],
    saved and saved.step,
    resume_checks.report_end(
      loader.remaining, start.step, steps, distributed.log
    ),
    start.cost,
    job.flops(),
  )
  watchdog = watchdog_lib.Watchdog(
    workdir, jax.process_index(), settings.train.hang_seconds
  )
  profiler = profiling.Profiler(
    workdir,
    jax.process_index() if jax.process_count() > 1 else None,
    settings.train.profile_from,
    settings.train.profile_steps,
    writing=lambda step: watchdog.beat(step, 'profile'),
  )
  batches = open_batches.open_batches(job, telemetry, watchdog)
  evaluators = evaluators_lib.Evaluators(
    job, meta['config'], tasks, trained, telemetry, watchdog, batches
  )

  def save(step, state, rank=None):
    with telemetry.phase(watchdog, step, 'save'):
      totals = telemetry.saved(loader.order)
      checkpoints.save(step, state, data=totals, meta=meta, loss=rank)

  # -- Steps -------------------------------------------------------------------

  step, stopping, last = start.step, False, False
  with contextlib.ExitStack() as stack:
    # Closed in reverse order: the checkpoints first, to complete the last save
    # even after an exception, unless another process is missing.
    stop = stack.enter_context(preemption.StopSignal())
    for resource in (watchdog, profiler, telemetry, checkpoints):
      stack.enter_context(resource)
    # Completing a save may take longer than a step's timeout.
    stack.callback(lambda: watchdog.beat(step, 'save'))

    if saved is None:
      evaluators.run(step, state)
    while (
      step < steps
      and loader.remaining != 0
      and not (stopping or telemetry.stagnates or telemetry.over_budget)
    ):
      step_start = time.perf_counter()

      # Phase: the trainable groups. Each phase compiles a step function.
      compiling = step == start.step or phases.begins(step)
      if compiling:
        state = phases.thaw(state, step)
        train_step = trained.make_step(step)

      # Batch: the local rows, with completions sampled from the model.
      watchdog.beat(step, 'compile' if compiling else 'step')
      try:
        rows, numbers, sampled = batches.next(
          step, functools.partial(trained.params, state)
        )
      except completion_rewards.RewardError:
        # Save the current step.
        checkpoints.wait()
        if step not in (0, *checkpoints.all_steps()):
          save(step, state)
        raise
      if sampled:
        watchdog.beat(step, 'compile' if compiling else 'step')
      if step == start.step and distributed.is_lead():
        run_artifacts.remove_summary(workdir)  # Of an earlier, shorter job.

      # Update. Dispatch is asynchronous: the host continues immediately.
      profiler.begin_step(step)
      with telemetry.spent('compile' if compiling else 'dispatch'):
        batch = step_lib.place_batch(rows, job.placement, recipe.rows.axes)
        state, metrics = train_step(state, batch)
      if compiling:
        telemetry.compiled()
      profiler.end_step(step, metrics)
      step += 1
      # Reads the metrics of the previous step, to keep the device busy.
      telemetry.dispatched(step, metrics | sampled, numbers, loader.position)

      # Evaluation and checkpoint. All processes decide the same.
      stopping = stop.reached(step)
      last = step == steps or loader.remaining == 0
      thawing = phases.begins(step)
      saving = last or thawing or step % resolved.save_every == 0
      evaluating = last or evaluators.is_due(step)
      evaluating |= saving and settings.checkpoint.keep_best
      saving |= stopping  # A preemption leaves no time to evaluate.
      # Saved costs include this step. A sampler waits for parameters anyway.
      if evaluating or saving or compiling or sampled:
        telemetry.read()
      if not compiling:
        telemetry.count(time.perf_counter() - step_start)
      if telemetry.over_budget:
        break
      rank = evaluators.run(step, state, last) if evaluating else None
      if saving or telemetry.stagnates:
        save(step, state, rank)
      if evaluating or saving:
        telemetry.pause()
      if thawing:
        # Complete the save first, as thawing may run out of memory.
        checkpoints.wait()

    if not (stopping or telemetry.over_budget) and telemetry.evaluated != step:
      # `steps` was lowered to an already saved step.
      evaluators.run(step, state, last=True)
    watchdog.beat(step, 'save')
    checkpoints.wait()
    # The KL is measured on the policy of the previous step.
    within = checkpoints.discard(step - 1) if telemetry.over_budget else None

  # -- End ---------------------------------------------------------------------

  loader.close()
  if stopping and not (last or telemetry.over_budget):
    distributed.log(
      f'asked to stop: saved step {step}, exiting with {exit_status.RESTART}'
    )
    return exit_status.RESTART
  if note := telemetry.describe_end(step, steps, within):
    distributed.log(note)
  if distributed.is_lead():
    used = step if within is None else within
    run_artifacts.write_summary(
      workdir, settings, used, start.cost, meta['sources']
    )
  # Process 0 must commit the last checkpoint before any process exits.
  distributed.barrier('the end')
  return 0


if __name__ == '__main__':
  command.main(__doc__, define_flags, main)
