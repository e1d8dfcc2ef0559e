"""Cumulative compute of a run and its ancestors, in its summary.

This module must not import models: callers pass the numbers to add up.
"""

from collections.abc import Mapping
import dataclasses
import json
import os
from typing import Any

from encdec_adapt.files import paths as paths_lib

SUMMARY = 'summary.json'


@dataclasses.dataclass
class Cost:
  """Running totals of a job over all its starts.

  Attributes:
    rows: record rows consumed, the position in the data.
    rows_of_parts: rows consumed of each part of a mixture
      (`data/records/row_order.py`).
    target_tokens: target tokens with nonzero weight.
    total_tokens: encoder and decoder tokens, without padding.
    flops: model FLOPs (`models.forward_flops`), including the teacher's.
    seconds: time in training steps, without evaluation, saving and steps with
      compilation.
  """

  rows: int = 0
  rows_of_parts: list[int] = dataclasses.field(default_factory=list)
  target_tokens: float = 0.0
  total_tokens: float = 0.0
  flops: float = 0.0
  seconds: float = 0.0

  def as_dict(self) -> dict[str, Any]:
    """Returns the totals by name."""
    return dataclasses.asdict(self)


def read_sources(
  folders: Mapping[str, str | os.PathLike[str]],
) -> dict[str, Any]:
  """Reads the totals of sources and their ancestors from their summaries.

  Args:
    folders: source and teacher models of a run, name -> folder.

  Returns:
    `ledger`, totals by resolved path of each run, so that each counts once;
    `not_counted`, sources with unknown totals (foreign folders and unfinished
    runs). JSON serializable.
  """
  ledger, not_counted = {}, []
  for name, path in folders.items():
    file = paths_lib.at(path) / SUMMARY
    if file.exists():
      ledger.update(json.loads(file.read_text())['ledger'])
    else:
      not_counted.append(name)
  return {'ledger': ledger, 'not_counted': not_counted}


def summarise(
  workdir: str | os.PathLike[str],
  entries: dict[str, Any],
  cost: Cost,
  sources: Mapping[str, Any],
) -> dict[str, Any]:
  """Returns the summary of a finished run.

  Args:
    workdir: work directory of the run.
    entries: entries to copy: parameters, steps, losses.
    cost: totals of the run itself.
    sources: result of `read_sources` when the run started.

  Returns:
    The summary; `inclusive` has the totals with all sources.
  """
  # Keyed by resolved path, so that an ancestor of several sources counts once.
  key = str(paths_lib.absolute(workdir))
  ledger = sources['ledger'] | {key: cost.as_dict()}
  totals = ('target_tokens', 'total_tokens', 'flops', 'seconds')
  return {
    **entries,
    **cost.as_dict(),
    'not_counted': sources['not_counted'],
    'inclusive': {
      name: sum(costs[name] for costs in ledger.values()) for name in totals
    },
    'ledger': ledger,
  }
