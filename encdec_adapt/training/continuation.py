"""What a job may be continued as, and what is said of the differences."""

from collections.abc import Callable, Mapping
from typing import Any

from encdec_adapt.runtime import environment, errors


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


def check_same_rows(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
  """Refuses to continue at a position in other rows than it was saved in.

  Args:
    saved: what the checkpoint says of its records and their order.
    now: digests of this job's records and the seed of their order.

  Raises:
    UserError: the rows differ.
  """
  # Passes may have been added since.
  now = {**now, 'records': now['records'][: len(saved['records'])]}
  for key, name in (('records', 'config.data'), ('seed', 'config.seed')):
    if saved[key] != now[key]:
      raise errors.UserError(
        f'the checkpoint was written at a position in other rows: {key} was'
        f' {saved[key]}, now {now[key]}. Set {name} back, or start in'
        ' another --workdir.'
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
