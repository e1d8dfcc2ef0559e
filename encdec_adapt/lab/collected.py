"""Data of a study's report, filled by `study_results`.

This module imports only `pages` and `results_store`.
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
  """A model of a study, for a seed.

  Attributes:
    model: name of the arm or command.
    seed: seed of the run; None for a command without seeds.
    folder: folder of the run or model; '' for stored results.
    values: resolved configuration by key, without missing stacks; for an
      untrained model, only the keys of the model.
    summary: summary of the training (`telemetry.compute_cost`): `parameters`,
      `made_by` of an untrained model, `steps`, `target_tokens` (in the loss),
      `total_tokens` (read), `flops` with the teacher's, `seconds`, and
      `inclusive`, the same with all sources. For an imported model, the numbers
      of its training, if known.
    counts: `parameters`, `without tables`, and for a generative model the
      inference FLOPs of `Collected.request` in both conventions, `FLOPs` and
      `FLOPs, published`.
    size: layers and widths of its stacks.
    curve: lists of equal length over the evaluations in training: `step`,
      `target_tokens`, `flops` with all sources, `loss`, and other held-out
      metrics of its kind of training (`held_out_metrics.HeldOut.shown`).
    scores: scores by name of the evaluation.
    generated: tokens per answer in the cost measurement; 0 for none.
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

  @property
  def all_scores(self) -> list[results_store.Score]:
    """The scores of all evaluations."""
    return [score for scores in self.scores.values() for score in scores]

  def score(
    self, metric: str, evaluation: pages.Evaluation
  ) -> results_store.Score | None:
    """Returns the score of 'TASK/METRIC' in an evaluation; None without one."""
    scores = self.scores.get(evaluation.name, ())
    matches = [x for x in scores if f'{x.task}/{x.metric}' == metric]
    return matches[-1] if matches else None


@dataclasses.dataclass(frozen=True)
class Collected:
  """Content of a study's report.

  Attributes:
    study: the page.
    command: command that runs the study.
    date: day of the report, as YYYY-MM-DD.
    runs: finished models, in the order of the page, then by seed.
    stages: `name`, `model`, `status`, `command`, `seconds` over all starts,
      `error` and `own` (whether it is in this study's folder, not in another
      study's) of every started stage.
    notes: sentences on stages that failed or ran with other versions.
    rates: metric at each learning rate, by the name of the sweep.
    request: tokens of prompt and answer for inference FLOPs.
    samples: continuations: `run` (the model), `prompt`, `continuation`, and
      further fields.
    rollouts: completions of held-out prompts at the end of each policy:
      `model`, `seed`, `step`, `prompt`, `completion`, `greedy`, `reward`.
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
  rollouts: Sequence[Mapping[str, Any]] = ()
  text: Mapping[str, Any] = _mapping()
  environment: Mapping[str, Any] = _mapping()

  @property
  def seconds(self) -> float:
    """Time of the study's own stages."""
    return sum(stage['seconds'] for stage in self.stages if stage['own'])

  @property
  def models(self) -> list[str]:
    """Names of the arms and commands with runs, in the order of the page."""
    return list(dict.fromkeys(run.model for run in self.runs))

  def of(self, model: str) -> list[Run]:
    """Returns the runs of an arm or command."""
    return [run for run in self.runs if run.model == model]
