"""Passes of a study's runs over their text."""

import collections
from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.data import data_section
from encdec_adapt.data.making import row_estimates
from encdec_adapt.data.records import record_sets, row_rates
from encdec_adapt.files import paths
from encdec_adapt.lab import plan_results, stage_states, stages

# With more passes, a run memorises its text.
MOST_PASSES = 4
_ROWS = 'rows.json'


def check(stage: stages.Stage, arguments: Sequence[str]) -> None:
  """Rejects a run with more than 4 passes over its text.

  Args:
    stage: the training stage.
    arguments: flags of its command, with paths for the names in braces.

  Raises:
    UserError: names the run, its passes and the remedy.
  """
  prefix = '--config.data.folder='
  (folder,) = (x for x in arguments if x.startswith(prefix))
  _of_records(stage, folder.removeprefix(prefix))


@dataclasses.dataclass(frozen=True)
class Passes:
  """Passes of the training stages of a study.

  Attributes:
    states: states of the stages.
    estimates: estimates of records not built yet, by the identity of their
      stage.
  """

  states: stage_states.States
  estimates: Mapping[str, Mapping[str, Any]]

  @classmethod
  def of(
    cls, states: stage_states.States, trained: Sequence[stages.Stage]
  ) -> 'Passes':
    """Estimates the rows of records not built yet.

    Raises:
      UserError: the text or the vocabulary of records is missing.
    """
    records = {x.identity: x for x in (_records(states, y) for y in trained)}
    jobs = {
      key: stage.settings.data
      for key, stage in records.items()
      # Text written by another stage may not exist yet.
      if not stage.reads and _manifest(states.folder(stage)) is None
    }
    return cls(states, plan_results.find(states, _ROWS, jobs, measure))

  def describe(self, stage: stages.Stage) -> str:
    """Returns a run's passes over its text; '' if unknown.

    Raises:
      UserError: see `check`.
    """
    passes, folder = self._count(stage)
    if passes is None:
      return ''
    return f'{passes:.2f}' if _manifest(folder) else f'about {passes:.2f}'

  def notes(self, trained: Sequence[stages.Stage]) -> list[str]:
    """Returns lines on runs with too many or unknown passes."""
    often, unknown = {}, {}
    for stage in trained:
      passes, _ = self._count(stage)
      if passes and passes > MOST_PASSES:
        # All seeds of a model have the same passes.
        often[stage.model] = (
          f'{stage.model} reads its text about {passes:.1f} times, and more'
          f' than {MOST_PASSES} are refused once the records are made'
        )
      elif passes is None and stage.settings.train.steps:
        records = _records(self.states, stage)
        names = *self.states.missing(records), records.name
        unknown |= dict.fromkeys(f'--stage={name}' for name in names)
    lines = list(often.values())
    if unknown:
      lines.append(f'passes are known after {", ".join(unknown)}')
    return lines

  def _count(self, stage: stages.Stage) -> tuple[float | None, str]:
    """Returns a run's passes (None if unknown) and its records' folder."""
    records = _records(self.states, stage)
    folder = str(self.states.folder(records))
    passes = _of_records(stage, folder)
    if passes is None and (estimate := self.estimates.get(records.identity)):
      passes = count(stage.settings, **estimate)
    return passes, folder


def measure(path: str, jobs: Mapping[str, data_section.DataConfig]) -> None:
  """Adds estimates of the rows of records to a file.

  Args:
    path: the file.
    jobs: configurations of the records by the identity of their stage.
  """

  plan_results.add(path, 'estimating rows', jobs, row_estimates.estimate)


def count(
  settings: config_lib.Settings, parts: Sequence[Mapping[str, Any]], passes: int
) -> float | None:
  """Returns the passes over a run's most repeated text.

  Args:
    settings: settings of the run.
    parts: parts of its records with their totals, as in a manifest.
    passes: passes in the records.

  Returns:
    The passes; None for a run without steps.
  """
  if not (steps := settings.train.steps):
    return None
  phases = row_rates.parse(settings.data.rates)
  phases = phases or [row_rates.Phase(0, 'rows', None)]
  ends = [*(phase.step for phase in phases[1:]), steps]
  # Every objective has rows of all of the text.
  read = collections.Counter()
  for phase, end in zip(phases, ends, strict=True):
    rows = max(min(end, steps) - phase.step, 0) * settings.train.batch_size
    shares = phase.row_shares(parts)
    for part, share in zip(parts, shares, strict=True):
      if share:
        read[part['source']] += share * rows / part['rows']
  return max(read.values()) * passes


def _of_records(stage: stages.Stage, folder: str) -> float | None:
  manifest = _manifest(folder)
  passes = manifest and count(
    stage.settings, manifest['parts'], len(manifest['passes'])
  )
  if passes and passes > MOST_PASSES:
    raise errors.UserError(
      f'stage {stage.name} reads {folder} {passes:.1f} times in'
      f' {stage.settings.train.steps} steps, and at most {MOST_PASSES} passes'
      ' over a text are useful: give it more text, or a smaller budget.'
    )
  return passes


def _records(states: stage_states.States, stage: stages.Stage) -> stages.Stage:
  read = (states.stages[name] for name in stage.reads)
  (records,) = (x for x in read if x.module == 'materialize')
  return records


def _manifest(folder) -> dict[str, Any] | None:
  return record_sets.read_manifest(paths.join(str(folder), 'train'))
