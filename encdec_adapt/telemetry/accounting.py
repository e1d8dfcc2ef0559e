"""Compute that a run has used, and its summary with that of its sources."""

from collections.abc import Iterable
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
    target_tokens: target tokens with nonzero weight.
    total_tokens: encoder and decoder tokens that are not padding.
    flops: model FLOPs as of `models.model_flops`, with the teacher's.
    seconds: time in training steps, without evaluation, saving and the steps
      that were compiled first.
  """

  rows: int = 0
  target_tokens: float = 0.0
  total_tokens: float = 0.0
  flops: float = 0.0
  seconds: float = 0.0

  def as_dict(self) -> dict[str, int | float]:
    """Returns the totals by name."""
    return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Sources:
  """Cumulative compute of a run's ancestors when it started.

  Attributes:
    ledger: totals by resolved path of each run, so that each counts once.
    not_counted: sources with unknown totals: folders of other software, and
      runs that have not ended.
  """

  ledger: dict[str, dict[str, int | float]]
  not_counted: list[str]

  def as_dict(self) -> dict[str, Any]:
    """Returns both by name, JSON serialisable."""
    return dataclasses.asdict(self)


def read_sources(paths: Iterable[str]) -> Sources:
  """Reads the totals of sources and their ancestors from their summaries.

  Args:
    paths: folders that a run starts from or distils from.
  """
  found = Sources({}, [])
  for path in dict.fromkeys(paths):
    file = paths_lib.at(path) / SUMMARY
    if file.exists():
      found.ledger.update(json.loads(file.read_text())['ledger'])
    else:
      found.not_counted.append(path)
  return found


def summarise(
  workdir: str | os.PathLike[str],
  own: dict[str, Any],
  cost: Cost,
  sources: Sources,
) -> dict[str, Any]:
  """Makes the summary of a finished run.

  Args:
    workdir: work directory of the run.
    own: entries to keep as they are: parameters, steps, losses.
    cost: totals of the run itself.
    sources: totals of the runs that it started from or distilled from.

  Returns:
    The summary; `inclusive` holds the totals with all sources.
  """
  ledger = sources.ledger | {str(paths_lib.absolute(workdir)): cost.as_dict()}
  totals = ('target_tokens', 'total_tokens', 'flops', 'seconds')
  return {
    **own,
    **cost.as_dict(),
    'not_counted': sources.not_counted,
    'inclusive': {
      name: sum(entry[name] for entry in ledger.values()) for name in totals
    },
    'ledger': ledger,
  }
