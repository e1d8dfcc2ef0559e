"""The results of a study's claims: effects with intervals, and verdicts.

An effect is of the seeds that all arms of the claim have, and a claim has a
verdict once no seed is missing. A model without seeds, such as an imported one,
is compared with every seed of the other arm. No model is read here.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any

import numpy as np

from encdec_adapt import configs
from encdec_adapt.base import errors
from encdec_adapt.evaluation.reports import collected as collected_lib
from encdec_adapt.evaluation.reports import score_tables
from encdec_adapt.evaluation.results import (
  contrasts,
  crossed_intervals,
  crossings,
  results_store,
  variances,
  verdicts,
)
from encdec_adapt.evaluation.results import number_format as numbers
from encdec_adapt.evaluation.studies import pages

Collected = collected_lib.Collected
Run = collected_lib.Run

_LEVEL = 0.95
# Keys whose values say nothing about what a model learns.
_NO_DIFFERENCE = ('data.folder', 'seed')


@dataclasses.dataclass(frozen=True)
class Result:
  """The result of a claim.

  Attributes:
    claim: the claim.
    seeds: seeds that the effect is of.
    groups: groups of documents, or examples; 0 for a metric without them.
    effective: effective number of groups (`crossed_intervals.Interval`).
    effect: the effect, a ratio of tokens for crossings; None without one.
    low: lower bound of its interval; None with a single seed.
    high: upper bound.
    level: level of the interval.
    verdict: the verdict, or ''.
    note: why there is no interval or verdict, or what limits it; or ''.
  """

  claim: pages.Claim
  level: float
  seeds: int = 0
  groups: int = 0
  effective: float = 0.0
  effect: float | None = None
  low: float | None = None
  high: float | None = None
  verdict: str = ''
  note: str = ''

  @property
  def contrast(self) -> str:
    """The contrast, as text."""
    names = self.claim.contrast
    if self.claim.metric == pages.CROSSING:
      return f'tokens of {names[1]} to the loss of {names[0]}, over its tokens'
    if len(names) == 2:
      return f'{names[1]} - {names[0]}'
    return f'({names[1]} - {names[0]}) - ({names[3]} - {names[2]})'

  def text(self, value: float | None) -> str:
    """Formats the effect or a bound; '' for None."""
    if value is None:
      return ''
    digits = max(0, 1 - math.floor(math.log10(self._unit)))
    sign = '' if self.claim.metric == pages.CROSSING else '+'
    return f'{value:{sign}.{digits}f}'

  @property
  def _unit(self) -> float:
    """The smallest difference that matters, of a ratio its distance to 1."""
    smallest = self.claim.smallest
    return smallest - 1 if self.claim.metric == pages.CROSSING else smallest

  @property
  def interval(self) -> str:
    """The interval, as text; '' without one."""
    if self.low is None:
      return ''
    return f'{self.text(self.low)} to {self.text(self.high)}'

  @property
  def over(self) -> str:
    """Seeds and groups, as text."""
    seeds = f'{self.seeds} seed{"s" * (self.seeds != 1)}'
    return f'{seeds}, {self.groups} groups' if self.groups else seeds

  @property
  def outcome(self) -> str:
    """Verdict and note, as text."""
    note = f'({self.note})' if self.verdict and self.note else self.note
    return f'{self.verdict} {note}'.strip()

  @property
  def sentence(self) -> str:
    """The result, as a sentence."""
    start = (
      f'{self.claim.sentence.rstrip(".")}: {self.outcome or "no verdict"}.'
    )
    if self.effect is None:
      return start
    size = self.text(self.effect)
    if self.interval:
      size += f' ({100 * self.level:.4g} % interval {self.interval})'
    return (
      f'{start} {self.claim.metric}, {self.contrast}: {size}, of {self.over}.'
    )


def results(collected: Collected) -> list[Result]:
  """Returns the result of every claim, in the order of the page."""
  return [_result(collected, claim) for claim in collected.study.claims]


def level(claim: pages.Claim, study: pages.Study) -> float:
  """Returns the level of the interval of a claim."""
  primary = sum(x.primary for x in study.claims)
  return verdicts.level(primary) if claim.primary else _LEVEL


def planned_power(
  claim: pages.Claim, study: pages.Study
) -> verdicts.Power | None:
  """Returns the planned power of a claim.

  Returns:
    None for a single seed, and for a metric without variances of other studies.
  """
  seeds = max(len(study.seeds_of(name)) for name in claim.contrast)
  path = configs.path('studies/variances.json')
  components = variances.planned(
    path, claim.metric, study.name, len(claim.contrast)
  )
  if components is None or seeds < 2:
    return None
  return verdicts.planned_power(
    claim.direction,
    claim.smallest,
    components,
    seeds,
    components.groups,
    level(claim, study),
  )


def reported(
  run: Run, metric: str, evaluation: pages.Evaluation
) -> results_store.Score | None:
  """Returns a score on the examples of reports; None without one.

  A score that is not finite, of a run that has diverged, is none.
  """
  score = run.score(metric, evaluation)
  if score is None or not math.isfinite(score.value):
    return None
  return contrasts.reported(score)


def interval(
  arms: Sequence[Sequence[results_store.Score]], confidence: float
) -> crossed_intervals.Interval:
  """Returns the interval of an arm, or of a contrast of arms.

  A metric that single examples do not have has one over seeds alone.

  Raises:
    UserError: the arms were measured on other examples.
  """
  if all(score.scores for arm in arms for score in arm):
    return contrasts.interval(arms, confidence)
  values = np.array([[score.value for score in arm] for arm in arms])
  sums = contrasts.SIGNS[len(arms)] @ values
  return crossed_intervals.interval(sums[:, None], np.ones(1), confidence)


def _result(collected: Collected, claim: pages.Claim) -> Result:
  """Computes the result of a claim."""
  study, is_crossing = collected.study, claim.metric == pages.CROSSING
  empty = Result(claim, level(claim, study))
  metric = pages.LOSS if is_crossing else claim.metric
  evaluation = study.evaluation_of(metric, claim.contrast)
  planned = max(len(study.seeds_of(name)) for name in claim.contrast) or 1
  if not evaluation.all_seeds:
    planned = 1
  # [seeds][arms], of the seeds that all arms have.
  complete = [
    runs
    for runs in (_runs(collected, claim, i) for i in range(planned))
    if all(run and reported(run, metric, evaluation) for run in runs)
  ]
  if not complete:
    note = _missing(collected, claim, metric, 0, planned)
    return dataclasses.replace(empty, note=note)
  note = ''
  if len(complete) < planned:
    note = _missing(collected, claim, metric, len(complete), planned)
  try:
    if is_crossing:
      result = _crossing(collected, empty, evaluation, complete)
    else:
      result = _difference(empty, evaluation, complete)
  except errors.UserError as error:
    return dataclasses.replace(empty, note=str(error))
  if result.effect is None:
    return result
  if result.seeds == 1:
    # Groups alone would give an interval that leaves out the seeds.
    note = note or 'a single seed: no interval over seeds and no verdict'
    return dataclasses.replace(result, low=None, high=None, note=note)
  if note or not claim.primary:
    return dataclasses.replace(result, note=note or 'not primary: no verdict')
  power = planned_power(claim, study)
  if power and power.reproduced < verdicts.ENOUGH:
    note = 'low power'
  scale = math.log if is_crossing else float
  verdict = verdicts.verdict(
    claim.direction,
    *(scale(x) for x in (claim.smallest, result.low, result.high)),
    lower_is_better=score_tables.lower_is_better(metric.rpartition('/')[2]),
  )
  return dataclasses.replace(result, verdict=verdict, note=note)


def _runs(
  collected: Collected, claim: pages.Claim, index: int
) -> list[Run | None]:
  """Returns a run of every arm of a claim, of the seed with this index."""
  runs = []
  for name in claim.contrast:
    seeds = collected.study.seeds_of(name)
    seed = seeds[index] if len(seeds) > 1 else (*seeds, None)[0]
    matches = [run for run in collected.of(name) if run.seed == seed]
    runs.append(matches[0] if matches else None)
  return runs


def _missing(
  collected: Collected,
  claim: pages.Claim,
  metric: str,
  complete: int,
  planned: int,
) -> str:
  """Describes why seeds of a claim have no result."""
  evaluation = collected.study.evaluation_of(metric, claim.contrast)
  diverged = [
    f'{run.model} (seed {run.seed}) has diverged'
    for run in collected.runs
    if run.model in claim.contrast
    if (score := run.score(metric, evaluation))
    and not math.isfinite(score.value)
  ]
  failed = [
    f'{stage["name"]} has failed'
    for stage in collected.stages
    if stage['status'] == 'failed' and stage['model'] in claim.contrast
  ]
  text = ', '.join(diverged + failed) or 'unfinished'
  return f'{complete} of {planned} seeds: {text}'


def _difference(
  empty: Result,
  evaluation: pages.Evaluation,
  complete: Sequence[Sequence[Run]],
) -> Result:
  """Returns the effect of a contrast of a metric."""
  arms = [
    [reported(run, empty.claim.metric, evaluation) for run in runs]
    for runs in zip(*complete, strict=True)
  ]
  x = interval(arms, empty.level)
  has_groups = bool(arms[0][0].scores)
  return dataclasses.replace(
    empty,
    seeds=x.seeds,
    groups=x.groups if has_groups else 0,
    effective=x.effective_groups if has_groups else 0.0,
    effect=x.effect,
    low=x.low,
    high=x.high,
  )


def _crossing(
  collected: Collected,
  empty: Result,
  evaluation: pages.Evaluation,
  complete: Sequence[Sequence[Run]],
) -> Result:
  """Returns the tokens to the loss of another arm, over its tokens."""
  tokens, divisors, ends = [], [], []
  for source, run in complete:
    if not has_common_rows(collected, run, evaluation):
      note = f'the curve of {run.model} is on other rows than its evaluation'
      return dataclasses.replace(empty, note=note)
    curve, loss = run.curve, target_loss(source, run, evaluation)
    tokens.append(
      crossings.crossing(curve['target_tokens'], curve['loss'], loss)
    )
    divisors.append(source.summary['target_tokens'])
    ends.append(curve['target_tokens'][-1])
  seeds, x = len(complete), crossings.log_ratio(tokens, divisors, empty.level)
  if x is None:
    note = f'not reached in {numbers.count(min(ends))} target tokens'
    return dataclasses.replace(empty, seeds=seeds, note=note)
  effect, low, high = (math.exp(y) for y in (x.effect, x.low, x.high))
  return dataclasses.replace(
    empty, seeds=seeds, effect=effect, low=low, high=high
  )


def has_common_rows(
  collected: Collected, run: Run, evaluation: pages.Evaluation
) -> bool:
  """Returns whether a run's curve is on the rows of an evaluation.

  Other objectives have other held-out rows.
  """
  folders = [
    x.values['data.folder'] for x in collected.of(evaluation.records)[:1]
  ]
  return bool(run.curve['step']) and [run.values['data.folder']] == folders


def target_loss(source: Run, run: Run, evaluation: pages.Evaluation) -> float:
  """Returns the loss of a model on the rows of another one's curve.

  Args:
    source: the model, with the loss of the evaluation.
    run: run whose curve is on rows of the evaluation.
    evaluation: the evaluation.
  """
  score = source.score(pages.LOSS, evaluation)
  rows = run.values['data.development_rows']
  return contrasts.development(score, rows).value if rows else score.value


def differences(
  runs: Mapping[str, Sequence[Run]],
) -> dict[str, dict[str, Any]]:
  """Returns the keys in which trained models differ, and their values.

  Args:
    runs: runs by name of the model, each with one at least.

  Returns:
    Key -> name of the model -> value; keys that a model lacks have None.
  """
  values = {name: x[0].values for name, x in runs.items() if x[0].values}
  keys = functools.reduce(lambda a, b: {**a, **b}, values.values(), {})
  return {
    key: {name: x.get(key) for name, x in values.items()}
    for key in keys
    if key not in _NO_DIFFERENCE
    and len({str(x.get(key)) for x in values.values()}) > 1
  }
