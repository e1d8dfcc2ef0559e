"""The report of a study: `report.html`, `report.md`, `numbers.csv`, figures.

Sentences, figures and verdicts follow from the claims of the page and the
collected results (`collected.Collected`). `report.json` has `study`, `title`,
`size`, `date`, `command`, `seconds`, `summary`, `claims` (rows of
`claim_tables.row`) and `findings`. This module reads no model.
"""

import collections
from collections.abc import Iterable, Iterator, Mapping
import functools
import math
import os
import pathlib
import statistics
from typing import Any

from encdec_adapt.evaluation.measures import held_out, inference_cost
from encdec_adapt.evaluation.results import comparisons, results_store
from encdec_adapt.evaluation.results import number_format as numbers
from encdec_adapt.evaluation.tasks import retrieval_scores
from encdec_adapt.files import paths
from encdec_adapt.lab import (
  claim_results,
  claim_tables,
  html_report,
  pages,
  report_figures,
  score_tables,
)
from encdec_adapt.lab import collected as collected_lib
from encdec_adapt.telemetry import progress

Collected = collected_lib.Collected
Evaluation = pages.Evaluation
Run = collected_lib.Run

_CURVES = (
  'Loss on the held-out rows that jobs evaluate on, of the development part'
  ' where there is one: the mean of the seeds and their range. The middle of a'
  ' curve says little of shorter runs: a learning rate decays to its end.'
)
_SEEDS = (
  'Seeds draw parameters and the order of rows. Intervals are over seeds and'
  ' groups of held-out documents, of at most 32 rows each, and conditional on'
  ' one pretrained decoder and on one draw of masks and splits.'
)
_LEVELS = (
  'Primary claims have intervals of level 1 - .05/k, for k of them, and'
  ' verdicts; other claims have 95 % intervals and no verdict.'
)
_RATES = (
  'Every third group is the development part. Learning rates are chosen there'
  ' (where models learn from samples, on held-out samples), with a seed of'
  ' their own. Not every model has one of its own: arms that'
  ' differ in objective, teacher, initialisation of cross-attention or warm-up,'
  ' or in the model that tuning starts from, may share one.'
)


def write(collected: Collected, root: str | os.PathLike[str]) -> list[str]:
  """Writes the report and replaces the files of an earlier one.

  Args:
    collected: runs, scores and stages of the study; unfinished ones are blank.
    root: folder of the files.

  Returns:
    The summary, a sentence for each claim, then the findings.
  """
  study = collected.study
  with paths.staged(root) as folder:
    page = _Page(collected, folder, root)
    rows = [*map(claim_tables.row, page.results)]
    report = {
      'study': study.name,
      'title': study.title,
      'size': study.size,
      'date': collected.date,
      'command': collected.command,
      'seconds': collected.seconds,
      'summary': page.summary,
      'claims': rows,
      'effects': [
        (x.claim.sentence, x.claim.contrast, *x.drawn)
        for x in page.results
        if x.effect is not None
      ],
      'findings': page.findings,
    }
    html_report.save(folder, report, page.render())
    notes = ''.join(f'{text}\n\n' for text in (*page.summary, *page.notes))
    text = f'# {study.title}\n\n{notes}{claim_tables.markdown(rows)}'
    text += ''.join(f'\n- {finding}' for finding in page.findings) + '\n'
    (folder / 'report.md').write_text(text, encoding='utf-8')
    text = claim_tables.numbers_csv(collected)
    (folder / 'numbers.csv').write_text(text, encoding='utf-8')
  claims = (x.sentence for x in page.results)
  return [*page.summary, *claims, *page.findings]


class _Page:
  """The sections of a page.

  Attributes:
    results: results of the claims.
    notes: paragraphs on how to read the numbers.
  """

  def __init__(
    self,
    collected: Collected,
    folder: pathlib.Path,
    root: str | os.PathLike[str],
  ):
    """Stores the results, and the folders of the figures and the page."""
    self._collected, self._folder, self._root = collected, folder, root
    self._study, self._models = collected.study, collected.models
    self._styles = report_figures.styles(self._models)
    self._html = html_report.blocks()
    self._figure = functools.partial(html_report.figure, folder)
    self.results = [
      claim_results.result(collected, x) for x in self._study.claims
    ]
    self.notes = [*self._notes()]
    # Seeds share a shape: the first measurement stands for all.
    runs = {x.model: x for x in collected.runs[::-1] if x.generated}
    self._generated = max((x.generated for x in runs.values()), default=0)
    self._measured = {x: runs[x].all_scores for x in self._models if x in runs}
    self._costs = score_tables.costs(self._measured)

  def render(self) -> str:
    """Draws the figures and returns the page."""
    collected, html = self._collected, self._html
    names = 'name', 'status', 'starts', 'command'
    stages = [
      {name: x[name] for name in names}
      | {'took': progress.format_seconds(x['seconds'])}
      for x in collected.stages
    ]
    sections = {
      'A number for each model': self._bars(),
      'Continuations': html.join(map(self._sample, collected.samples)),
      'Loss': self._curves(),
      'Claims': self._claims(),
      'Findings': html.items(self.findings),
      'How to read the numbers': html.paragraphs(self.notes),
      'Held-out metrics': self._metrics(),
      'Quality against cost': self._quality(),
      'Before and after': self._scatter(),
      'Needles': html_report.needles(
        self._folder,
        retrieval_scores.grids(
          {x: collected.of(x)[0].all_scores for x in self._models}
        ),
      ),
      'Scores': html.join(map(self._scores, self._study.evaluations)),
      'Differences between models': html.table(
        claim_results.differences(collected, self._models)
      ),
      'Training': html.table(self._training(self._models)),
      'Inference': html.table(score_tables.cost_rows(self._measured)),
      'Rollouts': html.folded(
        f'{len(collected.rollouts)} completions of held-out prompts',
        html.table(collected.rollouts),
      ),
      'Commands': html.folded(f'{len(stages)} stages', html.table(stages)),
      'Text': html.facts(collected.text),
      'Environment': html.facts(collected.environment),
    }
    return html.page(self._study.title, self.summary, sections)

  @functools.cached_property
  def summary(self) -> list[str]:
    """Up to three sentences: the best model, its inputs, and the verdicts."""
    if not self._ranked:
      return []
    (evaluation, *_) = self._study.evaluations
    metric, count = evaluation.metrics[0], len(self._ranked)
    (best, value), *others = self._ranked.items()
    extreme = 'lowest' if score_tables.lower_is_better(metric) else 'highest'
    unit = ' nats per target token' if metric == pages.LOSS else ''
    text = f'{best} has a {_label(metric)}'
    if others:
      text = f'Of {count} models, {best} has the {extreme} {_label(metric)}'
    text += f' in the evaluation {evaluation.name!r}: {value:.3f}{unit}'
    if others:
      text += f', then {others[0][0]} with {others[0][1]:.3f}'
    texts = [f'{text}.']
    if best in (losses := self._input_losses(evaluation)):
      texts.append(
        f'With the inputs of other examples its loss changes by'
        f' {losses[best]:+.3f}.'
      )
    verdicts = collections.Counter(
      x.verdict for x in self.results if x.claim.primary and x.verdict
    )
    if verdicts:
      listed = ', '.join(f'{name}: {n}' for name, n in verdicts.items())
      texts.append(f'Primary claims by verdict: {listed}.')
    elif all(len(self._collected.of(x)) == 1 for x in self._ranked):
      texts.append(
        'Every model has one seed, so the page has no intervals: a small'
        ' difference may be due to chance.'
      )
    return texts

  @functools.cached_property
  def _ranked(self) -> dict[str, float]:
    """The first metric of the first evaluation by model, the best first."""
    for evaluation in self._study.evaluations[:1]:
      metric = evaluation.metrics[0]
      means = {
        x: mean
        for x in self._study.measured(evaluation)
        if (mean := self._mean(x, metric, evaluation)) is not None
        and math.isfinite(mean)
      }
      is_loss = score_tables.lower_is_better(metric)
      names = sorted(means, key=means.get, reverse=not is_loss)
      return {name: means[name] for name in names}
    return {}

  def _bars(self) -> str:
    if len(self._ranked) < 2:
      return ''
    (metric, *_) = self._study.evaluations[0].metrics
    is_loss = score_tables.lower_is_better(metric)
    label = (
      f'{_label(metric)} on {self._study.evaluations[0].name};'
      f' {"lower" if is_loss else "higher"} is better'
    )
    draw = report_figures.draw_bars
    arguments = self._ranked, label, self._styles
    return self._html.wide(self._figure('models', label, draw, *arguments))

  def _notes(self) -> Iterator[str]:
    study, took = self._study, progress.format_seconds(self._collected.seconds)
    date = self._collected.date
    yield f'Size {study.size}, {date}, {took}: {self._collected.command}'
    yield from filter(None, study.note.split('\n\n'))
    yield _SEEDS
    groups = dict.fromkeys(
      f'{x.claim.metric} of {x.groups} (effective number {x.effective:.1f})'
      for x in self.results
      if x.groups
    )
    if groups:
      python = self._collected.text.get('python', 'unknown')
      yield f'Groups: {", ".join(groups)}; text of Python {python}.'
    if any(x.claim.primary for x in self.results):
      yield _LEVELS
    if self._collected.rates:
      yield _RATES

  @functools.cached_property
  def findings(self) -> list[str]:
    """Sentences on sweeps, diverged models, costs and stages."""
    rates = self._collected.rates
    texts = [
      _rate(x, rates[x.name]) for x in self._study.rates if x.name in rates
    ]
    texts += self._best()
    texts += filter(None, map(self._inputs, self._study.evaluations))
    texts += [
      f'{run.model} (seed {run.seed}) has a {metric} that is not finite, and is'
      ' left out.'
      for evaluation in self._study.evaluations
      for metric in evaluation.metrics
      for run in self._collected.runs
      if (score := run.score(metric, evaluation))
      and not math.isfinite(score.value)
    ]
    texts += inference_cost.notes(self._costs, self._generated)
    return [*texts, *self._collected.notes]

  def _input_losses(self, evaluation: Evaluation) -> dict[str, float]:
    losses = {}
    for name in self._study.measured(evaluation):
      own, other = (
        self._mean(name, f'{held_out.TASK}/{metric}', evaluation)
        for metric in ('loss', held_out.SHUFFLED)
      )
      if own is not None and other is not None:
        losses[name] = other - own
    return losses

  def _inputs(self, evaluation: Evaluation) -> str:
    losses = self._input_losses(evaluation)
    listed = ', '.join(
      f'{name} {losses[name]:.3f}' for name in sorted(losses, key=losses.get)
    )
    return listed and (
      f'{evaluation.name}: with the inputs of other examples the loss is higher'
      f' by {listed}; a model that loses little hardly reads its inputs.'
    )

  def _best(self) -> Iterator[str]:
    accuracies = {}
    for name, arms in self._study.best_of.items():
      evaluation = self._study.evaluation_of(pages.LOSS, arms)
      means = {
        x: self._mean(x, pages.LOSS, evaluation) for x in arms if evaluation
      }
      losses = {arm: x for arm, x in means.items() if x is not None}
      if losses:
        best = min(losses, key=losses.get)
        yield (
          f'{name} is {best}: of {len(losses)} it has the lowest held-out loss,'
          f' {numbers.loss(losses[best])}.'
        )
        if 'held_out/macro_f1' in evaluation.metrics:  # Of classifiers.
          metric = 'held_out/accuracy'
          accuracies[name] = self._mean(best, metric, evaluation)
    if accuracies:
      listed = ', '.join(f'{x} {y:.3f}' for x, y in accuracies.items())
      mean = statistics.fmean(accuracies.values())
      yield f'The held-out accuracies are {listed}; their mean is {mean:.3f}.'

  def _reported(
    self, model: str, metric: str, evaluation: Evaluation
  ) -> list[results_store.Score]:
    scores = (
      claim_results.reported(run, metric, evaluation)
      for run in self._collected.of(model)
    )
    return [score for score in scores if score]

  def _mean(
    self, model: str, metric: str, evaluation: Evaluation
  ) -> float | None:
    scores = self._reported(model, metric, evaluation)
    return statistics.fmean(x.value for x in scores) if scores else None

  def _claims(self) -> str:
    drawn, rows, details, html = [], [], [], self._html
    for i, x in enumerate(self.results, 1):
      cells = claim_tables.row(x)
      # On one line.
      interval = cells['interval'].replace(' ', '\u00a0')
      rows.append({'': i, **cells, 'interval': interval})
      if x.effect is not None:
        drawn.append((f'{i}. {x.claim.sentence}', *x.drawn))
      names = dict.fromkeys(x.claim.contrast)
      details.append(
        html.folded(
          f'{i}. What differs between {", ".join(names)}, and what they cost',
          html.table(claim_results.differences(self._collected, names))
          + html.table(self._training(names)),
        )
      )
    image = ''
    if drawn:
      draw = report_figures.draw_claims
      image = self._figure('claims', 'effects of the claims', draw, drawn)
    return html.join([html.wide(image), html.table(rows), *details])

  def _training(self, models: Iterable[str]) -> list[dict[str, Any]]:
    prompt, generated = self._collected.request
    counts = {
      'parameters': 'parameters',
      'without tables': 'without tables',
      'steps': 'steps',
      'tokens read': 'total_tokens',
      'in the loss': 'target_tokens',
    }
    flops = {
      'FLOPs': 'flops',
      'with sources and teacher': 'inclusive',
      f'FLOPs of a request of {prompt} + {generated}': 'FLOPs',
      'published convention': 'FLOPs, published',
    }
    rows = []
    for name in models:
      if not (runs := self._collected.of(name)):
        continue
      values = [
        {**x.summary, **x.counts, 'inclusive': x.summary['inclusive']['flops']}
        for x in runs
      ]
      mean = {
        key: statistics.fmean(x.get(key, math.nan) for x in values)
        for key in (*counts.values(), *flops.values(), 'seconds')
      }
      rates = dict.fromkeys(x.get('learning_rate') for x in values)
      rows.append(
        {
          'model': name,
          'runs': self._html.join(map(self._link, runs)),
          **{x: numbers.count(mean[key]) for x, key in counts.items()},
          'learning rate': ', '.join(f'{x:g}' for x in rates if x)
          + self._choice(name),
          **{x: f'{mean[key]:.3g}' for x, key in flops.items()},
          'time': progress.format_seconds(mean['seconds']),
        }
      )
    return rows

  def _choice(self, name: str) -> str:
    """Returns whether a model's rate is an edge of a sweep or another arm's."""
    arms = {x.name: x.rate for x in self._study.arms}
    for rate in self._study.rates:
      if rate.name == arms.get(name):
        values = self._collected.rates.get(rate.name)
        edge = ' (edge)' * bool(values and _chosen(rate, values)[1])
        return edge + f', that of {rate.arm}' * (rate.arm != name)
    return ''

  def _link(self, run: Run) -> str:
    text = 'run' if run.seed is None else str(run.seed)
    if not run.folder:
      return text
    if paths.is_bucket(self._root) or paths.is_bucket(run.folder):
      return run.folder
    return self._html.link(os.path.relpath(run.folder, self._root), text)

  def _curves(self) -> str:
    images, axes = [], {'target_tokens': 'target tokens'}
    axes['flops'] = 'training FLOPs, with sources and teacher'
    for evaluation in self._study.evaluations:
      curves, finals = self._losses(evaluation)
      if curves:
        images += [
          self._figure(
            f'{evaluation.name}_{axis}',
            f'{evaluation.name}: loss against {label}',
            report_figures.draw_curves,
            *(curves, finals, axis, label, self._styles),
          )
          for axis, label in axes.items()
        ]
    figures = self._html.figures(images)
    return figures and figures + self._html.paragraphs([_CURVES])

  def _metrics(self) -> str:
    names = {name for run in self._collected.runs for name in run.curve}
    images = []
    for name in sorted(names - {'step', 'target_tokens', 'flops', 'loss'}):
      curves = {
        model: [x.curve for x in self._collected.of(model) if name in x.curve]
        for model in self._models
      }
      draw = report_figures.draw_curves
      draw = functools.partial(draw, curves, {}, 'step', 'steps')
      title = f'held-out {name}'
      images.append(
        self._figure(f'held_out_{name}', title, draw, self._styles, name)
      )
    return self._html.figures(images)

  def _losses(
    self, evaluation: Evaluation
  ) -> tuple[dict[str, list[Mapping[str, Any]]], dict[str, float]]:
    measured = self._study.measured(evaluation)
    runs = {x: self._collected.of(x) for x in self._models if x in measured}
    has_rows = functools.partial(
      claim_results.has_common_rows, self._collected, evaluation=evaluation
    )
    drawn = {name: [*filter(has_rows, x)] for name, x in runs.items()}
    curves = {name: [x.curve for x in y] for name, y in drawn.items() if y}
    finals = {}
    if curves:
      (first, *_) = drawn[next(iter(curves))]
      for name in runs.keys() - curves.keys():
        finals[name] = self._target_loss(name, first, evaluation)
    return curves, {x: y for x, y in sorted(finals.items()) if y is not None}

  def _target_loss(
    self, model: str, run: Run, evaluation: Evaluation
  ) -> float | None:
    losses = [
      claim_results.target_loss(source, run, evaluation)
      for source in self._collected.of(model)
      # Stored results have no rows of the development part.
      if source.folder
      and claim_results.reported(source, pages.LOSS, evaluation)
    ]
    return statistics.fmean(losses) if losses else None

  def _quality(self) -> str:
    costs = {
      name: inference_cost.per_query(x, self._generated)
      for name, x in self._costs.items()
    }
    figures = []
    for evaluation in self._study.evaluations:
      metric, quality = evaluation.metrics[0], {}
      for name in costs:
        if scores := self._reported(name, metric, evaluation):
          x = claim_results.interval([scores])
          low, high = (x.low, x.high) if x.seeds > 1 else (x.effect, x.effect)
          quality[name] = low, x.effect, high
      if len(quality) > 1 and not metric.startswith(inference_cost.TASK):
        lower = score_tables.lower_is_better(metric)
        label = f'{evaluation.name}: {metric}'
        figures.append(
          html_report.cost_figures(
            self._folder, label, quality, costs, self._styles, lower
          )
        )
    return self._html.join(figures)

  def _scatter(self) -> str:
    groups: dict[Any, dict[str, list[tuple[float, float]]]] = {}
    sizes = {run.model: run.size for run in self._collected.runs}
    scored = [
      (run, f'{evaluation.name}: {metric}', metric, score)
      for run in self._collected.runs
      for evaluation in self._study.evaluations
      for metric in evaluation.metrics
      if (score := claim_results.reported(run, metric, evaluation))
      and score.task != inference_cost.TASK
    ]
    for run, y_label, metric, y in scored:
      start = self._start(run)
      for source, x_label, loss, x in scored:
        is_pair = source is start or (source is run and metric != loss)
        if is_pair and loss == pages.LOSS:
          # Scores on different examples are not compared.
          key = x_label, y_label, x.groups, x.weights, y.groups, y.weights
          points = groups.setdefault(key, {}).setdefault(source.model, [])
          points.append((x.value, y.value))
    images = []
    for (*labels, _, _, _, _), points in groups.items():
      if len(points) < 3:
        continue
      pooled, within = comparisons.correlations(
        (sizes[name], name, *pair) for name, x in points.items() for pair in x
      )
      title = 'Spearman: ' + ', '.join(
        f'{label} {x.value:.2f}{" (descriptive)" if x.is_descriptive else ""}'
        for label, x in (('pooled', pooled), ('within sizes', within))
        if x
      )
      means = {
        name: [(x,) * 3 for x in map(statistics.fmean, zip(*y, strict=True))]
        for name, y in points.items()
      }
      images.append(
        self._figure(
          f'scatter_{len(images)}',
          ' and '.join(labels),
          report_figures.draw_points,
          *(means, labels, self._styles, title),
        )
      )
    return self._html.figures(images)

  def _start(self, run: Run) -> Run | None:
    names = pages.placeholders(run.values.get('init.encoder', ''))
    sources = (
      x
      for x in self._collected.runs
      if self._study.stage_of(x.model, x.seed) in names
    )
    return next(sources, None)

  def _scores(self, evaluation: Evaluation) -> str:
    scores = {
      run.model: run.scores[evaluation.name]
      for run in self._collected.runs
      if evaluation.name in run.scores
    }
    scores = retrieval_scores.without_cells(scores)
    rows = []
    for name in scores:
      rows.append({evaluation.name: name})
      for task, metric in score_tables.by_metric(scores):
        metric = f'{task}/{metric}'
        values = [x.value for x in self._reported(name, metric, evaluation)]
        rows[-1][metric] = numbers.values(values) if values else ''
    return self._html.table(rows) if rows and len(rows[0]) > 1 else ''

  def _sample(self, sample: Mapping[str, Any]) -> str:
    fields = ('log_prob', 'tokens', 'reward')
    scores = ', '.join(f'{x} {sample[x]:.4g}' for x in fields if x in sample)
    text = self._html.code(sample['prompt'], sample['continuation'])
    return self._html.paragraphs([f'{sample["run"]}, {scores}:']) + text


def _label(metric: str) -> str:
  return metric.replace('_', '-').replace('/', ' ')


def _chosen(
  rate: pages.Rate, values: Mapping[str, float]
) -> tuple[str, tuple[str, str] | None]:
  """Returns the best rate and, for an edge, its name and what is beyond it."""
  best, tried = rate.best(values), sorted(values, key=float)
  edges = {tried[0]: ('smallest', 'smaller'), tried[-1]: ('largest', 'larger')}
  return best, edges.get(best) if len(tried) > 1 else None


def _rate(rate: pages.Rate, values: Mapping[str, float]) -> str:
  best, edge = _chosen(rate, values)
  listed = ', '.join(f'{k}: {numbers.loss(x)}' for k, x in values.items())
  text = (
    f'{rate.name}: the best learning rate is {best} ({rate.metric} on'
    f' rows that reports leave out: {listed})'
  )
  if edge:
    text += f', the {edge[0]} tried: a {edge[1]} one may be better'
  return f'{text}.'
