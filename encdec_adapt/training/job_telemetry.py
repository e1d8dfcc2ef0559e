"""Telemetry of a training job: metrics, rates, time and cost.

Metrics of a step arrive as device arrays, and are read after the next step has
been dispatched, so that the device is never idle meanwhile. Process 0 writes
and prints; the others only count.

`telemetry` defines formats and files; this module calls it from the loop.
"""

import collections
from collections.abc import Iterator, Mapping
import contextlib
import os
from typing import Any

import jax
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.cluster import distributed, watchdog
from encdec_adapt.data.records import row_order
from encdec_adapt.telemetry import (
  compute_cost,
  environment,
  metrics,
  peak_flops,
  progress,
  timing,
  trackers,
)
from encdec_adapt.training import guards
from encdec_adapt.training.metrics import held_out_metrics
from encdec_adapt.training.sections import rollout_options, train_section


class JobTelemetry(contextlib.AbstractContextManager):
  """Context manager around the loop; closes the metric files on exit.

  Attributes:
    cost: running totals of the job, as saved in checkpoints.
    start: first step of this start.
    over_budget: whether the KL of the last step exceeds
      `config.train.rollouts.max_kl`.
  """

  def __init__(
    self,
    workdir: str | os.PathLike[str],
    train: train_section.TrainConfig,
    selected: held_out_metrics.HeldOut,
    config: Mapping[str, Any],
    start: int | None,
    end: int,
    cost: compute_cost.Cost,
    flops_per_step: float,
  ):
    """Opens the metrics, and drops records after the restored step.

    Args:
      workdir: work directory of the job.
      train: section `train` of the configuration.
      selected: the held-out metrics.
      config: the configuration, for trackers.
      start: the restored step; None for a new job.
      end: last step of the job.
      cost: totals at that step.
      flops_per_step: model FLOPs of a step on all devices.
    """
    self.cost, self.start = cost, start or 0
    self._end, self._log_every = end, train.log_every
    self._flops = flops_per_step
    self._guard = guards.NonFiniteGuard(workdir, train.max_skipped)
    self._split = timing.TimeSplit()
    self._spent = collections.Counter[str]()  # Seconds of this start.
    self._meter = progress.Progress(
      end,
      flops_per_step=flops_per_step,
      peak=peak_flops.peak(jax.devices()),
    )
    self._unread: tuple[Any, ...] | None = None
    self._writer = self._starts = None
    if distributed.is_lead():
      # Without a restored step, step 0 is evaluated again: drop its record too.
      self._writer = metrics.MetricWriter(
        workdir,
        -1 if start is None else start,
        selected.selects,
        train.trackers,
        config,
      )
      lost = self._writer.dropped
      if lost and start is None:
        distributed.log(f'{len(lost):,} records of metrics are dropped')
      steps = [record for record in lost if record['kind'] == 'time']
      self._starts = timing.Starts(
        workdir, start or 0, steps, batch_size=train.batch_size
      )
    # Step -> selected metric; equal on all processes, for early stopping. Sent
    # as a list, since JSON would turn the steps into strings.
    self._evaluations: dict[int, float] = dict(
      distributed.from_lead(
        lambda: list(self._writer.evaluations.items()), 'state'
      )
    )
    self._patience, self._held_out = train.patience, selected
    # Step and metrics of the last evaluation of this start.
    self._evaluation: tuple[int, Mapping[str, float]] = 0, {}
    self._max_kl, self.over_budget = train.rollouts.max_kl, False

  def __exit__(self, *exception) -> None:
    if self._writer:
      self._writer.close()

  @property
  def evaluated(self) -> int | None:
    """The last evaluated step, equal on all processes."""
    return next(reversed(self._evaluations), None)

  @property
  def stagnates(self) -> bool:
    """Whether none of the last `patience` evaluations was a new best."""
    values = self._evaluations.values()
    ranks = [held_out_metrics.rank(self._held_out, value) for value in values]
    recent = ranks[-self._patience :]
    return 0 < self._patience < len(ranks) and not (
      min(recent) < min(ranks[: -self._patience])
    )

  def spent(self, on: str) -> contextlib.AbstractContextManager[None]:
    """Attributes the time in the context to a part of `timing.PARTS`."""
    return self._split.spent(on)

  @contextlib.contextmanager
  def phase(
    self, watch: watchdog.Watchdog, step: int, name: str
  ) -> Iterator[None]:
    """Times a phase of a step, under the watchdog's limit for it."""
    watch.beat(step, name)
    with self.spent(name):
      yield

  def dispatched(
    self,
    step: int,
    values: Mapping[str, jax.Array | float],
    rows: np.ndarray,
    position: int,
  ) -> None:
    """Reads the metrics of the previous step and stores those of this step.

    Args:
      step: number of the dispatched step, from 1.
      values: metrics of the step, mostly device arrays.
      rows: record rows of its batch.
      position: rows consumed so far, including this step.
    """
    self.read()
    self._unread = step, values, rows, position

  def read(self) -> None:
    """Reads, counts and writes the metrics of the last step, if unread.

    Called before each save and evaluation, because the cost and metrics of a
    checkpoint include its last step.

    Raises:
      DivergedError: too many consecutive updates were not finite.
    """
    if self._unread is None:
      return
    (step, values, rows, position), self._unread = self._unread, None
    # Blocks until the step has run: the only wait for the device.
    with self.spent('device'):
      values = {name: np.asarray(v).item() for name, v in values.items()}
    self.cost.rows = position
    self.cost.target_tokens += values['weight']
    self.cost.total_tokens += values['tokens']
    self.cost.flops += self._flops
    self._meter.update(step, values['tokens'])
    times = self._split.take()
    self._spent.update(times)
    if rates := self._meter.rates():
      times |= rates | _sampling_rates(times, values)
    self.over_budget = 0 < self._max_kl < values.get('kl', 0.0)
    self._write('train', step, values)
    self._write('time', step, times)
    self._guard.check(step, values['skipped_in_row'], rows)
    if step % self._log_every == 0 or step == self._end:
      norm = f'grad {values["gradient_norm"]:.4g}'
      distributed.log(self._meter.line(*self._shown(values), norm))
      if self._starts:
        goodput = self._starts.goodput(self.cost.seconds)
        memory = environment.memory_high_water()
        total = max(self._spent['seconds/total'], 1e-9)
        shares = {
          f'share/{part}': self._spent[f'seconds/{part}'] / total
          for part in ('sample', 'reward')
        }
        self._write('job', step, goodput | shares | memory)

  def record_evaluation(self, step: int, values: Mapping[str, float]) -> None:
    """Writes held-out metrics and prints the selected metric."""
    value = values[self._held_out.selects]
    text = held_out_metrics.describe(self._held_out, value)
    shown = self._shown(values, self._held_out.selects)
    text = ', '.join([f'{text} {self._held_out.unit}', *shown])
    distributed.log(f'step {step}: {text}')
    self._evaluation = step, values
    curves = {name: values[name] for name in self._held_out.curves}
    tokens = {'target_tokens': self.cost.target_tokens}
    self._write('eval', step, curves | tokens)
    self._evaluations[step] = value

  def record_scores(self, step: int, scores: Mapping[str, float]) -> None:
    """Writes and prints the scores of evaluators."""
    shown = ', '.join(f'{name} {value:.4g}' for name, value in scores.items())
    distributed.log(f'step {step}: {shown}')
    self._write('scores', step, scores)

  def show(self, name: str, step: int, rows: trackers.Rows) -> None:
    """Sends a table to the trackers, if it has rows."""
    if self._writer and rows:
      self._writer.show(name, step, rows)

  def describe_end(self, step: int, steps: int, within: int | None) -> str:
    """Returns why a job ends early; '' if it does not.

    Args:
      step: the last step.
      steps: steps of the job.
      within: saved step within the KL budget to use instead, or None.

    Raises:
      UserError: the KL is over budget and no save is within it.
    """
    if self.over_budget:
      # The KL is of the policy before the last update.
      problem = (
        f'the KL to the reference at step {step - 1} is above the largest that'
        f' {rollout_options.LABEL}.max_kl allows ({self._max_kl})'
      )
      if within is None:
        raise errors.UserError(
          f'{problem}, and no save is within it; start from the reference, and'
          ' lower config.optimizer.learning_rate or config.checkpoint.every.'
        )
      return (
        f'{problem}: the job ends, saves over it are deleted, and commands open'
        f' the save of step {within}'
      )
    if self.stagnates:
      rises = held_out_metrics.rank(self._held_out, 1.0) < 0
      better = 'higher' if rises else 'lower'
      return (
        f'no {better} held-out {self._held_out.selects} in {self._patience}'
        f' evaluations: the job ends at step {step} of {steps}'
      )
    if step < steps:
      return (
        f'the last pass is over: the records end after {self.cost.rows:,} rows,'
        f' at step {step} of {steps}'
      )
    return ''

  def count(self, seconds: float) -> None:
    """Adds the seconds of a step without compilation to the cost."""
    self.cost.seconds += seconds

  def saved(self, order: row_order.Order) -> dict[str, Any]:
    """Flushes the metrics and returns the totals to save.

    Args:
      order: the order of the rows.
    """
    if self._writer:  # Checkpoints must not be ahead of the metrics.
      self._writer.flush()
    self.cost.rows_of_parts = order.consumed(self.cost.rows).tolist()
    return self.cost.as_dict()

  def pause(self) -> None:
    """Excludes the time since the last step from the rates."""
    self._meter.pause()

  def compiled(self) -> None:
    """Excludes the step just compiled from the rates."""
    self._meter.restart()

  def _shown(self, values: Mapping[str, float], skip='') -> Iterator[str]:
    evaluated, held_out = self._evaluation
    for name in self._held_out.shown:
      # Without a KL in the loss, only evaluations read the reference.
      value = values.get(name, held_out.get(name))
      if value is not None and name != skip:
        note = '' if name in values else f' (held-out, step {evaluated})'
        yield f'{name} {held_out_metrics.format_value(name, value)}{note}'

  def _write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
    if self._writer:
      self._writer.write(kind, step, values)


def _sampling_rates(
  times: Mapping[str, float], values: Mapping[str, float]
) -> dict[str, float]:
  if 'sampled_tokens' not in values:
    return {}
  parts = {'update': ('dispatch', 'compile', 'device')}
  parts |= {name: (name,) for name in ('sample', 'reward')}
  seconds = {
    name: sum(times[f'seconds/{part}'] for part in group)
    for name, group in parts.items()
  }
  # The time of rewards may be 0.
  return {
    f'sampled_tokens_per_second/{name}': values['sampled_tokens'] / value
    for name, value in seconds.items()
    if value > 0
  }
