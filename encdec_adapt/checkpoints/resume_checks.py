"""Checks on resume: what must not have changed, and what is only reported."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from encdec_adapt.cli import errors, keys
from encdec_adapt.telemetry import environment

Say = Callable[[str], None]


def check_config(
  saved: Mapping[str, Any], config: Mapping[str, Any], say: Say
) -> None:
  """Checks that a training job wrote a checkpoint; prints keys that changed.

  Args:
    saved: `meta` of the checkpoint.
    config: the configuration of this start.
    say: prints a paragraph.

  Raises:
    UserError: `convert` wrote the checkpoint, so that it has no data order.
  """
  if 'order' not in saved:
    raise errors.UserError(
      'this --workdir was made by encdec_adapt.convert, not by a training job:'
      ' give it as config.init.encoder, and another --workdir.'
    )
  # Keys that the checkpoint's version did not have cannot have changed.
  before, _ = keys.complete(saved['config'], config)
  changed = environment.difference(
    environment.flat({'config': before}),
    environment.flat({'config': config}),
  )
  if changed:
    say('the configuration has changed:\n  ' + '\n  '.join(changed))


def check_same_rows(
  saved: Mapping[str, Any],
  now: Mapping[str, Any],
  consumed: Sequence[int],
  ranges: Sequence[Sequence[tuple[int, int]]],
) -> None:
  """Checks that the saved position is a position in the same rows.

  Args:
    saved: digests of the records and seed of their order in the checkpoint.
    now: digests and seed of this start.
    consumed: rows consumed of every part of a mixture, or of all together.
    ranges: first row and end of every pass of every part, [pass][part].

  Raises:
    UserError: the rows differ, or passes were added before the position.
  """
  before, after = len(saved['records']), len(now['records'])
  same = {**now, 'records': now['records'][:before]}
  for key, name in (('records', 'config.data'), ('seed', 'config.seed')):
    if saved[key] != same[key]:
      raise errors.UserError(
        f'the checkpoint was written at a position in other rows: {key} was'
        f' {saved[key]}, now {same[key]}. Set {name} back, or start in'
        ' another --workdir.'
      )
  rows = [
    sum(stop - start for start, stop in part)
    for part in zip(*ranges[:before], strict=True)
  ]
  if len(consumed) == 1:
    rows = [sum(rows)]
  for position, count in zip(consumed, rows, strict=False):
    if after > before and position > count:
      raise errors.UserError(
        f'config.data.passes is {after}, but the checkpoint is in a repetition'
        f' of {before} passes ({position:,} rows of {count:,} were read), so'
        f' the added passes are behind it. Set it to {before}, or start in'
        ' another --workdir.'
      )


def report_environment(
  saved: Mapping[str, Any], now: Mapping[str, Any], say: Say
) -> None:
  """Prints why the job may differ from the uninterrupted one.

  Args:
    saved: `meta` of the checkpoint.
    now: `meta` of this start.
    say: prints a paragraph.
  """
  different = environment.difference(saved['fingerprint'], now['fingerprint'])
  if different:
    say(
      'the environment has changed since the checkpoint was written, so the'
      ' job resumes to rounding, not bit for bit:\n  ' + '\n  '.join(different)
    )


def report_end(left: int | None, step: int, steps: int, say: Say) -> None:
  """Prints the last step if the records run out before the job's last step.

  Args:
    left: remaining batches; None if the records repeat.
    step: step that the job is at.
    steps: step at which it is to end.
    say: prints a paragraph.
  """
  if left is not None and left < steps - step:
    end = step + left
    say(
      f'the records last for {left:,} of the {steps - step:,} remaining steps,'
      f' so the job will end at step {end:,} of {steps:,}. For all steps make'
      ' more passes (config.data.passes) or repeat them'
      f' (config.data.repeat=True); or set config.train.steps={end}, which'
      ' also ends the learning rate schedule there.'
    )
