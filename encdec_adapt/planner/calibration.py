"""Errors of estimates against measured training speeds; must not import jax.

calibration.json in this folder lists decoder-only training of published speed,
and steps of a pair that were measured here: `name`; `config` of the same job in
this repository, with `changes` to its keys and the `examples` of a row, if they
are stated; `topology`; the
`source` that states its model FLOPs utilisation; that, `published`, with causal
attention counted half; and the `estimated` one, `by` which estimator, with the
`gib` of the plan. `estimated` is null where nothing fits. MaxText's page for
v5e counts causal attention whole, which gives 61.1% for 16B and 66.9% for 32B;
it is 6.4% and 3.3% of these models' FLOPs then.

    python -m tests.benchmarks.calibration

writes the estimates.
"""

from importlib import resources
import json
from typing import Any

_FILE = resources.files(__package__) / 'calibration.json'
Row = dict[str, Any]


def table() -> list[Row]:
  """Returns the rows of calibration.json."""
  return json.loads(_FILE.read_text())


def text(rows: list[Row]) -> str:
  """Returns a line of text for every row."""
  lines = ['such estimates for runs whose MFU was measured:']
  for row in rows:
    begin = f'  {row["name"]:<26}{row["published"]:>6.1%} measured,'
    if row['estimated'] is None:  # Out of memory in the compiler.
      lines.append(f'{begin} does not fit here')
      continue
    error = 100 * (row['estimated'] - row['published'])
    lines.append(
      f'{begin} {row["estimated"]:>6.1%} here ({error:+.1f} points,'
      f' {row["by"]})'
    )
  return '\n'.join(lines)
