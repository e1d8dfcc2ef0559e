"""Errors of estimates against published training speeds.

calibration.json in this folder lists decoder-only training whose speed was
published: `name`; `config` of the same job in this repository; `topology`; the
`source` that states its model FLOPs utilisation; that, `published`, with causal
attention counted half; and the `estimated` one, `by` which estimator, with the
`gib` of the plan. `estimated` is null where nothing fits. MaxText's page for
v5e counts causal attention whole, which gives 61.1% for 16B and 66.9% for 32B;
it is 6.4% and 3.3% of these models' FLOPs then.

    python -m encdec_adapt.plan --calibrate=all

writes the estimates.
"""

from importlib import resources
import json
from typing import Any

from encdec_adapt.cli import errors
from encdec_adapt.files import atomic

_FILE = resources.files(__package__) / 'calibration.json'
Row = dict[str, Any]


def table() -> list[Row]:
  """Returns the rows of calibration.json."""
  return json.loads(_FILE.read_text())


def write(rows: list[Row]) -> None:
  """Stores the rows in calibration.json."""
  atomic.write_json(str(_FILE), rows)


def select(rows: list[Row], parts: list[str]) -> list[Row]:
  """Returns the rows whose names contain one of some parts, or 'all'.

  Raises:
    UserError: no name contains one of the parts.
  """
  for part in parts:
    if part != 'all' and not any(part in row['name'] for row in rows):
      raise errors.UserError(
        f'--calibrate={part} is in no name of a published run; those are'
        f' {"; ".join(row["name"] for row in rows)}.'
      )
  return [
    row
    for row in rows
    if any(part == 'all' or part in row['name'] for part in parts)
  ]


def text(rows: list[Row]) -> str:
  """Returns the rows for people, one a line."""
  lines = ['such estimates for runs whose MFU was published:']
  for row in rows:
    begin = f'  {row["name"]:<26}{row["published"]:>6.1%} published,'
    if row['estimated'] is None:  # Out of memory in the compiler.
      lines.append(f'{begin} does not fit here')
      continue
    error = 100 * (row['estimated'] - row['published'])
    lines.append(
      f'{begin} {row["estimated"]:>6.1%} here ({error:+.1f} points,'
      f' {row["by"]})'
    )
  return '\n'.join(lines)
