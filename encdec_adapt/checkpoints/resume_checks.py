"""What a job may be continued as, and what is said of the differences."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from encdec_adapt.cli import errors
from encdec_adapt.telemetry import environment


def check_is_training(saved: Mapping[str, Any]) -> None:
  """Refuses to continue what no training job wrote.

  Args:
    saved: what the checkpoint says of its job.

  Raises:
    UserError: says what to do with it.
  """
  if 'order' not in saved:
    raise errors.UserError(
      'this --workdir was made by encdec_adapt.convert, not by a training job:'
      ' give it as config.init.encoder, and another --workdir.'
    )


def check_same_rows(
  saved: Mapping[str, Any],
  now: Mapping[str, Any],
  position: int,
  starts: Sequence[int],
) -> None:
  """Refuses to continue at a position in other rows than it was saved in.

  Args:
    saved: what the checkpoint says of its records and their order.
    now: digests of this job's records and the seed of their order.
    position: rows consumed.
    starts: first row of each of this job's passes, and the number of rows.

  Raises:
    UserError: the rows differ, or passes were added behind which the job
      already is: they would stand before rows that it has read.
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
  if after > before and position > starts[before]:
    raise errors.UserError(
      f'{after} passes of records are given, and the checkpoint was written in'
      f' a repetition of {before}: {position:,} rows were read of'
      f' {starts[before]:,}, so that the place of the passes that were added is'
      f' behind it. Set config.data.passes={before} again, or start'
      ' in another --workdir.'
    )


def report_changes(
  before: Mapping[str, Any], now: Mapping[str, Any], say: Callable[[str], None]
) -> None:
  """Says which keys of the configuration have changed.

  Args:
    before: the configuration in the checkpoint.
    now: that of this job.
    say: takes a paragraph.
  """
  changed = environment.difference(
    *(dict(environment.flat({'config': config})) for config in (before, now))
  )
  if changed:
    say('the configuration has changed:\n  ' + '\n  '.join(changed))


def report_place(
  before: Mapping[str, Any], now: Mapping[str, Any], say: Callable[[str], None]
) -> None:
  """Says why the continuation may differ from the uninterrupted job.

  Args:
    before: what the checkpoint says of its job.
    now: the same of this one.
    say: takes a paragraph.
  """
  different = environment.difference(before['fingerprint'], now['fingerprint'])
  if different:
    say(
      'this is not where the checkpoint was written, so that it continues to'
      ' rounding, not bit for bit:\n  ' + '\n  '.join(different)
    )


def report_end(
  left: int | None, step: int, steps: int, say: Callable[[str], None]
) -> None:
  """Says where a job will end whose records do not last for its steps.

  Args:
    left: batches that there are to come; None for any number.
    step: the job is at.
    steps: it is to take altogether.
    say: takes a paragraph.
  """
  if left is not None and left < steps - step:
    end = step + left
    say(
      f'the records last for {left:,} of the {steps - step:,} steps to come:'
      f' the job is going to end at step {end:,} of {steps:,}. For all of them'
      ' make more passes (config.data.passes) or repeat those that there are'
      f' (config.data.repeat=True); or set config.train.steps={end}, which'
      ' learning rates are then scheduled for.'
    )
