r"""Trains a model: configuration, mesh, data, state, loop.

    python -m encdec_adapt.train --config=configs/quickstart.py:run=adapted \
      --workdir=runs/adapted [--config.train.steps=500]

A job that ended early continues when the same command is given again.
"""

import contextlib
import time

from absl import flags
import jax
import ml_collections
import numpy as np

from encdec_adapt import config as config_lib
from encdec_adapt import dry_run, job, materialize, outcome, vocabulary_checks
from encdec_adapt.data import batch as batch_lib
from encdec_adapt.data import loader
from encdec_adapt.evaluation import perplexity
from encdec_adapt.models import parameters
from encdec_adapt.planning import out_of_memory
from encdec_adapt.runtime import (
  app,
  command,
  distributed,
  environment,
  errors,
  flops,
  lock,
  metrics,
  preemption,
  profiling,
  progress,
  storage,
  timing,
  watchdog,
)
from encdec_adapt.sharding import placement
from encdec_adapt.training import (
  accounting,
  checkpoint,
  continuation,
  guards,
  optimizers,
  phases,
)
from encdec_adapt.training import state as state_lib
from encdec_adapt.training import step as step_lib


def define_flags(values: flags.FlagValues) -> None:
  """The flags of this command."""
  command.define_config(values)
  define = dict(flag_values=values)
  flags.DEFINE_string('workdir', None, 'Folder of this job.', **define)
  flags.DEFINE_bool('print_config', False, 'Print it and stop.', **define)
  flags.DEFINE_bool(
    'dry_run', False, 'Print shapes, memory, what is adapted; stop.', **define
  )
  flags.DEFINE_string(
    'coordinator', None, 'host:port of process 0, or auto.', **define
  )
  flags.DEFINE_integer('processes', None, 'How many there are.', **define)
  flags.DEFINE_integer('process', None, 'Which this one is.', **define)
  flags.DEFINE_integer(
    'start_seconds', distributed.START, 'To wait for all of them.', **define
  )
  materialize.define_passes(values)


def main(values: flags.FlagValues) -> int:
  """Runs the command."""
  command.require(values, 'config')
  materialize.set_passes(values)
  if values.print_config:
    print(values.config)
    return 0
  with distributed.failing_as_one():
    distributed.initialize(
      values.coordinator,
      values.processes,
      values.process,
      told={
        'config': values.config.to_dict(),
        'workdir': values.workdir,
        'dry_run': values.dry_run,
      },
      seconds=values.start_seconds,
    )
    if values.dry_run:
      workdir = values.workdir or ''
      settings = config_lib.load(values.config, workdir, sources=False)
      print(dry_run.describe(settings))
      return 0
    command.require(values, 'workdir')
    with out_of_memory.explained(values['config']):
      return run(values.config, values.workdir)


def run(config: ml_collections.ConfigDict, workdir: str) -> int:
  """Trains to the last step, or until told to stop.

  Args:
    config: `configs/base.py` with changes.
    workdir: folder of the job; what it holds is continued.

  Returns:
    Exit status: 0, or `app.RESTART` after a saved preemption.

  Raises:
    UserError: bad input, found before the first step; no checkpoint of those
      that there were is sound; or updates that are not finite.
  """
  settings = config_lib.load(config, workdir)
  if not distributed.is_lead():
    return _run(config, settings, workdir)
  with lock.hold(workdir):
    return _run(config, settings, workdir)


def _run(config, settings: config_lib.Settings, workdir: str) -> int:
  train, cache = settings.train, settings.compute.compile_cache
  lead = distributed.is_lead()
  say = print if lead else lambda *_, **__: None

  # -- mesh, models, data ----------------------------------------------------
  mesh = job.make_mesh(settings)
  job.check_attention(settings, mesh.devices.flat[0].platform)
  job.check_batches(settings, mesh)
  vocabulary_checks.check_model(settings)
  where = job.place_model(settings, settings.model, mesh)
  teacher = job.place_teacher(settings, mesh)
  optimizer = optimizers.Optimizer(settings.optimizer)
  clip_norm = settings.optimizer.clip_norm
  groups = phases.cross_attention_warmup(train.cross_attention_warmup)
  assignment = phases.assign(where.model.table, groups)
  checkpoints = checkpoint.Checkpoints(
    storage.join(workdir, checkpoint.FOLDER),
    keep=settings.checkpoint.keep,
    keep_every=settings.checkpoint.keep_every or None,
  )
  every_group = [group.name for group in groups]
  every = settings.checkpoint.every
  saves = [*range(every, train.steps, every), train.steps]
  checkpoints.require_space(
    state_lib.abstract(optimizer, assignment, every_group, where), saves
  )
  start = checkpoints.latest()
  if start is None:  # What was saved does not need them any more.
    checkpoints.check_not_lost()
    job.check_sources(settings, where)
  # A group that thaws at this very step was not in what was saved.
  active = phases.active(groups, max((start or 0) - 1, 0))
  abstract = state_lib.abstract(optimizer, assignment, active, where)
  if start is not None:
    saved = checkpoints.read_meta(start)
    continuation.check_is_training(saved)
    continuation.report_changes(saved['config'], config.to_dict(), say)
    checkpoints.at(start).require_same(abstract)
  opened, train_set, eval_set = job.open_data(settings)
  count = parameters.count(settings.model)
  say(
    f'{type(settings.model).__name__}: {count:,} parameters on'
    f' {dict(mesh.shape)}; {len(train_set):,} training rows'
  )

  # -- restore or initialise -------------------------------------------------
  meta = {
    'config': config.to_dict(),
    'environment': environment.report(),
    'fingerprint': {**environment.fingerprint(), 'mesh': dict(mesh.shape)},
    'vocabularies': opened.describe(),
    'order': {'records': train_set.digests, 'seed': settings.seed},
  }
  if start is None:
    meta['sources'] = job.read_costs(settings).as_dict()
    for path in meta['sources']['not_counted']:
      say(f'what {path} has cost is not known: the summary leaves it out')
    params, report = job.initial_params(settings, where)
    cost = accounting.Cost()
    state = state_lib.create(params, optimizer, assignment, active, where)
    del params
    if report and settings.init.mode != 'random':
      say(report.table())
    if lead:
      outcome.begin(settings, workdir, report, opened)
  else:
    meta['sources'] = saved['sources']
    cost = accounting.Cost(**checkpoints.read_data(start))
    continuation.check_same_rows(
      saved['order'], meta['order'], cost.rows, train_set.starts
    )
    continuation.report_place(saved, meta, say)
    state = checkpoints.restore(start, abstract)
    say(f'continuing at step {start}')
  if lead:
    outcome.describe(config, meta['environment'], workdir)
  teacher_params = {}
  if teacher:
    teacher_params = job.read_teacher(settings, teacher)

  # -- loop ------------------------------------------------------------------
  wants_teacher = job.reads_teacher_row(settings)
  shards = placement.row_shards(mesh, settings.rules)
  batches = loader.Loader(
    train_set,
    train_set.spec.lengths,
    train.batch_size,
    position=cost.rows,
    seed=settings.seed,
    repeat=settings.data.repeat,
    teacher=wants_teacher,
    local=shards.rows(train.batch_size),
  )
  continuation.report_end(batches.left, start or 0, train.steps, say)
  evaluator = perplexity.Evaluator(where, settings.loss.chunk)
  flops_per_step = job.step_flops(settings, teacher)
  # Records of step 0 are written anew where nothing was restored.
  writer = starts = None
  if lead:
    writer = metrics.MetricWriter(workdir, -1 if start is None else start)
    if writer.dropped and start is None:
      say(f'{len(writer.dropped):,} records of metrics are dropped')
    lost = [r for r in writer.dropped if r['kind'] == 'time']
    starts = timing.Starts(workdir, start or 0, lost)
  split = timing.Split()
  guard = guards.NonFiniteGuard(workdir, train.max_skipped)
  meter = progress.Progress(
    train.steps,
    first_step=start or 0,
    flops_per_step=flops_per_step,
    peak=flops.peak(jax.devices()),
  )
  evaluated = distributed.from_lead(lambda: writer.last('eval'), 'state')
  saved_at = start

  def evaluate(step):
    nonlocal evaluated
    watch.beat(step, 'evaluate')
    with split.spent('evaluate'):
      result = evaluator(
        state.params,
        loader.evaluation_batches(
          eval_set,
          eval_set.spec.lengths,
          train.eval_batch_size,
          teacher=wants_teacher,
          local=shards.rows(train.eval_batch_size),
        ),
      )
    say(f'step {step}: held-out loss {result.loss:.4f} per target token')
    if lead:
      values = {'loss': result.loss, 'accuracy': result.accuracy}
      writer.write('eval', step, values | {'target_tokens': cost.target_tokens})
    evaluated = step
    meter.pause()

  def save(step):
    nonlocal saved_at
    watch.beat(step, 'save')
    with split.spent('save'):
      if lead:
        writer.flush()
      checkpoints.save(step, state, data=cost.as_dict(), meta=meta)
    saved_at = step
    meter.pause()

  def finish(step, values, rows, position):
    """Accounts for a step whose metrics are there, or waits for them."""
    with split.spent('device'):
      values = {name: np.asarray(v).item() for name, v in values.items()}
    cost.rows = position
    cost.target_tokens += values['weight']
    cost.total_tokens += values['tokens']
    cost.flops += flops_per_step
    meter.update(step, values['tokens'])
    if lead:
      writer.write('train', step, values)
      writer.write('time', step, split.take() | meter.rates())
    guard.check(step, values['skipped_in_row'], rows['row'])
    if step % train.log_every == 0 or step == train.steps:
      say(meter.line(values['loss'], grad=values['gradient_norm']))
      if lead:
        whole = starts.goodput(cost.seconds) | environment.memory_high_water()
        writer.write('job', step, whole | {'compile_cache': cache})

  def settle(kind, error, _):
    """Where a job fails, what it was saving is not lost with it."""
    if not isinstance(error, Exception):
      return
    if isinstance(error, errors.AbsentError):
      return  # Who is missing does not finish its part.
    watch.beat(step, 'save')  # It may take longer than a step.
    try:
      checkpoints.close()
    except checkpoint.CheckpointError as failed:
      say(f'the last save failed, too: {failed}')

  step = start or 0
  train_step, active, waiting = None, None, None
  status = 0
  watch = watchdog.Watchdog(
    workdir,
    jax.process_index(),
    factor=train.hang_factor,
    least=train.hang_seconds,
    least_step=train.hang_step_seconds,
  )
  profiler = profiling.Profiler(
    workdir, train.profile_from, train.profile_steps
  )
  ending = contextlib.ExitStack()
  if lead:  # What was going on when a job fails is among the last records.
    ending.callback(writer.flush)
  ending.push(settle)
  # A second signal, while the last save ends, is no reason to break it off.
  with preemption.StopSignal() as stop:
    with profiler, watch, ending:
      if start is None:
        evaluate(0)
      while step < train.steps:
        began = time.perf_counter()
        compiling = phases.active(groups, step) != active
        if compiling:
          active = phases.active(groups, step)
          state = state_lib.thaw(state, optimizer, assignment, active, where)
          train_step = step_lib.make_train_step(
            where,
            settings.loss,
            optimizer,
            assignment,
            active,
            step_lib.StepConfig(train.microbatches, clip_norm),
            teacher.model if teacher else None,
          )
        # Compiling is no step: it has the time that a hang is given.
        watch.beat(step, 'compile' if compiling else 'step')
        with split.spent('data'):
          rows = next(batches, None)
        if rows is not None:
          if step == (start or 0):
            batch_lib.check_framing(rows, train_set.framing)
            say(job.describe_batch(rows, opened))
            if lead:
              outcome.reopen(workdir)
          profiler.before(step)
          with split.spent('compile' if compiling else 'dispatch'):
            batch = step_lib.place_batch(
              {k: v for k, v in rows.items() if k != 'row'}, where
            )
            state, values = train_step(state, batch, teacher_params)
          traced = profiler.after(step, values)
          if traced and lead:
            writer.write('profile', step + 1, traced)
        # The metrics of the step before are read while this one runs.
        if waiting:
          finish(*waiting)
          waiting = None
        if rows is None:
          say(
            f'the records end after {cost.rows:,} rows, at step {step} of'
            f' {train.steps}: the last pass is over'
          )
          break
        step += 1
        waiting = (step, values, rows, batches.position)
        stopping = stop.reached(step)
        last = step == train.steps
        thawing = phases.active(groups, step) != active
        due = step % every == 0 or last or stopping or thawing
        look = step % train.eval_every == 0 or last
        if due or look or compiling:
          # Its records are written before the checkpoint that counts on them.
          finish(*waiting)
          waiting = None
        if compiling:
          meter.pause()
        else:
          cost.seconds += time.perf_counter() - began
        if look:
          evaluate(step)
        if due:
          save(step)
        if thawing:  # Nothing is lost where there is no memory for it.
          checkpoints.wait()
        if stopping and not last:
          status = app.RESTART
          break
      if status == 0 and evaluated != step:
        evaluate(step)  # The records ended early, between evaluations.
      if status == 0 and saved_at != step:
        save(step)

    # -- end -----------------------------------------------------------------
    # Not watched: to seal the last, process 0 may read all of it. Nobody leaves
    # before; the others' patience is that of the meeting.
    checkpoints.wait()
    checkpoints.close()
    batches.close()
    if lead:
      writer.close()
    if status == app.RESTART:
      say(f'told to stop: saved step {step}, exiting with {status}')
    elif lead:
      outcome.summarise(settings, workdir, step, cost, meta['sources'])
  return status


if __name__ == '__main__':
  command.main(__doc__, define_flags, main)
