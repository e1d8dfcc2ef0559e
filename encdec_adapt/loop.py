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
from encdec_adapt.checkpoints import manager, resume_checks
from encdec_adapt.cli import app, errors
from encdec_adapt.cluster import distributed, preemption, watchdog
from encdec_adapt.data import batch as batch_lib
from encdec_adapt.data import loader
from encdec_adapt.evaluation import perplexity
from encdec_adapt.sharding import placement
from encdec_adapt.telemetry import (
  accounting,
  environment,
  flops,
  metrics,
  profiling,
  progress,
  timing,
)
from encdec_adapt.training import guards
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
    checkpoints: manager.Checkpoints,
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
    self._settings, self._workdir, self._say = settings, workdir, say
    self._subject, self._data = subject, data
    self._checkpoints, self._cost = checkpoints, beginning.cost
    self._start, self._meta = beginning.start, beginning.meta
    self._state, self._teacher = beginning.state, beginning.teacher
    self._step = self._first = self._start or 0
    train = settings.train
    mesh = subject.where.mesh
    self._shards = placement.row_shards(mesh, settings.rules)
    self._batches = loader.Loader(
      data.train,
      data.train.spec.lengths,
      train.batch_size,
      position=self._cost.rows,
      seed=settings.seed,
      repeat=settings.data.repeat,
      teacher=job.reads_teacher_row(settings),
      local=self._shards.rows(train.batch_size),
    )
    resume_checks.report_end(self._batches.left, self._first, train.steps, say)
    self._evaluator = perplexity.Evaluator(subject.where, settings.loss.chunk)
    self._writer = self._starts = None
    if distributed.is_lead():
      self._writer, self._starts = self._open_metrics()
    self._split = timing.Split()
    self._guard = guards.NonFiniteGuard(workdir, train.max_skipped)
    self._flops_per_step = job.step_flops(settings, subject.teacher)
    self._meter = progress.Progress(
      train.steps,
      first_step=self._first,
      flops_per_step=self._flops_per_step,
      peak=flops.peak(jax.devices()),
    )
    self._evaluated = distributed.from_lead(
      lambda: self._writer.last('eval'), 'state'
    )
    self._saved = self._start
    self._active, self._train_step = None, None
    self._waiting = None  # A step whose metrics are not read yet.
    self._watch = watchdog.Watchdog(
      workdir,
      jax.process_index(),
      factor=20.0 if train.hang_seconds else 0.0,
      least=12 * train.hang_seconds,
      least_step=train.hang_seconds,
    )
    self._profiler = profiling.Profiler(
      workdir,
      jax.process_index() if jax.process_count() > 1 else None,
      train.profile_from,
      train.profile_steps,
      writing=lambda step: self._watch.beat(step, 'profile'),
    )

  def _open_metrics(self) -> tuple[metrics.MetricWriter, timing.Starts]:
    """The streams of metrics, without what was computed in vain."""
    # Records of step 0 are written anew where nothing was restored.
    kept = -1 if self._start is None else self._start
    writer = metrics.MetricWriter(self._workdir, kept)
    if writer.dropped and self._start is None:
      self._say(f'{len(writer.dropped):,} records of metrics are dropped')
    lost = [r for r in writer.dropped if r['kind'] == 'time']
    return writer, timing.Starts(self._workdir, self._first, lost)

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
        stack.enter_context(self._profiler)
        stack.enter_context(self._watch)
        # What was going on when a job fails is among the last records.
        if self._writer:
          stack.callback(self._writer.flush)
        stack.push(self._settle)
        stopped = self._all_steps(stop)
      # Not watched: to seal the last, process 0 may read all of it. Nobody
      # leaves before; the others' patience is that of the meeting.
      self._checkpoints.wait()
      self._checkpoints.close()
      self._batches.close()
      if self._writer:
        self._writer.close()
      if stopped:
        self._say(
          f'told to stop: saved step {self._step}, exiting with {app.RESTART}'
        )
        return app.RESTART
      if self._writer:
        outcome.summarise(
          self._settings,
          self._workdir,
          self._step,
          self._cost,
          self._meta['sources'],
        )
      distributed.barrier('the end')
    return 0

  def _all_steps(self, stop: preemption.StopSignal) -> bool:
    """Trains, evaluates and saves; whether it was stopped before the end."""
    steps = self._settings.train.steps
    if self._start is None:
      self._evaluate()
    while self._step < steps:
      began = time.perf_counter()
      compiling = self._thaw()
      if not self._begin_step(compiling):
        self._say(
          f'the records end after {self._cost.rows:,} rows, at step'
          f' {self._step} of {steps}: the last pass is over'
        )
        break
      if self._end_step(began, compiling, stop.reached(self._step)):
        return True
    if self._evaluated != self._step:
      self._evaluate()  # The records ended early, between evaluations.
    if self._saved != self._step:
      self._save()
    return False

  def _thaw(self) -> bool:
    """Readies the step for the groups that train now; whether it is new."""
    subject, active = self._subject, self._subject.active(self._step)
    if active == self._active:
      return False
    self._active = active
    self._state = state_lib.thaw(
      self._state, subject.optimizer, subject.assignment, active, subject.where
    )
    self._train_step = subject.make_step(self._settings, active)
    return True

  def _begin_step(self, compiling: bool) -> bool:
    """Dispatches a step and reads the metrics of the one before.

    Returns:
      Whether there were records for one; then `waiting` is that step.
    """
    # Compiling is no step: it has the time that a hang is given.
    self._watch.beat(self._step, 'compile' if compiling else 'step')
    with self._split.spent('data'):
      rows = next(self._batches, None)
    if rows is not None:
      if self._step == self._first:
        self._describe(rows)
      self._profiler.before(self._step)
      with self._split.spent('compile' if compiling else 'dispatch'):
        batch = step_lib.place_batch(
          {k: v for k, v in rows.items() if k != 'row'}, self._subject.where
        )
        self._state, values = self._train_step(
          self._state, batch, self._teacher
        )
      if compiling:
        self._meter.pause()
      traced = self._profiler.after(self._step, values)
      if traced and self._writer:
        self._writer.write('profile', self._step + 1, traced)
    # They are there while this one runs.
    self._finish()
    if rows is None:
      return False
    self._step += 1
    self._waiting = (self._step, values, rows, self._batches.position)
    return True

  def _describe(self, rows: batch_lib.Batch) -> None:
    """Says what the first batch holds; the job is under way."""
    batch_lib.check_framing(rows, self._data.train.framing)
    self._say(job.describe_batch(rows, self._data.opened))
    if distributed.is_lead():
      outcome.reopen(self._workdir)

  def _end_step(self, began: float, compiling: bool, stopping: bool) -> bool:
    """Evaluates and saves where that is due; whether the job ends here.

    Args:
      began: when the step did, by `time.perf_counter`.
      compiling: it was compiled first.
      stopping: all processes were told to stop.
    """
    train, step = self._settings.train, self._step
    last = step == train.steps
    thawing = self._subject.active(step) != self._active
    every = self._settings.checkpoint.every
    due = step % every == 0 or last or stopping or thawing
    look = step % train.eval_every == 0 or last
    if due or look or compiling:
      # Its records are written before the checkpoint that counts on them.
      self._finish()
    if not compiling:
      self._cost.seconds += time.perf_counter() - began
    if look:
      self._evaluate()
    if due:
      self._save()
    if thawing:  # Nothing is lost where there is no memory for it.
      self._checkpoints.wait()
    return stopping and not last

  def _finish(self) -> None:
    """Accounts for the step whose metrics are not read, if there is one."""
    if self._waiting is None:
      return
    step, values, rows, position = self._waiting
    self._waiting = None
    with self._split.spent('device'):
      values = {name: np.asarray(v).item() for name, v in values.items()}
    cost, train = self._cost, self._settings.train
    cost.rows = position
    cost.target_tokens += values['weight']
    cost.total_tokens += values['tokens']
    cost.flops += self._flops_per_step
    self._meter.update(step, values['tokens'])
    if self._writer:
      self._writer.write('train', step, values)
      self._writer.write('time', step, self._split.take() | self._meter.rates())
    self._guard.check(step, values['skipped_in_row'], rows['row'])
    if step % train.log_every == 0 or step == train.steps:
      self._say(self._meter.line(values['loss'], grad=values['gradient_norm']))
      if self._writer:
        whole = self._starts.goodput(cost.seconds)
        whole |= environment.memory_high_water()
        whole['compile_cache'] = self._settings.compute.compile_cache
        self._writer.write('job', step, whole)

  def _evaluate(self) -> None:
    """Writes the loss of the rows held out."""
    train, step = self._settings.train, self._step
    self._watch.beat(step, 'evaluate')
    held_out = self._data.evaluation
    with self._split.spent('evaluate'):
      result = self._evaluator(
        self._state.params,
        loader.evaluation_batches(
          held_out,
          held_out.spec.lengths,
          train.eval_batch_size,
          teacher=job.reads_teacher_row(self._settings),
          local=self._shards.rows(train.eval_batch_size),
        ),
      )
    self._say(f'step {step}: held-out loss {result.loss:.4f} per target token')
    if self._writer:
      values = {'loss': result.loss, 'accuracy': result.accuracy}
      values['target_tokens'] = self._cost.target_tokens
      self._writer.write('eval', step, values)
    self._evaluated = step
    self._meter.pause()

  def _save(self) -> None:
    """Begins to save; the save before is sealed."""
    self._watch.beat(self._step, 'save')
    with self._split.spent('save'):
      if self._writer:
        self._writer.flush()
      self._checkpoints.save(
        self._step, self._state, data=self._cost.as_dict(), meta=self._meta
      )
    self._saved = self._step
    self._meter.pause()

  def _settle(self, kind, error, _) -> None:
    """Where a job fails, what it was saving is not lost with it."""
    del kind
    if not isinstance(error, Exception):
      return
    if isinstance(error, errors.AbsentError):
      return  # Who is missing does not finish its part.
    self._watch.beat(self._step, 'save')  # It may take longer than a step.
    try:
      self._checkpoints.close()
    except Exception as failed:  # The first error is the one to tell.
      self._say(f'the last save failed, too: {failed}')
