"""The report of a study: `report.html`, `report.md`, `numbers.csv`, figures.

Sentences, figures and verdicts are made from the claims of the page and from
what was collected (`collected.Collected`, which documents its content).
`report.json` has `study`, `title`, `size`, `date`, `command`, `seconds`,
`claims` (the fields of a claim and of its result) and `findings`. No model is
read here.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import csv
import dataclasses
import html
import io
import math
import os
import pathlib
import statistics
from typing import Any

from encdec_adapt.base import errors
from encdec_adapt.evaluation.measures import inference_cost
from encdec_adapt.evaluation.reports import (
  claim_results,
  html_report,
  report_figures,
  score_tables,
)
from encdec_adapt.evaluation.reports import collected as collected_lib
from encdec_adapt.evaluation.results import comparisons, predictions
from encdec_adapt.evaluation.results import number_format as numbers
from encdec_adapt.evaluation.studies import pages
from encdec_adapt.evaluation.tasks import retrieval_scores
from encdec_adapt.files import atomic, paths
from encdec_adapt.telemetry import progress

Collected = collected_lib.Collected
Run = collected_lib.Run
Result = claim_results.Result

COLUMNS = ('study', 'arm', 'seed', 'step', 'tokens', 'FLOPs')
COLUMNS += ('task', 'metric', 'value')
# Lines of a README between which the table of all claims stands.
BEGIN, END = '<!-- claims -->', '<!-- end of claims -->'


def write(collected: Collected, root: str | os.PathLike[str]) -> list[str]:
  """Writes the report; files of an earlier one are replaced.

  Args:
    collected: what is there of the study.
    root: folder of the files.

  Returns:
    A sentence for each claim, then the findings.
  """
  results = claim_results.results(collected)
  findings = _findings(collected)
  with paths.staged(root) as stage:
    text = _page(collected, results, findings, stage, root)
    report = {
      'study': collected.study.name,
      'title': collected.study.title,
      'size': collected.study.size,
      'date': collected.date,
      'command': collected.command,
      'seconds': sum(x['seconds'] for x in collected.stages),
      'claims': [_claim(result) for result in results],
      'findings': findings,
    }
    html_report.save(stage, report, text)
    (stage / 'report.md').write_text(_markdown(report), encoding='utf-8')
    (stage / 'numbers.csv').write_text(_numbers(collected), encoding='utf-8')
  return [*(result.sentence for result in results), *findings]


def write_claims(
  path: str | os.PathLike[str], folders: Sequence[str | os.PathLike[str]]
) -> None:
  """Writes the table of all claims into a README.

  Args:
    path: file with the lines `BEGIN` and `END`, between which it stands.
    folders: folders of studies, in the order of the table.

  Raises:
    UserError: the file has no such lines, or a folder no report.
  """
  file, rows = paths.at(path), []
  head, begin, others = file.read_text(encoding='utf-8').partition(BEGIN)
  _, end, tail = others.partition(END)
  if not (begin and end):
    raise errors.UserError(
      f'{path} has no lines {BEGIN} and {END}, between which the table of'
      ' claims is written; add them.'
    )
  for folder in folders:
    report = paths.at(folder) / html_report.JSON
    if not report.exists():
      raise errors.UserError(
        f'{folder} has no {html_report.JSON}: run the study, or give --report'
        ' with it.'
      )
    content = atomic.read_json(report)
    rows += [_summary_row(content, claim) for claim in content['claims']]
  text = f'{head}{BEGIN}\n{_markdown_table(rows)}{END}{tail}'
  paths.write(file, text.encode())


def _summary_row(
  report: Mapping[str, Any], claim: Mapping[str, Any]
) -> dict[str, str]:
  """Returns the row of a claim in the table of all studies."""
  setting = [f'{report["study"]}, {report["size"]}', claim['metric']]
  setting += [claim['difference'], claim['over']]
  return {
    'claim': claim['sentence'],
    'source': claim['source'],
    'their numbers': claim['paper'],
    'our setting': '; '.join(setting),
    'effect and interval': _size(claim),
    'verdict': claim['outcome'],
    'command': f'`{report["command"]}`',
    'hours': f'{report["seconds"] / 3600:.1f}',
  }


def _claim(result: Result) -> dict[str, Any]:
  """Returns the fields of a claim and of its result."""
  fields = dataclasses.asdict(result)
  return {
    **fields.pop('claim'),
    **fields,
    'difference': result.contrast,
    'effect_text': result.text(result.effect),
    'interval': result.interval,
    'over': result.over,
    'outcome': result.outcome,
  }


def _size(claim: Mapping[str, Any]) -> str:
  """Returns effect and interval as text."""
  interval = f' ({claim["interval"]})' if claim['interval'] else ''
  return claim['effect_text'] + interval


def _markdown(report: Mapping[str, Any]) -> str:
  """Renders the report's title, its claims as a table, and its findings."""
  rows = [
    {
      'claim': claim['sentence'],
      'source': claim['source'],
      'their numbers': claim['paper'],
      'metric': claim['metric'],
      'contrast': claim['difference'],
      'effect and interval': _size(claim),
      'smallest that matters': f'{claim["smallest"]:g}',
      'over': claim['over'],
      'verdict': claim['outcome'],
    }
    for claim in report['claims']
  ]
  findings = ''.join(f'- {text}\n' for text in report['findings'])
  hours = progress.format_seconds(report['seconds'])
  return (
    f'# {report["title"]}\n\nSize {report["size"]}, {report["date"]}, {hours}:'
    f' `{report["command"]}`\n\n{_markdown_table(rows)}\n{findings}'
  )


def _markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
  if not rows:
    return ''
  cells = [list(rows[0]), ['---'] * len(rows[0])]
  cells += [[x.replace('|', r'\|') for x in row.values()] for row in rows]
  return ''.join(f'| {" | ".join(line)} |\n' for line in cells)


def _numbers(collected: Collected) -> str:
  """Renders all numbers as a tidy table.

  Tokens are those in the loss, FLOPs those of training with all sources. A task
  has the name of its evaluation; `development` is of the evaluations in
  training.
  """
  text, study = io.StringIO(), collected.study.name
  lines = csv.writer(text, lineterminator='\n')
  lines.writerow(COLUMNS)
  for run in collected.runs:
    seed = '' if run.seed is None else run.seed
    for step, tokens, flops, loss in zip(
      *(run.curve[x] for x in ('step', 'target_tokens', 'flops', 'loss')),
      strict=True,
    ):
      spent = step, f'{tokens:.0f}', f'{flops:.6g}'
      lines.writerow(
        (study, run.model, seed, *spent, 'development', 'loss', f'{loss:.7g}')
      )
    end = [
      run.summary.get('steps', ''),
      f'{run.summary.get("target_tokens", 0):.0f}',
      f'{run.summary.get("inclusive", {}).get("flops", 0):.6g}',
    ]
    for evaluation in collected.study.evaluations:
      for score in run.scores.get(evaluation.name, ()):
        name = f'{score.task}/{score.metric}'
        score = claim_results.reported(run, name, evaluation) or score
        task = f'{evaluation.name}/{score.task}'
        value = f'{score.value:.7g}'
        lines.writerow(
          (study, run.model, seed, *end, task, score.metric, value)
        )
  return text.getvalue()


def _findings(collected: Collected) -> list[str]:
  """Returns sentences on sweeps, diverged models, costs and stages."""
  study, texts = collected.study, []
  for name, losses in collected.rates.items():
    finite = {x: y for x, y in losses.items() if y is not None}
    listed = ', '.join(f'{x}: {numbers.loss(y)}' for x, y in losses.items())
    texts.append(
      f'{name}: the best learning rate is {min(finite, key=finite.get)}'
      f' (losses on development rows: {listed}).'
    )
  texts += _best(collected)
  texts += [
    f'{run.model} (seed {run.seed}) has a {metric} that is not finite, and is'
    ' left out.'
    for evaluation in study.evaluations
    for metric in evaluation.metrics
    for run in collected.runs
    if (score := run.score(metric, evaluation))
    and not math.isfinite(score.value)
  ]
  values, generated = _costs(collected)
  texts += inference_cost.notes(values, generated)
  if collected.waiting:
    texts.append(
      f'{len(collected.waiting)} stages have not begun; what they measure is'
      ' blank.'
    )
  return texts + list(collected.notes)


def _best(collected: Collected) -> list[str]:
  """Names the best arm of every sweep, and the mean of best classifiers."""
  texts, accuracies = [], {}
  for name, arms in collected.study.best_of.items():
    evaluation = collected.study.evaluation_of(pages.LOSS, arms)
    losses = {
      arm: statistics.fmean(values)
      for arm in arms
      if evaluation
      and (values := _values(collected, arm, pages.LOSS, evaluation))
    }
    if not losses:
      continue
    best = min(losses, key=losses.get)
    text = f'{name} is {best}: of {len(losses)} it has the lowest held-out loss'
    texts.append(f'{text}, {numbers.loss(losses[best])}.')
    if _values(collected, best, 'held_out/macro_f1', evaluation):
      values = _values(collected, best, 'held_out/accuracy', evaluation)
      accuracies[name] = statistics.fmean(values)
  if accuracies:
    listed = ', '.join(f'{x} {y:.3f}' for x, y in accuracies.items())
    mean = statistics.fmean(accuracies.values())
    texts.append(
      f'The held-out accuracies are {listed}; their mean is {mean:.3f}.'
    )
  return texts


def _values(
  collected: Collected, model: str, metric: str, evaluation: pages.Evaluation
) -> list[float]:
  """Returns a metric of every seed of a model that has it."""
  scores = (
    claim_results.reported(x, metric, evaluation) for x in collected.of(model)
  )
  return [score.value for score in scores if score]


def _costs(
  collected: Collected,
) -> tuple[dict[str, dict[str, float]], int]:
  """Returns the measured cost of every model, and the generated tokens."""
  # Seeds have one shape: the first with a measurement stands for all.
  runs = {run.model: run for run in collected.runs[::-1] if run.generated}
  names = [name for name in collected.models if name in runs]
  costs = score_tables.costs(
    {name: sum(map(list, runs[name].scores.values()), []) for name in names}
  )
  return costs, max((run.generated for run in runs.values()), default=0)


def _page(
  collected: Collected,
  results: Sequence[Result],
  findings: Sequence[str],
  stage: pathlib.Path,
  root: str | os.PathLike[str],
) -> str:
  """Draws the figures and renders the page."""
  study, styles = collected.study, report_figures.styles(collected.models)
  costs, generated = _costs(collected)
  rows = [
    {'model': name, **inference_cost.describe(x)} for name, x in costs.items()
  ]
  sections = {
    'Claims': _claims(collected, results, stage),
    'Findings': html_report.items(findings),
    'Measures': html_report.table(collected.table),
    'Loss': _curves(collected, results, stage, styles),
    'Quality against cost': _quality(
      collected, costs, generated, stage, styles
    ),
    'Before and after': _scatter(collected, stage, styles),
    'Needles': _needles(collected, stage),
    'Scores': _scores(collected),
    'Differences between models': html_report.table(
      _difference_rows(collected, collected.models)
    ),
    'Training': html_report.table([_training(x, root) for x in collected.runs]),
    'Inference': html_report.table(rows),
    'Continuations': ''.join(map(_sample, collected.samples)),
    'Answers': html_report.table(
      predictions.table(
        {
          name: lines
          for name in collected.models
          if (lines := collected.of(name)[0].predictions)
        }
      )
    ),
    'Commands': html_report.folded(
      f'{len(collected.stages)} stages',
      html_report.table([_stage(x) for x in collected.stages]),
    ),
    'Text': html_report.facts(collected.text) if collected.text else '',
    'Environment': html_report.facts(collected.environment),
  }
  return html_report.page(study.title, _intro(collected, results), sections)


def _intro(collected: Collected, results: Sequence[Result]) -> list[str]:
  """Returns the paragraphs that say how the numbers are to be read."""
  took = progress.format_seconds(sum(x['seconds'] for x in collected.stages))
  texts = [
    f'Size {collected.study.size}, {collected.date}, {took}:'
    f' {collected.command}',
    'Seeds draw parameters and the order of rows. Intervals are over seeds and'
    ' over groups of held-out documents, and conditional on one pretrained'
    ' decoder and on one draw of masks and splits.',
  ]
  grouped = [x for x in results if x.groups]
  if grouped:
    counts = dict.fromkeys(
      f'{x.claim.metric}: {x.groups} groups (effective number'
      f' {x.effective:.1f})'
      for x in grouped
    )
    python = collected.text.get('python', '')
    texts.append(
      f'Held-out groups, of at most 32 rows: {"; ".join(counts)}'
      f'{f"; text of Python {python}" * bool(python)}.'
    )
  if any(x.claim.primary for x in results):
    texts.append(
      'Primary claims have intervals of level 1 - .05/k for k of them, and'
      ' verdicts; all others have 95 % intervals and no verdict.'
    )
  if collected.rates:
    texts.append(
      'Every third group is the development part. A learning rate is chosen'
      ' there once for each architecture and start, with a seed of its own,'
      ' and shared by arms that differ in objective, teacher, initialisation'
      ' of cross-attention or warm-up.'
    )
  return texts


def _claims(
  collected: Collected, results: Sequence[Result], stage: pathlib.Path
) -> str:
  """Renders claims: a figure, a table, and what is not controlled."""
  if not results:
    return ''
  rows = [
    {
      '': i,
      'claim': x.claim.sentence,
      'effect': x.text(x.effect),
      # On one line.
      'interval': x.interval.replace(' ', '\u00a0'),
      'seeds': x.seeds or '',
      'groups': x.groups or '',
      'verdict': x.outcome,
      'contrast': f'{x.claim.metric}: {x.contrast}',
      'level': f'{100 * x.level:.4g}\u00a0%' if x.interval else '',
      'smallest that matters': f'{x.claim.smallest:g} ({x.claim.reason})',
      'paper': f'{x.claim.paper} ({x.claim.source})',
    }
    for i, x in enumerate(results, 1)
  ]
  drawn = [
    (f'{i}. {x.claim.sentence}', *_scaled(x), x.outcome)
    for i, x in enumerate(results, 1)
    if x.effect is not None
  ]
  image = ''
  if drawn:
    image = html_report.wide(
      html_report.figure(
        stage / 'claims.png',
        'effects of the claims',
        report_figures.draw_claims,
        drawn,
      )
    )
  return (
    image
    + html_report.table(rows)
    + ''.join(
      html_report.folded(
        f'{i}. Differences and costs of {", ".join(x.claim.contrast)}',
        html_report.table(_difference_rows(collected, x.claim.contrast))
        + html_report.table(_cost_rows(collected, x.claim.contrast)),
      )
      for i, x in enumerate(results, 1)
    )
  )


def _scaled(result: Result) -> list[float | None]:
  """Returns effect and bounds in smallest differences, as they are claimed."""
  claim = result.claim
  is_crossing = claim.metric == pages.CROSSING
  scale = math.log if is_crossing else float
  lower = score_tables.lower_is_better(claim.metric.rpartition('/')[2])
  is_less = claim.direction == 'less'
  sign = -1 if is_less or (claim.direction == 'no better' and lower) else 1
  effect, *bounds = (
    None if x is None else sign * scale(x) / scale(claim.smallest)
    for x in (result.effect, result.low, result.high)
  )
  return [effect, *bounds[::sign]]


def _difference_rows(
  collected: Collected, models: Iterable[str]
) -> list[dict[str, Any]]:
  """Returns a row for every key in which trained models differ."""
  runs = {name: x for name in models if (x := collected.of(name))}
  different = claim_results.differences(runs)
  return [{'key': key, **values} for key, values in different.items()]


def _cost_rows(
  collected: Collected, models: Iterable[str]
) -> list[dict[str, Any]]:
  """Returns what models of a claim have read and cost, means over seeds."""
  prompt, generated = collected.request
  rows = []
  for name in dict.fromkeys(models):
    if not (runs := collected.of(name)):
      continue

    def mean(part: str, key: str, runs: Sequence[Run] = runs) -> float:
      return statistics.fmean(getattr(x, part).get(key, 0) for x in runs)

    inclusive = [x.summary.get('inclusive', {}).get('flops', 0) for x in runs]
    request = f'of {prompt} + {generated} tokens'
    rows.append(
      {
        'model': name,
        'parameters': numbers.count(mean('counts', 'parameters')),
        'without tables': numbers.count(mean('counts', 'without tables')),
        'tokens read': numbers.count(mean('summary', 'total_tokens')),
        'tokens in the loss': numbers.count(mean('summary', 'target_tokens')),
        'training FLOPs': f'{mean("summary", "flops"):.3g}',
        'with sources and teacher': f'{statistics.fmean(inclusive):.3g}',
        f'inference FLOPs {request}': f'{mean("counts", "FLOPs"):.3g}',
        'published convention': f'{mean("counts", "FLOPs, published"):.3g}',
      }
    )
  return rows


def _curves(
  collected: Collected,
  results: Sequence[Result],
  stage: pathlib.Path,
  styles: report_figures.Styles,
) -> str:
  """Draws the loss against tokens and FLOPs, on the rows of each evaluation."""
  text, axes = '', {'target_tokens': 'target tokens'}
  axes['flops'] = 'training FLOPs, with sources and teacher'
  for evaluation in collected.study.evaluations:
    curves, finals = _losses(collected, evaluation)
    if not curves:
      continue
    marks = _marks(collected, results, evaluation)
    text += f'<h3>{html.escape(evaluation.name)}</h3>' + html_report.figures(
      html_report.figure(
        stage / f'{evaluation.name}_{axis}.png',
        f'{evaluation.name}: loss against {label}',
        report_figures.draw_curves,
        curves,
        finals,
        marks,
        axis,
        label,
        styles,
      )
      for axis, label in axes.items()
    )
  return text and (
    f'{text}<p>Loss on the held-out rows that jobs evaluate on, of the'
    ' development part where there is one: the mean of the seeds and their'
    ' range. A star is where a model has the loss of another; ratios of tokens'
    ' are among the claims.</p>'
  )


def _losses(
  collected: Collected, evaluation: pages.Evaluation
) -> tuple[dict[str, list[Mapping[str, Sequence[float]]]], dict[str, float]]:
  """Returns curves on the rows of an evaluation, and losses of other models."""
  models = collected.study.measured(evaluation)
  names = [name for name in collected.models if name in models]
  runs = {
    name: [
      run
      for run in collected.of(name)
      if claim_results.has_common_rows(collected, run, evaluation)
    ]
    for name in names
  }
  drawn = [run for x in runs.values() for run in x]
  finals = {}
  for name in names:
    sources = [
      run
      for run in collected.of(name)
      if claim_results.reported(run, pages.LOSS, evaluation)
    ]
    if drawn and sources and not runs[name]:
      finals[name] = statistics.fmean(
        claim_results.target_loss(run, drawn[0], evaluation) for run in sources
      )
  curves = {name: [run.curve for run in x] for name, x in runs.items() if x}
  return curves, finals


def _marks(
  collected: Collected,
  results: Sequence[Result],
  evaluation: pages.Evaluation,
) -> list[tuple[str, float]]:
  """Returns the crossings of an evaluation: model, and loss of another."""
  marks = []
  for x in results:
    if x.claim.metric != pages.CROSSING or x.effect is None:
      continue
    names = x.claim.contrast
    if collected.study.evaluation_of(pages.LOSS, names) == evaluation:
      run = collected.of(names[1])[0]
      losses = [
        claim_results.target_loss(source, run, evaluation)
        for source in collected.of(names[0])
        if source.score(pages.LOSS, evaluation)
      ]
      marks.append((names[1], statistics.fmean(losses)))
  return marks


def _quality(
  collected: Collected,
  costs: Mapping[str, Mapping[str, float]],
  generated: int,
  stage: pathlib.Path,
  styles: report_figures.Styles,
) -> str:
  """Draws the first metric of evaluations against the cost of inference."""
  per_query = {
    name: inference_cost.per_query(x, generated) for name, x in costs.items()
  }
  text = ''
  for evaluation in collected.study.evaluations:
    metric, quality = evaluation.metrics[0], {}
    if metric.startswith(f'{inference_cost.TASK}/'):
      continue
    for name in per_query:
      scores = [
        claim_results.reported(run, metric, evaluation)
        for run in collected.of(name)
      ]
      if scores := list(filter(None, scores)):
        x = claim_results.interval([scores], 0.95)
        bounds = (x.low, x.high) if x.seeds > 1 else (x.effect, x.effect)
        quality[name] = bounds[0], x.effect, bounds[1]
    if len(quality) > 1:
      lower = score_tables.lower_is_better(metric.rpartition('/')[2])
      label = f'{evaluation.name}: {metric}'
      text += html_report.cost_figures(
        stage, label, quality, per_query, styles, lower
      )
  return text


def _scatter(
  collected: Collected, stage: pathlib.Path, styles: report_figures.Styles
) -> str:
  """Draws scores of models, and of those that start from them, against losses.

  Each point is the mean over the seeds of a model.
  """
  groups: dict[Any, dict[str, list[tuple[float, float]]]] = {}
  sizes = {run.model: run.size for run in collected.runs}
  for source, run in _descents(collected):
    for before in collected.study.evaluations:
      x = claim_results.reported(source, pages.LOSS, before)
      for after in collected.study.evaluations if x else ():
        for metric in after.metrics:
          y = claim_results.reported(run, metric, after)
          is_same = source is run and metric == pages.LOSS
          if y is None or is_same or y.task == inference_cost.TASK:
            continue
          # Scores of other examples are not compared.
          key = before.name, after.name, metric, x.groups, x.weights, y.groups
          points = groups.setdefault(key, {}).setdefault(source.model, [])
          points.append((x.value, y.value))
  images = []
  for (before, after, metric, *_), points in groups.items():
    if len(points) < 3:
      continue
    pooled, within = comparisons.correlations(
      (sizes[name], name, *values)
      for name, pairs in points.items()
      for values in pairs
    )
    texts = [
      f'{label} {x.value:.2f}{" (descriptive)" * x.is_descriptive}'
      for label, x in (('pooled', pooled), ('within sizes', within))
      if x
    ]
    images.append(
      html_report.figure(
        stage / f'scatter_{len(images)}.png',
        f'{metric} of {after} against the loss of {before}',
        report_figures.draw_scatter,
        {
          name: tuple(map(statistics.fmean, zip(*pairs, strict=True)))
          for name, pairs in points.items()
        },
        (f'{before}: {pages.LOSS}', f'{after}: {metric}'),
        f'Spearman: {", ".join(texts)}',
        styles,
      )
    )
  return html_report.figures(images)


def _descents(collected: Collected) -> Iterator[tuple[Run, Run]]:
  """Yields every run with itself, and with the runs that start from it."""
  study = collected.study
  by_stage = {study.stage_of(x.model, x.seed): x for x in collected.runs}
  for run in collected.runs:
    yield run, run
    for name in pages.placeholders(run.values.get('init.encoder', '')):
      if name in by_stage:
        yield by_stage[name], run


def _needles(collected: Collected, stage: pathlib.Path) -> str:
  """Draws heat maps of needles, of every model's mean over seeds."""
  means: dict[str, list[Any]] = {}
  for evaluation in collected.study.evaluations:
    for name in collected.models:
      for score in collected.of(name)[0].scores.get(evaluation.name, ()):
        if score.task.startswith('needle/'):
          metric = f'{score.task}/{score.metric}'
          values = _values(collected, name, metric, evaluation)
          mean = dataclasses.replace(score, value=statistics.fmean(values))
          means.setdefault(name, []).append(mean)
  if grids := retrieval_scores.grids(means):
    return html_report.wide(
      html_report.figure(
        stage / 'needles.png',
        'needles by depth and length',
        report_figures.draw_needles,
        grids,
      )
    )
  return ''


def _scores(collected: Collected) -> str:
  """Renders a table for each evaluation: means over seeds, with range."""
  text = ''
  for evaluation in collected.study.evaluations:
    scores = {
      run.model: run.scores.get(evaluation.name, ()) for run in collected.runs
    }
    metrics = score_tables.by_metric(retrieval_scores.without_cells(scores))
    rows = [
      {
        evaluation.name: name,
        **{
          f'{task}/{metric}': numbers.values(values) if values else ''
          for task, metric in metrics
          for values in [
            _values(collected, name, f'{task}/{metric}', evaluation)
          ]
        },
      }
      for name, x in scores.items()
      if x
    ]
    if metrics:
      text += html_report.table(rows)
  return text


def _training(run: Run, root: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns what a run has read and cost, with a link to its folder."""
  summary = run.summary
  inclusive = summary.get('inclusive', {})
  name = run.model if run.seed is None else f'{run.model}, seed {run.seed}'
  if not paths.is_bucket(root) and not paths.is_bucket(run.folder):
    link = html.escape(os.path.relpath(run.folder, root))
    name = html_report.Markup(f'<a href="{link}">{html.escape(name)}</a>')
  return {
    'run': name,
    'steps': f'{summary.get("steps", 0):,}',
    'learning rate': f'{summary.get("learning_rate") or 0:g}',
    'tokens read': numbers.count(summary.get('total_tokens', 0)),
    'tokens in the loss': numbers.count(summary.get('target_tokens', 0)),
    'FLOPs': f'{summary.get("flops", 0):.3g}',
    'with sources and teacher': f'{inclusive.get("flops", 0):.3g}',
    'time': progress.format_seconds(summary.get('seconds', 0)),
    'with sources': progress.format_seconds(inclusive.get('seconds', 0)),
    'loss at step 0': numbers.loss(summary.get('eval_loss_at_step_0')),
    'last loss in training': numbers.loss(summary.get('eval_loss')),
  }


def _sample(sample: Mapping[str, Any]) -> str:
  """Renders a prompt, its continuation and the scores of the latter."""
  fields = ('log_prob', 'tokens', 'reward')
  scores = ', '.join(f'{x} {sample[x]:.4g}' for x in fields if x in sample)
  return (
    f'<pre><span>{html.escape(sample["prompt"])}</span>'
    f'{html.escape(sample["continuation"])}</pre>\n<p>{scores}</p>\n'
  )


def _stage(stage: Mapping[str, Any]) -> dict[str, str]:
  """Returns the status, time and command of a stage."""
  return {
    'stage': stage['name'],
    'status': stage['status'],
    'starts': str(stage['starts']),
    'took': progress.format_seconds(stage['seconds']),
    'command': stage['command'],
  }
