"""Errors of estimates against published training speeds.

`RUNS` lists decoder-only training whose speed was published. The file
calibration.json in this folder has the estimate for each, written by

    python -m encdec_adapt.plan --calibrate=all
"""

from collections.abc import Mapping
import dataclasses
from importlib import resources
import json
from typing import Any

from encdec_adapt.cli import errors
from encdec_adapt.files import atomic


@dataclasses.dataclass(frozen=True)
class Run:
  """Training whose speed was published.

  Attributes:
    config: configuration of the same job in this repository.
    topology: chips, as `planning.chips.parse` reads them.
    mfu: published model FLOPs utilisation, 0 to 1, with causal attention
      counted half.
    source: document that states it.
  """

  config: str
  topology: str
  mfu: float
  source: str


_TIERS = 'MaxText docs/reference/models/tiering.md'
_V5E = 'MaxText configs/v5e/README.md, which counts causal attention whole'
RUNS: Mapping[str, Run] = {
  'Llama 3.1 8B, v6e x 256': Run(
    'configs/published.py:shape=llama3.1_8b,length=8192,rows=1024,replica=16,'
    'remat=attention',
    'v6e:16x16',
    0.4546,
    _TIERS,
  ),
  'Llama 2 70B, v6e x 256': Run(
    'configs/published.py:shape=llama2_70b,length=4096,rows=1024,replica=16',
    'v6e:16x16',
    0.438,
    _TIERS,
  ),
  'Gemma 3 12B, v6e x 256': Run(
    'configs/published.py:shape=gemma3_12b,length=32768,rows=256,replica=16',
    'v6e:16x16',
    0.381,
    'tpu-recipes training/trillium/Gemma3-12B-MaxText/v6e-256',
  ),
  # 61.1 % and 66.9 % with causal attention counted whole, which is 6.4 % and
  # 3.3 % of these models' FLOPs then.
  'MaxText 16B, v5e x 256': Run(
    'configs/published.py:shape=maxtext_16b,length=2048,rows=1536,replica=4',
    'v5e:16x16',
    0.591,
    _V5E,
  ),
  'MaxText 32B, v5e x 256': Run(
    'configs/published.py:shape=maxtext_32b,length=2048,rows=1024,replica=4',
    'v5e:16x16',
    0.658,
    _V5E,
  ),
  'Llama 2 70B, v5p x 512': Run(
    'configs/published.py:shape=llama2_70b,length=4096,rows=2048,replica=16',
    'v5p:8x8x8',
    0.654,
    _TIERS,
  ),
  'Llama 2 7B, H100 x 8': Run(
    'configs/published.py:shape=llama2_7b,length=4096,rows=32,attention=chunked',
    'h100:8',
    0.497,
    'MaxText configs/gpu/a3/llama_2_7b/README.md',
  ),
  'Llama 2 7B, H100 x 128': Run(
    'configs/published.py:shape=llama2_7b,length=4096,rows=512,replica=16,'
    'attention=chunked',
    'h100:128',
    0.379,
    'MaxText configs/gpu/a3/llama_2_7b/README.md',
  ),
}


_FILE = resources.files(__package__) / 'calibration.json'


def select(parts: list[str]) -> dict[str, Run]:
  """Returns the runs whose names contain one of some parts, or 'all'.

  Raises:
    UserError: no name contains one of the parts.
  """
  for part in parts:
    if part != 'all' and not any(part in name for name in RUNS):
      raise errors.UserError(
        f'--calibrate={part} is in no name of a published run; those are'
        f' {"; ".join(RUNS)}.'
      )
  return {
    name: run
    for name, run in RUNS.items()
    if any(part == 'all' or part in name for part in parts)
  }


def table() -> list[dict[str, Any]]:
  """Returns the stored rows, as `row` makes them.

  Raises:
    UserError: the file is missing from the installation.
  """
  try:
    return json.loads(_FILE.read_text())
  except FileNotFoundError as error:
    raise errors.UserError(
      f'{_FILE} is missing, which has the errors of estimates; install the'
      ' package again.'
    ) from error


def write(rows: list[dict[str, Any]]) -> None:
  """Stores the rows in calibration.json."""
  atomic.write_json(str(_FILE), rows)


def row(name: str, plan: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a row of the table: a run, its published MFU and its plan's."""
  run = RUNS[name]
  return {
    'name': name,
    'config': run.config,
    'topology': run.topology,
    'source': run.source,
    'published': run.mfu,
    'estimated': plan['mfu'],
    'by': plan['source'],
    'gib': plan['memory']['peak'] / 2**30,
  }


def text(rows: list[dict[str, Any]]) -> str:
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
