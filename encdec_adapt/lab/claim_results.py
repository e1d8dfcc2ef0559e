"""The results of a study's claims: effects with intervals, and verdicts.

An effect is over the seeds common to all arms of the claim, and a claim gets a
verdict once no seed is missing. A model without seeds, such as an imported one,
is compared with every seed of the other arm. No model is read here.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import math
from typing import Any

import numpy as np

from encdec_adapt import configs
from encdec_adapt.base import errors
from encdec_adapt.evaluation.results import (
  contrasts,
  crossed_intervals,
  results_store,
)
from encdec_adapt.evaluation.results import number_format as numbers
from encdec_adapt.lab import collected as collected_lib
from encdec_adapt.lab import pages, score_tables, variances, verdicts

Collected = collected_lib.Collected
Run = collected_lib.Run
Evaluation = pages.Evaluation

# Shown instead of a verdict: claims that are not primary or lack seeds.
NO_VERDICT = 'no verdict'
_LEVEL = 0.95
_NOT_COMPARED = ('data.folder', 'seed')  # Keys irrelevant to the arm.


@dataclasses.dataclass(frozen=True)
class Result:
  """The result of a claim.

  Attributes:
    claim: the claim.
    level: level of the interval, 0 to 1.
    seeds: seeds of the effect.
    parameters: parameters of the largest of its models.
    groups: groups of documents, or examples; 0 for a metric without them.
    effective: effective number of groups (`crossed_intervals.Interval`).
    effect: the effect; None without one.
    low: lower bound of its interval; None with a single seed.
    high: upper bound.
    verdict: the verdict, or ''.
    note: why an effect, interval or verdict is missing or limited; or ''.
  """

  claim: pages.Claim
  level: float
  seeds: int = 0
  parameters: float = 0
  groups: int = 0
  effective: float = 0.0
  effect: float | None = None
  low: float | None = None
  high: float | None = None
  verdict: str = ''
  note: str = ''

  @property
  def contrast(self) -> str:
    """The metric and the contrast, as text."""
    names, text = self.claim.contrast, '{1} - {0}'
    if len(names) == 4:
      text = '({1} - {0}) - ({3} - {2})'
    elif len(names) == 1:
      text = '{0}'
    return f'{self.claim.metric}: {text.format(*names)}'

  @property
  def effect_text(self) -> str:
    """The effect, as text."""
    return '' if self.effect is None else self._text(self.effect)

  @property
  def interval(self) -> str:
    """The interval, as text; '' without one."""
    if self.low is None:
      return ''
    return f'{self._text(self.low)} to {self._text(self.high)}'

  def _text(self, value: float) -> str:
    # Two digits of the smallest relevant difference; three of counts.
    digits = 1 - math.floor(math.log10(self.claim.smallest))
    return f'{value:+.{digits}f}' if digits > 1 else f'{value:+.3g}'

  @property
  def drawn(self) -> tuple[str | float | None, ...]:
    """Verdict, effect and bounds, for `report_figures.draw_claims`."""
    claim = self.claim
    sign = -1 if claim.direction == 'less' else 1
    if claim.direction == 'no better':  # Worse points right.
      sign = 1 if score_tables.lower_is_better(claim.metric) else -1
    scaled = (
      None if x is None else sign * x / claim.smallest
      for x in (self.effect, self.low, self.high)
    )
    return self.verdict or NO_VERDICT, *scaled

  @property
  def over(self) -> str:
    """Seeds and groups, as text."""
    groups = f', {self.groups} groups' if self.groups else ''
    return f'{self.seeds} seed{"s" if self.seeds != 1 else ""}{groups}'

  @property
  def outcome(self) -> str:
    """Verdict and note, as text."""
    verdict = self.verdict
    if verdict and self.parameters:
      verdict += f' at {numbers.count(self.parameters)} parameters'
    return ': '.join(filter(None, (verdict, self.note)))

  @property
  def sentence(self) -> str:
    """The result, as a sentence."""
    outcome = self.outcome[:1].upper() + self.outcome[1:].rstrip('.')
    text = f'{self.claim.sentence} {outcome}.'
    if self.effect is None:
      return text
    level = f' ({100 * self.level:.4g} % interval {self.interval})'
    size = self.effect_text + level * bool(self.interval)
    return f'{text} {self.contrast}: {size}, of {self.over}.'


def level(claim: pages.Claim, study: pages.Study) -> float:
  """Returns the level of the interval of a claim."""
  primary = sum(x.primary for x in study.claims)
  return verdicts.level(primary) if claim.primary else _LEVEL


@dataclasses.dataclass(frozen=True)
class Power:
  """What a claim can show, by the variances of other studies.

  Attributes:
    claim: the claim.
    effect: result of `verdicts.detectable`.
  """

  claim: pages.Claim
  effect: float | None

  @property
  def is_low(self) -> bool:
    """Whether it is low."""
    claim = self.claim
    return verdicts.is_low(claim.direction, claim.smallest, self.effect)

  def describe(self) -> str:
    """Returns the effect with 80 % power, as text."""
    effect = 'no effect' if self.effect is None else f'{self.effect:.3g}'
    low = ', low power' * self.is_low
    return f'80 % power at {effect} (m = {self.claim.smallest:g}{low})'


def power(
  claim: pages.Claim,
  study: pages.Study,
  origins: Mapping[str, tuple[str, bool]],
) -> Power | None:
  """Returns the power of a claim.

  Args:
    claim: the claim.
    study: its study.
    origins: `variances.origins` of trained models.

  Returns:
    None with a single seed, of a value of one arm, or without variances of
    other studies.
  """
  seeds, evaluation = study.planned_seeds(claim), study.evaluation_for(claim)
  page, name = study.origin(evaluation)
  kind = variances.kind(map(origins.get, claim.contrast))
  planned = variances.planned(
    configs.path('studies/variances.json'),
    f'{kind}/{name}/{claim.metric}',
    page,
    len(claim.contrast),
  )
  if planned is None or seeds < 2 or len(claim.contrast) < 2:
    return None
  layout = planned, seeds, planned.groups, level(claim, study)
  return Power(
    claim, verdicts.detectable(claim.direction, claim.smallest, *layout)
  )


def reported(
  run: Run, metric: str, evaluation: Evaluation
) -> results_store.Score | None:
  """Returns a score on the examples of reports, or None.

  Returns None for diverged runs, and for scores over all held-out rows, such as
  `macro_f1`, if rates were chosen on a development part of these rows.
  """
  score = run.score(metric, evaluation)
  if score is None or not math.isfinite(score.value):
    return None
  if not score.scores and run.values.get('data.development_rows'):
    scores = run.scores[evaluation.name]
    if any(x.groups for x in scores if x.task == score.task):
      return None
  return contrasts.reported(score)


def interval(
  arms: Sequence[Sequence[results_store.Score]], confidence: float = _LEVEL
) -> crossed_intervals.Interval:
  """Returns the interval of an arm, or of a contrast of arms.

  For metrics without per-example values, the interval is over seeds only.

  Raises:
    UserError: the arms were measured on different examples.
  """
  if all(score.scores for arm in arms for score in arm):
    return contrasts.interval(arms, confidence)
  values = np.array([[score.value for score in arm] for arm in arms])
  return _over_seeds(contrasts.SIGNS[len(arms)] @ values, confidence)


def _over_seeds(
  values: np.ndarray, confidence: float
) -> crossed_intervals.Interval:
  return crossed_intervals.interval(values[:, None], np.ones(1), confidence)


def result(collected: Collected, claim: pages.Claim) -> Result:
  """Returns the result of a claim."""
  study, effect = collected.study, {}
  confidence = level(claim, study)
  metric, evaluation = claim.metric, study.evaluation_for(claim)
  planned = max(study.planned_seeds(claim), 1) if evaluation.all_seeds else 1
  complete = [
    runs
    for runs in (_runs(collected, claim, i) for i in range(planned))
    if all(run and reported(run, metric, evaluation) for run in runs)
  ]
  note = verdict = ''
  if len(complete) < planned:
    note = f'{len(complete)} of {planned} seeds are there'
  arms = [*zip(*complete, strict=True)]
  if arms:
    try:
      scores = [
        [reported(x, metric, evaluation) for x in runs] for runs in arms
      ]
      x = interval(scores, confidence)
      effect = {'effect': x.effect, 'low': x.low, 'high': x.high}
      effect['seeds'] = x.seeds
      if scores[0][0].scores:
        effect |= {'groups': x.groups, 'effective': x.effective_groups}
    except errors.UserError as error:
      note = str(error)
  if effect:
    counts = [run.counts['parameters'] for runs in arms for run in runs]
    effect['parameters'] = max(counts)
    if effect['seeds'] == 1:
      # An interval over groups alone would ignore the seeds.
      effect |= {'low': None, 'high': None}
      note = note or 'a single seed: no interval over seeds and no verdict'
    elif not note and not claim.primary:
      note = 'not primary: no verdict'
    elif not note:
      verdict = verdicts.verdict(
        claim.direction,
        claim.smallest,
        *(effect[x] for x in ('effect', 'low', 'high')),
        lower_is_better=score_tables.lower_is_better(metric),
      )
      trained = [x for x in collected.runs if 'made_by' not in x.summary]
      values = {x.model: x.values for x in trained}
      origins = variances.origins(values, study.parents)
      found = power(claim, study, origins)
      notes = ['low power'] if found and found.is_low else []
      verdict, learned = _by_floors(verdict, claim, arms, evaluation)
      note = ', '.join(notes + learned)
  return Result(claim, confidence, **{'note': note, **effect}, verdict=verdict)


def _by_floors(
  verdict: str,
  claim: pages.Claim,
  arms: Sequence[Sequence[Run]],
  evaluation: Evaluation,
) -> tuple[str, list[str]]:
  """Returns the verdict, and notes on arms that have not learned."""
  leads = {}
  # Of a gain, the first two arms are those after tuning.
  for name, runs in zip(claim.contrast[:2], arms[:2], strict=True):
    ahead = lead(runs, claim.metric, evaluation)
    if ahead is not None:
      leads[name] = ahead
  if not leads:
    return verdict, ['no floor']
  most = max(leads.values())
  if most < claim.smallest:
    note = f'ahead of the floor by at most {most:.3g}'
    return verdicts.NOT_LEARNED, [note if most else 'not ahead of the floor']
  behind = [x for x, ahead in leads.items() if ahead < claim.smallest]
  return verdict, [f'{x} has not learned' for x in behind]


def lead(
  runs: Sequence[Run], metric: str, evaluation: Evaluation
) -> float | None:
  """Returns how far a model is ahead of its floor; see `Evaluation.floors`.

  Args:
    runs: the runs of an arm.
    metric: 'TASK/METRIC'.
    evaluation: an evaluation with the metric.

  Returns:
    The mean over the runs, better is positive; 0 if its 95 % interval holds 0;
    None for a metric without a floor here.
  """
  floor = floor_name = evaluation.floors.get(metric)
  arms = [[reported(run, metric, evaluation) for run in runs]]
  if isinstance(floor, str):
    others = [run.score(floor, evaluation) for run in runs]
    if None in others:
      return None
    floor = others[0].value
    if others[0].scores:  # On the same examples.
      others = [reported(run, floor_name, evaluation) for run in runs]
      if floor_name == pages.MAJORITY:
        floor = others[0].value
      else:
        arms, floor = [others, *arms], 0.0
  if floor is None:
    return None
  x = interval(arms)
  sign = -1 if score_tables.lower_is_better(metric) else 1
  ahead, *bounds = (sign * (y - floor) for y in (x.effect, x.low, x.high))
  return ahead if min(bounds) > 0 else 0.0


def _runs(
  collected: Collected, claim: pages.Claim, index: int
) -> list[Run | None]:
  runs = []
  for name in claim.contrast:
    seeds = collected.study.seeds_of(name)
    seed = seeds[index] if len(seeds) > 1 else (*seeds, None)[0]
    runs.append(next((x for x in collected.of(name) if x.seed == seed), None))
  return runs


def has_common_rows(
  collected: Collected, run: Run, evaluation: Evaluation
) -> bool:
  """Returns whether a run's curve is on the rows of an evaluation.

  Different objectives have different held-out rows.
  """
  arms = collected.of(evaluation.records)[:1]
  folders = [arm.values['data.folder'] for arm in arms]
  return bool(run.curve['step']) and [run.values['data.folder']] == folders


def target_loss(source: Run, run: Run, evaluation: Evaluation) -> float:
  """Returns the loss of a model on the rows of another model's curve.

  Args:
    source: the model, with a loss in the evaluation.
    run: run with a curve on rows of the evaluation.
    evaluation: the evaluation.
  """
  score = source.score(pages.LOSS, evaluation)
  rows = run.values['data.development_rows']
  return contrasts.development(score, rows).value if rows else score.value


def differences(
  collected: Collected, models: Iterable[str]
) -> list[dict[str, Any]]:
  """Returns the keys in which models differ, with their values.

  Only keys common to all models count; the first row names the origin of
  models, if any was not trained.
  """
  runs = [collected.of(name)[:1] for name in dict.fromkeys(models)]
  values = {
    run.model: {'made by': _maker(run), **run.values}
    for (run,) in filter(None, runs)
  }
  rows = [
    {'key': key, **{name: x[key] for name, x in values.items()}}
    for key in dict.fromkeys(key for x in values.values() for key in x)
    if key not in _NOT_COMPARED and all(key in x for x in values.values())
  ]
  return [row for row in rows if len({*map(str, [*row.values()][1:])}) > 1]


def _maker(run: Run) -> str:
  made_by = run.summary.get('made_by', {'command': 'train'})
  return ' '.join([made_by['command'], *made_by.get('sources', ())])
