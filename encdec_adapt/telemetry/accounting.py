"""What a run has cost so far, and its summary with its sources' costs."""

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
    rows: record rows consumed: the position in the data.
    target_tokens: tokens with weight.
    total_tokens: tokens that are not padding, encoder's and decoder's.
    flops: model FLOPs by the formula of `models.model_flops`, teacher's too.
    seconds: in training steps; evaluation, saving, and steps that were
      compiled first are left out.
  """

  rows: int = 0
  target_tokens: float = 0.0
  total_tokens: float = 0.0
  flops: float = 0.0
  seconds: float = 0.0

  def as_dict(self) -> dict[str, int | float]:
    """The totals by name."""
    return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Sources:
  """What all that a run is made from had cost when it started.

  Attributes:
    ledger: totals by resolved path of a run, so that each counts once.
    not_counted: sources of which it is not known: folders of other software,
      and runs that have not ended.
  """

  ledger: dict[str, dict[str, int | float]]
  not_counted: list[str]

  def as_dict(self) -> dict[str, Any]:
    """Both by name, as JSON can hold them."""
    return dataclasses.asdict(self)


def read_sources(paths: Iterable[str]) -> Sources:
  """Reads what sources have cost, with theirs, off their summaries.

  Args:
    paths: what a run starts from or learns from.
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
  """What a finished run has cost, its sources included.

  Args:
    workdir: of the run.
    own: parameters, steps, losses: kept as they are.
    cost: the run's own.
    sources: what the run started from or learnt from.

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
