"""Errors of estimates against measured training speeds; must not import jax.

calibration.json in this folder lists decoder-only training runs with published
speeds, and steps of a pair measured here. Fields: `name`; `config` of the same
job in this repository, with optional `changes` to its keys and `examples` per
row; `topology`; `source` of the model FLOPs utilisation; `published`, its value
with causal attention counted half; `estimated`, the estimate, `by` an
estimator, with `gib` of the plan; null if the job does not fit. MaxText's page
for v5e counts causal attention in full, which gives 61.1% for 16B and 66.9% for
32B; it is then 6.4% and 3.3% of these models' FLOPs.

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
  """Formats the rows, one per line."""
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
