"""What is collected of a study for its report; `study_results` fills it.

It imports `pages` and `results_store` alone.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from encdec_adapt.evaluation.results import results_store
from encdec_adapt.lab import pages


def _mapping() -> Any:
  return dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Run:
  """A model of a study, with a seed.

  Attributes:
    model: name of the arm or command.
    seed: seed of the run; None of a command without seeds.
    folder: folder of the run or model.
    values: resolved configuration by key, without that of stacks that it lacks;
      of a model that is not trained the keys of the model alone.
    summary: summary of the training (`telemetry.compute_cost`): `parameters`,
      `made_by` of a model that is not trained, `steps`, `target_tokens` (in the
      loss), `total_tokens` (read), `flops` with the teacher's, `seconds`, and
      `inclusive`, the same with all sources. Of an imported model the numbers
      of its training, where these are known.
    counts: `parameters`, `without tables`, and of a model that generates the
      inference FLOPs of `Collected.request` in both conventions, `FLOPs` and
      `FLOPs, published`.
    size: layers and widths of its stacks.
    curve: lists of equal length of the evaluations in training: `step`,
      `target_tokens`, `flops` with those of all sources, and `loss`.
    scores: scores by name of the evaluation.
    generated: tokens of the answers of measured cost; 0 for none.
  """

  model: str
  seed: int | None
  folder: str
  values: Mapping[str, Any]
  summary: Mapping[str, Any]
  counts: Mapping[str, float]
  size: str
  curve: Mapping[str, Sequence[float]]
  scores: Mapping[str, Sequence[results_store.Score]] = _mapping()
  generated: int = 0

  def score(
    self, metric: str, evaluation: pages.Evaluation
  ) -> results_store.Score | None:
    """Returns the score of 'TASK/METRIC' in an evaluation; None without one."""
    scores = self.scores.get(evaluation.name, ())
    matches = [x for x in scores if f'{x.task}/{x.metric}' == metric]
    return matches[-1] if matches else None


@dataclasses.dataclass(frozen=True)
class Collected:
  """All that the report of a study is made of.

  Attributes:
    study: the page.
    command: command that runs the study.
    date: day of the report, as YYYY-MM-DD.
    runs: models that are finished, in the order of the page, then by seed.
    stages: `name`, `model`, `status`, `command`, `seconds` over all starts,
      `error` and `own` (whether it is in the study's folder, not in that of
      another study) of every stage that was started.
    notes: sentences on stages that failed, or that other versions made.
    rates: held-out loss at each learning rate, by the name of the choice.
    request: tokens of prompt and answer for which inference is counted.
    samples: continuations: `prompt`, `continuation`, and further fields.
    table: rows of the table of the study.
    text: facts about the held-out records.
    environment: versions and hardware.
  """

  study: pages.Study
  command: str
  date: str
  runs: Sequence[Run]
  stages: Sequence[Mapping[str, Any]]
  notes: Sequence[str] = ()
  rates: Mapping[str, Mapping[str, float]] = _mapping()
  request: tuple[int, int] = (0, 0)
  samples: Sequence[Mapping[str, Any]] = ()
  table: Sequence[Mapping[str, Any]] = ()
  text: Mapping[str, Any] = _mapping()
  environment: Mapping[str, Any] = _mapping()

  @property
  def seconds(self) -> float:
    """Time of the stages that the study itself has run."""
    return sum(stage['seconds'] for stage in self.stages if stage['own'])

  @property
  def models(self) -> list[str]:
    """Names of the arms and commands with runs, in the order of the page."""
    return list(dict.fromkeys(run.model for run in self.runs))

  def of(self, model: str) -> list[Run]:
    """Returns the runs of an arm or command."""
    return [run for run in self.runs if run.model == model]
