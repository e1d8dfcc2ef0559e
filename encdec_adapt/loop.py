"""The steps of a training job, with its evaluations, saves and records."""

from collections.abc import Callable
import contextlib
import dataclasses
import time
from typing import Any

import jax
import numpy as np

from encdec_adapt import config as config_lib
from encdec_adapt import job, outcome
from encdec_adapt.data import batch as batch_lib
from encdec_adapt.data import loader
from encdec_adapt.evaluation import perplexity
from encdec_adapt.runtime import (
  app,
  distributed,
  environment,
  errors,
  flops,
  metrics,
  preemption,
  profiling,
  progress,
  timing,
  watchdog,
)
from encdec_adapt.sharding import placement
from encdec_adapt.training import (
  accounting,
  checkpoint,
  continuation,
  guards,
)
from encdec_adapt.training import state as state_lib
from encdec_adapt.training import step as step_lib


@dataclasses.dataclass(frozen=True)
class Beginning:
  """Where a job begins, or goes on.

  Attributes:
    start: the step that was restored; None where nothing was.
    state: at that step.
    cost: until then.
    meta: what is saved beside every state.
    teacher: parameters of the teacher; empty without one.
  """

  start: int | None
  state: state_lib.TrainState
  cost: accounting.Cost
  meta: dict[str, Any]
  teacher: Any


class Loop:
  """Trains to the last step, or until told to stop."""

  def __init__(
    self,
    settings: config_lib.Settings,
    workdir: str,
    subject: job.Subject,
    data: job.Data,
    checkpoints: checkpoint.Checkpoints,
    beginning: Beginning,
    say: Callable[..., None],
  ):
    """Opens the records and the streams of metrics.

    Args:
      settings: of the job.
      workdir: its folder.
      subject: what it trains.
      data: what it reads.
      checkpoints: where it saves; closed by `run`.
      beginning: where it begins; its state is donated to the first step.
      say: prints on process 0.
    """
    self.settings, self.workdir, self.say = settings, workdir, say
    self.subject, self.data = subject, data
    self.checkpoints, self.cost = checkpoints, beginning.cost
    self.start, self.meta = beginning.start, beginning.meta
    self.state, self.teacher = beginning.state, beginning.teacher
    self.step = self.first = self.start or 0
    train = settings.train
    mesh = subject.where.mesh
    self.shards = placement.row_shards(mesh, settings.rules)
    self.batches = loader.Loader(
      data.train,
      data.train.spec.lengths,
      train.batch_size,
      position=self.cost.rows,
      seed=settings.seed,
      repeat=settings.data.repeat,
      teacher=job.reads_teacher_row(settings),
      local=self.shards.rows(train.batch_size),
    )
    continuation.report_end(self.batches.left, self.first, train.steps, say)
    self.evaluator = perplexity.Evaluator(subject.where, settings.loss.chunk)
    # Records of step 0 are written anew where nothing was restored.
    self.writer = self.starts = None
    if distributed.is_lead():
      kept = -1 if self.start is None else self.start
      self.writer = metrics.MetricWriter(workdir, kept)
      if self.writer.dropped and self.start is None:
        say(f'{len(self.writer.dropped):,} records of metrics are dropped')
      lost = [r for r in self.writer.dropped if r['kind'] == 'time']
      self.starts = timing.Starts(workdir, self.first, lost)
    self.split = timing.Split()
    self.guard = guards.NonFiniteGuard(workdir, train.max_skipped)
    self.flops_per_step = job.step_flops(settings, subject.teacher)
    self.meter = progress.Progress(
      train.steps,
      first_step=self.first,
      flops_per_step=self.flops_per_step,
      peak=flops.peak(jax.devices()),
    )
    self.evaluated = distributed.from_lead(
      lambda: self.writer.last('eval'), 'state'
    )
    self.saved = self.start
    self.active, self.train_step = None, None
    self.waiting = None  # A step whose metrics are not read yet.
    self.watch = watchdog.Watchdog(
      workdir,
      jax.process_index(),
      jax.process_count(),
      factor=train.hang_factor,
      least=train.hang_seconds,
      least_step=train.hang_step_seconds,
    )
    self.profiler = profiling.Profiler(
      workdir,
      train.profile_from,
      train.profile_steps,
      writing=lambda step: self.watch.beat(step, 'profile'),
    )

  def run(self) -> int:
    """Runs the steps.

    Returns:
      Exit status: 0, or `app.RESTART` after a saved preemption.

    Raises:
      UserError: updates that are not finite.
    """
    # A second signal, while the last save ends, is no reason to break it off.
    with preemption.StopSignal() as stop:
      with contextlib.ExitStack() as stack:
        stack.enter_context(self.profiler)
        stack.enter_context(self.watch)
        # What was going on when a job fails is among the last records.
        if self.writer:
          stack.callback(self.writer.flush)
        stack.push(self._settle)
        stopped = self._all_steps(stop)
      # Not watched: to seal the last, process 0 may read all of it. Nobody
      # leaves before; the others' patience is that of the meeting.
      self.checkpoints.wait()
      self.checkpoints.close()
      self.batches.close()
      if self.writer:
        self.writer.close()
      if stopped:
        self.say(
          f'told to stop: saved step {self.step}, exiting with {app.RESTART}'
        )
        return app.RESTART
      if self.writer:
        outcome.summarise(
          self.settings,
          self.workdir,
          self.step,
          self.cost,
          self.meta['sources'],
        )
      distributed.barrier('the end')
    return 0

  def _all_steps(self, stop: preemption.StopSignal) -> bool:
    """Trains, evaluates and saves; whether it was stopped before the end."""
    steps = self.settings.train.steps
    if self.start is None:
      self._evaluate()
    while self.step < steps:
      began = time.perf_counter()
      compiling = self._thaw()
      if not self._begin_step(compiling):
        self.say(
          f'the records end after {self.cost.rows:,} rows, at step {self.step}'
          f' of {steps}: the last pass is over'
        )
        break
      if self._end_step(began, compiling, stop.reached(self.step)):
        return True
    if self.evaluated != self.step:
      self._evaluate()  # The records ended early, between evaluations.
    if self.saved != self.step:
      self._save()
    return False

  def _thaw(self) -> bool:
    """Readies the step for the groups that train now; whether it is new."""
    subject, active = self.subject, self.subject.active(self.step)
    if active == self.active:
      return False
    self.active = active
    self.state = state_lib.thaw(
      self.state, subject.optimizer, subject.assignment, active, subject.where
    )
    self.train_step = subject.make_step(self.settings, active)
    return True

  def _begin_step(self, compiling: bool) -> bool:
    """Dispatches a step and reads the metrics of the one before.

    Returns:
      Whether there were records for one; then `waiting` is that step.
    """
    # Compiling is no step: it has the time that a hang is given.
    self.watch.beat(self.step, 'compile' if compiling else 'step')
    with self.split.spent('data'):
      rows = next(self.batches, None)
    if rows is not None:
      if self.step == self.first:
        self._describe(rows)
      self.profiler.before(self.step)
      with self.split.spent('compile' if compiling else 'dispatch'):
        batch = step_lib.place_batch(
          {k: v for k, v in rows.items() if k != 'row'}, self.subject.where
        )
        self.state, values = self.train_step(self.state, batch, self.teacher)
      if compiling:
        self.meter.pause()
      traced = self.profiler.after(self.step, values)
      if traced and self.writer:
        self.writer.write('profile', self.step + 1, traced)
    # They are there while this one runs.
    self._finish()
    if rows is None:
      return False
    self.step += 1
    self.waiting = (self.step, values, rows, self.batches.position)
    return True

  def _describe(self, rows: batch_lib.Batch) -> None:
    """Says what the first batch holds; the job is under way."""
    batch_lib.check_framing(rows, self.data.train.framing)
    self.say(job.describe_batch(rows, self.data.opened))
    if distributed.is_lead():
      outcome.reopen(self.workdir)

  def _end_step(self, began: float, compiling: bool, stopping: bool) -> bool:
    """Evaluates and saves where that is due; whether the job ends here.

    Args:
      began: when the step did, by `time.perf_counter`.
      compiling: it was compiled first.
      stopping: all processes were told to stop.
    """
    train, step = self.settings.train, self.step
    last = step == train.steps
    thawing = self.subject.active(step) != self.active
    every = self.settings.checkpoint.every
    due = step % every == 0 or last or stopping or thawing
    look = step % train.eval_every == 0 or last
    if due or look or compiling:
      # Its records are written before the checkpoint that counts on them.
      self._finish()
    if not compiling:
      self.cost.seconds += time.perf_counter() - began
    if look:
      self._evaluate()
    if due:
      self._save()
    if thawing:  # Nothing is lost where there is no memory for it.
      self.checkpoints.wait()
    return stopping and not last

  def _finish(self) -> None:
    """Accounts for the step whose metrics are not read, if there is one."""
    if self.waiting is None:
      return
    step, values, rows, position = self.waiting
    self.waiting = None
    with self.split.spent('device'):
      values = {name: np.asarray(v).item() for name, v in values.items()}
    cost, train = self.cost, self.settings.train
    cost.rows = position
    cost.target_tokens += values['weight']
    cost.total_tokens += values['tokens']
    cost.flops += self.flops_per_step
    self.meter.update(step, values['tokens'])
    if self.writer:
      self.writer.write('train', step, values)
      self.writer.write('time', step, self.split.take() | self.meter.rates())
    self.guard.check(step, values['skipped_in_row'], rows['row'])
    if step % train.log_every == 0 or step == train.steps:
      self.say(self.meter.line(values['loss'], grad=values['gradient_norm']))
      if self.writer:
        whole = self.starts.goodput(cost.seconds)
        whole |= environment.memory_high_water()
        whole['compile_cache'] = self.settings.compute.compile_cache
        self.writer.write('job', step, whole)

  def _evaluate(self) -> None:
    """Writes the loss of the rows held out."""
    train, step = self.settings.train, self.step
    self.watch.beat(step, 'evaluate')
    held_out = self.data.evaluation
    with self.split.spent('evaluate'):
      result = self.evaluator(
        self.state.params,
        loader.evaluation_batches(
          held_out,
          held_out.spec.lengths,
          train.eval_batch_size,
          teacher=job.reads_teacher_row(self.settings),
          local=self.shards.rows(train.eval_batch_size),
        ),
      )
    self.say(f'step {step}: held-out loss {result.loss:.4f} per target token')
    if self.writer:
      values = {'loss': result.loss, 'accuracy': result.accuracy}
      values['target_tokens'] = self.cost.target_tokens
      self.writer.write('eval', step, values)
    self.evaluated = step
    self.meter.pause()

  def _save(self) -> None:
    """Begins to save; the save before is sealed."""
    self.watch.beat(self.step, 'save')
    with self.split.spent('save'):
      if self.writer:
        self.writer.flush()
      self.checkpoints.save(
        self.step, self.state, data=self.cost.as_dict(), meta=self.meta
      )
    self.saved = self.step
    self.meter.pause()

  def _settle(self, kind, error, _) -> None:
    """Where a job fails, what it was saving is not lost with it."""
    del kind
    if not isinstance(error, Exception):
      return
    if isinstance(error, errors.AbsentError):
      return  # Who is missing does not finish its part.
    self.watch.beat(self.step, 'save')  # It may take longer than a step.
    try:
      self.checkpoints.close()
    except Exception as failed:  # The first error is the one to tell.
      self.say(f'the last save failed, too: {failed}')
