r"""Trains a model: a whole job, from configuration to last checkpoint.

    python -m encdec_adapt.train --config=configs/quickstart.py:run=adapted \
      --workdir=runs/adapted [--config.train.steps=500]

A job that ended early resumes when the same command is given again.

`train` reads from top to bottom: models, checkpoint to start from, data, state,
loop objects, steps, end. Mesh, models and data, which other commands build too,
are in `training/setup.py`; models on disk that a job starts from are opened by
`conversion/initial_state.py`; the loss and the update are in `training/losses/`
and `training/step.py`.
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
  host_memory,
  lock,
  preemption,
)
from encdec_adapt.cluster import watchdog as watchdog_lib
from encdec_adapt.conversion import (
  frozen_base,
  inherited_framing,
  initial_state,
  run_artifacts,
)
from encdec_adapt.data.records import row_rates, stored_teacher
from encdec_adapt.evaluation import evaluators as evaluators_lib
from encdec_adapt.evaluation.measures import completion_rewards
from encdec_adapt.files import paths
from encdec_adapt.models import execution, parameters
from encdec_adapt.planning import dry_run, out_of_memory
from encdec_adapt.telemetry import (
  compute_cost,
  environment,
  job_log,
  profiling,
  trackers,
)
from encdec_adapt.training import (
  job_telemetry,
  on_policy,
  remat_choice,
  setup,
  workload,
)
from encdec_adapt.training import phases as phases_lib
from encdec_adapt.training import step as step_lib
from encdec_adapt.training.losses import loss as loss_lib
from encdec_adapt.training.metrics import held_out_metrics

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
      print(dry_run.describe(settings))
      return 0
    command.require(values, 'workdir')
    explained = out_of_memory.explained(values['config'])
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
    workdir: work directory; a job that was started there is resumed.
    made_by: description of the command, saved in the work directory.

  Returns:
    Exit status: 0, or `exit_status.RESTART` after a preemption was saved.

  Raises:
    UserError: bad input, found before the first step; checkpoints exist but
      none is undamaged; or too many updates in a row are not finite, or the
      losses with which the job ends.
  """
  log = print if distributed.is_lead() else lambda *_: None
  steps, model, recipe = settings.train.steps, settings.model, settings.recipe
  lengths = settings.data.train.lengths

  # -- Models ------------------------------------------------------------------

  mesh = setup.make_mesh(settings.mesh, settings.compute.compile_cache)
  platform = mesh.devices.flat[0].platform
  if platform == 'cpu':
    host_memory.keep_freed(parameters.count(model))
  setup.check_attention(settings.compute.attention, platform)
  setup.check_batches(settings.train, lengths, mesh, settings.rules)
  setup.check_vocabularies(settings.data)
  tasks = evaluators_lib.read_tasks(settings)
  if distributed.is_lead():
    trackers.check(settings.train.trackers)
  checkpoints = manager.Checkpoints(
    paths.join(workdir, manager.FOLDER), settings.checkpoint
  )
  start = checkpoints.latest()  # A step, or None for a new job.
  saved = None if start is None else checkpoints.at(start).read_meta()
  fingerprint = environment.fingerprint() | {'mesh': dict(mesh.shape)}
  # From here on neither has a value that depends on the devices ('auto'), but
  # `compute.remat`, which is chosen when all else is in memory.
  settings = settings.on(
    platform, saved and remat_choice.earlier_compute(saved, fingerprint)
  )
  setup.check_stacks(settings.compute, model, mesh.devices.flat[0])
  config = config.copy_and_resolve_references()
  config.compute.dtype = settings.compute.dtype
  config.compute.remat = settings.compute.remat
  placement = setup.place_model(
    model, settings.compute, mesh, settings.rules, settings.adapters
  )
  references = initial_state.open_references(
    recipe.frozen,
    settings.teacher.dtype,
    placement,
    settings.compute,
    settings.data.vocabularies,
    recipe.rows.lengths,
  )
  # Opened only: parameters are read below, when other inputs are checked.
  frozen = {name: r.placement.model for name, r in references.items()}
  rewards = completion_rewards.open_rewards(settings, placement)
  make_phases = functools.partial(
    phases_lib.Phases, placement, recipe, models=frozen
  )
  phases = make_phases(settings.optimizer, settings.train)

  # -- Checkpoint to start from ------------------------------------------------

  setup.require_space(checkpoints, phases, settings.checkpoint, steps)
  if start is None:
    checkpoints.check_not_lost()
    cost = compute_cost.Cost()
    sources = initial_state.open_sources(
      settings.init, settings.compute, placement
    )
    sources.check_files(settings.data.vocabularies)
    if recipe.sampling:
      sources.check_positions(recipe.rows.lengths)
    sources.check_optimizer(phases)
    base = sources.base
  else:
    checkpoint = checkpoints.at(start)
    resume_checks.check_config(saved, config.to_dict(), log)
    checkpoint.require_same(phases.abstract_saved(start))
    base = None
    if placement.adapters:
      moved = settings.init.encoder
      base = frozen_base.reopen(saved, moved, placement)
    cost = compute_cost.Cost(**checkpoint.read_data())

  # -- Data --------------------------------------------------------------------

  data = setup.open_data(settings.data)
  order = {'records': data.train.digests, 'seed': settings.seed}
  if start is not None:
    resume_checks.check_same_rows(
      saved['order'], order, cost.rows_of_parts, data.train.ranges
    )
  if rewards:
    rewards.check(data.train)
  shapes = [reference.config for reference in frozen.values()]
  teacher_row = setup.reads_teacher_row(lengths, model, *shapes)
  stored = None
  if folder := recipe.rows.stored_teacher:
    stored = stored_teacher.StoredTeacher(folder, data.train)
  batches = setup.training_batches(
    data.train,
    settings.train.batch_size,
    placement,
    position=cost.rows,
    consumed=cost.rows_of_parts or None,
    first_step=start or 0,
    seed=settings.seed,
    repeat=settings.data.repeat,
    rates=row_rates.parse(settings.data.rates),
    teacher=teacher_row,
    stored=stored,
  )
  if not steps:  # The records are the length of the job.
    settings = settings.until_end(start or 0, batches.total - cost.rows)
    steps = settings.train.steps
    phases = make_phases(settings.optimizer, settings.train)
    setup.require_space(checkpoints, phases, settings.checkpoint, steps)
  log(
    f'{type(model).__name__}: {parameters.count(model):,} parameters on'
    f' {dict(mesh.shape)}; {len(data.train):,} training rows, {steps:,} steps'
  )

  # -- State -------------------------------------------------------------------

  meta = {  # Saved with every state.
    'config': config.to_dict(),
    'environment': environment.report(),
    'fingerprint': fingerprint,
    'vocabularies': data.vocabularies.describe(),
    'order': order,
  }
  base_params = {}  # Frozen: no part of the state, nor of checkpoints.
  if base:
    meta['base'] = base.describe()
    distributed.require_same('base', {'init.encoder': meta['base']['digest']})
    base_params = base.read()
    log(f'{placement.adapters.description}; the base {meta["base"]["name"]}')
  attach = functools.partial(placement.attach, base_params)
  # The first step donates the buffers of the state: another reference to the
  # parameters would keep them in memory twice.
  if start is None:
    meta['sources'] = sources.costs(references.values(), log)
    state = sources.start(phases, settings.seed)
    if sources.models and sources.coverage:
      log(sources.coverage.summary())
    if distributed.is_lead():
      run_artifacts.write_initial(workdir, sources, data.vocabularies)
  else:
    meta['sources'] = saved['sources']
    resume_checks.report_environment(saved, meta, log)
    state = checkpoint.restore(phases.abstract_saved(start))
    log(f'resuming at step {start}')
  reference_params, digests = initial_state.read_references(
    references, base, base_params
  )
  if stored:
    digests['teacher'] = stored.digest
    # Each process may have a disk of its own.
    facts = {'teacher.stored': stored.digest}
    distributed.require_same('stored teacher', facts)
  if rewards:
    digests |= rewards.digests
  meta['references'] = digests
  if start is not None:
    resume_checks.check_same_references(saved, meta)
  if saved and saved['config']['compute']['remat'] == config.compute.remat:
    meta['remat'] = saved.get('remat')  # The choice of 'auto', as text.
  if config.compute.remat == execution.AUTO:
    batch = setup.abstract_batch(
      placement,
      recipe.rows,
      settings.train.batch_size,
      teacher=teacher_row,
    )
    work = workload.of_step(placement, recipe, settings.train, shapes)
    # The last phase, which trains the most parameters.
    abstract = phases.abstract()
    others = batch, reference_params, base_params
    choice = remat_choice.for_job(
      lambda x: phases.with_remat(x).make_step().lower(abstract, *others),
      work,
      (abstract, *others),
      (state, *others[1:]),
      rewards.models if rewards else [],
      log,
    )
    phases = phases.with_remat(choice.policy, choice.program)
    config.compute.remat = choice.policy
    meta |= {'config': config.to_dict(), 'remat': choice.describe()}
    del choice  # A step that does not fit takes memory as long as it is loaded.
  if distributed.is_lead():
    run_artifacts.write_config(workdir, config, meta['environment'], made_by)

  # -- Loop objects ------------------------------------------------------------

  step = first = start or 0
  every = settings.checkpoint.interval(steps)
  end = resume_checks.report_end(batches.remaining, first, steps, log)
  batch_size = settings.train.batch_size
  flops = setup.job_flops(recipe, batch_size, shapes, frozen=base is not None)
  telemetry = job_telemetry.JobTelemetry(
    workdir,
    settings.train,
    recipe.metrics,
    config.to_dict(),
    start,
    end,
    cost,
    flops,
    log,
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
  policy = completion_rewards.make_batches(
    workdir,
    settings,
    placement,
    data,
    rewards,
    telemetry,
    watchdog,
    teacher_row,
  )
  sampled = policy
  if recipe.sampling and not policy:
    spent = functools.partial(telemetry.phase, watchdog)
    sampled = on_policy.OnPolicyBatches(
      placement, recipe, data, spent, settings.train, settings.seed, teacher_row
    )
  evaluators = evaluators_lib.Evaluators(
    workdir,
    config.to_dict(),
    settings,
    tasks,
    placement,
    {x: loss_lib.Frozen(frozen[x], p) for x, p in reference_params.items()},
    data,
    telemetry,
    policy,
  )

  evaluating = False

  def evaluate(step, params, last=False):
    nonlocal evaluating
    if not settings.evaluation.loss:
      return None
    evaluating = True
    with telemetry.spent('evaluate'):
      beat = functools.partial(watchdog.beat, step, 'evaluate')
      values = evaluators(step, attach(params), beat=beat, last=last)
      evaluating = False
      metrics = recipe.metrics
      return held_out_metrics.rank(metrics, values[metrics.selects])

  def save(step, rank=None):
    watchdog.beat(step, 'save')
    with telemetry.spent('save'):
      telemetry.flush()
      cost.rows_of_parts = batches.order.consumed(cost.rows).tolist()
      checkpoints.save(step, state, data=cost.as_dict(), meta=meta, loss=rank)

  def save_before_error(kind, error, traceback):
    # Saves the step whose reward failed; a failed evaluation is repeated from
    # the previous save.
    if isinstance(error, completion_rewards.RewardError) and not evaluating:
      checkpoints.wait()
      if step not in (0, *checkpoints.all_steps()):
        save(step)

  # -- Steps -------------------------------------------------------------------

  stopping = False
  with contextlib.ExitStack() as stack:
    # On exit these close in reverse order: the checkpoints first, which
    # completes the last save even after an exception, unless another process
    # is missing.
    stop = stack.enter_context(preemption.StopSignal())
    for resource in (watchdog, profiler, telemetry, checkpoints):
      stack.enter_context(resource)
    # Completing a save may take longer than the step that the watchdog sees.
    stack.callback(lambda: watchdog.beat(step, 'save'))
    stack.push(save_before_error)

    if start is None:
      evaluate(step, state.params)
    while (
      step < steps
      and batches.remaining != 0
      and not (stopping or telemetry.stagnates or telemetry.over_budget)
    ):
      step_start = time.perf_counter()

      # Phase: the groups that train. Each phase compiles a step function.
      compiling = step == first or phases.begins(step)
      if compiling:
        state = phases.thaw(state, step)

      # Batch: this process's rows.
      watchdog.beat(step, 'compile' if compiling else 'step')
      with telemetry.spent('data'):
        rows = next(batches)
      if step == first:
        data.train.check_framing(rows, data.vocabularies.decoder)
        objective = settings.data.objectives[0]
        labels = objective.options.get('labels', ())
        log(setup.describe_batch(rows, data.vocabularies, labels))
        if distributed.is_lead():
          run_artifacts.remove_summary(workdir)  # A shorter job left it.
      row_numbers = rows.pop('row')

      # Completions of the rows' prompts; of a policy with their rewards.
      measured = {}
      if not sampled:
        rows = recipe.rows.frame(rows, data.vocabularies.decoder.ids)
      else:
        order, position = batches.order, cost.rows
        rows, measured = sampled(step, attach(state.params), order, position)
        watchdog.beat(step, 'compile' if compiling else 'step')

      # Update. Dispatch is asynchronous: the host continues meanwhile.
      profiler.begin_step(step)
      with telemetry.spent('compile' if compiling else 'dispatch'):
        batch = step_lib.place_batch(rows, placement, recipe.rows.axes)
        arguments = state, batch, reference_params, base_params
        if compiling:
          train_step = phases.make_step(step)
        state, metrics = train_step(*arguments)
      if compiling:
        telemetry.compiled()
      profiler.end_step(step, metrics)
      step += 1
      # Reads the metrics of the previous step; these are read one step later.
      metrics |= measured
      telemetry.dispatched(step, metrics, row_numbers, batches.position)

      # Evaluation and checkpoint. All processes take the same decisions.
      stopping = stop.reached(step)
      last = step == steps or batches.remaining == 0
      thawing = phases.begins(step)
      saving = last or thawing or step % every == 0
      evaluating = last or evaluators.is_due(step)
      evaluating |= saving and settings.checkpoint.keep_best
      saving |= stopping  # At once: a preemption leaves no time to evaluate.
      # Saved costs include this step. A sampler waits for parameters anyway.
      if evaluating or saving or compiling or sampled:
        telemetry.read()
      if not compiling:
        cost.seconds += time.perf_counter() - step_start
      if telemetry.over_budget:
        break
      rank = evaluate(step, state.params, last) if evaluating else None
      if saving or telemetry.stagnates:
        save(step, rank)
      if evaluating or saving:
        telemetry.pause()
      if thawing:
        # Thawing may run out of memory: complete the save first.
        checkpoints.wait()

    done = stopping or telemetry.over_budget
    if not done and telemetry.evaluated != step:
      # `steps` was lowered to a saved step.
      evaluate(step, state.params, last=True)
    watchdog.beat(step, 'save')
    checkpoints.wait()
    # The measured KL is that of the previous step's policy.
    within = checkpoints.discard(step - 1) if telemetry.over_budget else None

  # -- End ---------------------------------------------------------------------

  batches.close()
  if stopping and not (last or telemetry.over_budget):
    log(f'asked to stop: saved step {step}, exiting with {exit_status.RESTART}')
    return exit_status.RESTART
  if note := telemetry.describe_end(step, steps, within):
    log(note)
  if distributed.is_lead():
    rate, seed = settings.optimizer.schedule.peak, settings.seed
    hyperparameters = {'learning_rate': rate, 'seed': seed}
    used = step if within is None else within
    run_artifacts.write_summary(
      workdir, model, hyperparameters, used, cost, meta['sources']
    )
  # No process exits before process 0 has committed the last checkpoint.
  distributed.barrier('the end')
  return 0


if __name__ == '__main__':
  command.main(__doc__, define_flags, main)
