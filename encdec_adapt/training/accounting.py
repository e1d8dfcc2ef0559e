"""What a run has cost so far, and its summary with its sources' costs."""

from collections.abc import Sequence
import dataclasses
import json
import os
from typing import Any

from encdec_adapt.runtime import errors, files, storage

SUMMARY = 'summary.json'


@dataclasses.dataclass
class Cost:
  """Running totals of a job over all its starts.

  Attributes:
    rows: record rows consumed: the position in the data.
    target_tokens: tokens with weight.
    total_tokens: tokens that are not padding, encoder's and decoder's.
    flops: model FLOPs by the formula of `runtime.flops`, teacher's too.
    seconds: in training steps, evaluation and saving left out.
  """

  rows: int = 0
  target_tokens: float = 0.0
  total_tokens: float = 0.0
  flops: float = 0.0
  seconds: float = 0.0

  def as_dict(self) -> dict[str, int | float]:
    """The totals by name."""
    return dataclasses.asdict(self)


def write_summary(
  workdir: str, own: dict[str, Any], cost: Cost, sources: Sequence[str]
) -> dict[str, Any]:
  """Writes a finished run's summary; arguments and result as `summarise`."""
  summary = summarise(workdir, own, cost, sources)
  files.write_json(storage.join(workdir, SUMMARY), summary)
  return summary


def summarise(
  workdir: str | os.PathLike[str],
  own: dict[str, Any],
  cost: Cost,
  sources: Sequence[str],
) -> dict[str, Any]:
  """What a finished run has cost, its sources included.

  Args:
    workdir: of the run.
    own: parameters, steps, losses: kept as they are.
    cost: the run's own.
    sources: work directories it started from or learnt from; each counts
      once, with its sources.

  Returns:
    The summary; `inclusive` holds the totals with all sources.
  """
  # By resolved path, so that a folder counts once however it is spelled.
  ledger = {str(storage.absolute(workdir)): cost.as_dict()}
  for source in sources:
    path = storage.at(source) / SUMMARY
    if not path.exists():
      raise errors.UserError(
        f'{source} has no {SUMMARY}, so that what it cost is not known; let'
        ' that run end (start it again).'
      )
    ledger |= json.loads(path.read_text())['ledger']
  totals = ('target_tokens', 'total_tokens', 'flops', 'seconds')
  return {
    **own,
    **cost.as_dict(),
    'inclusive': {
      name: sum(entry[name] for entry in ledger.values()) for name in totals
    },
    'ledger': ledger,
  }
