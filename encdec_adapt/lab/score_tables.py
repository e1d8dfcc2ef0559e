"""Tables of scores, comparisons and costs of models.

A table is a list of rows, mappings from the same column names to text, rendered
by `text` and `report.jinja`. The inputs are scores: no model is read here.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
import itertools
import os
import statistics

from encdec_adapt.base import errors
from encdec_adapt.evaluation.measures import attention_analysis as attention
from encdec_adapt.evaluation.measures import held_out, inference_cost
from encdec_adapt.evaluation.results import comparisons, results_store
from encdec_adapt.evaluation.results import number_format as numbers

Row = Mapping[str, str]
Scores = results_store.Scores
# Task -> model -> prompts, for tasks with different prompts by model.
Prompts = Mapping[str, Mapping[str, str]]

# Lower values of these metrics are better.
LOWER = ('loss', 'perplexity', 'word_perplexity', 'byte_perplexity')
LOWER += ('bits_per_byte', 'ter', 'brier', 'cut_short', 'cross_entropy')
# With more models than this, each is compared only with the first: pairs grow
# quadratically, and p-values are not corrected for their number.
_ALL_PAIRS = 4
_NO_MATCH = 0.01  # Share of exact rows without information.


def short_names(runs: Sequence[str]) -> dict[str, str]:
  """Returns the last path components of runs, if all differ."""
  full = [os.path.normpath(run) for run in runs]
  last = [os.path.basename(path) for path in full]
  names = last if len(set(last)) == len(set(full)) else full
  return dict(zip(runs, names, strict=True))


def lower_is_better(metric: str) -> bool:
  """Returns whether lower values of METRIC or TASK/METRIC are better."""
  name = metric.rpartition('/')[2]
  return name in LOWER or name.startswith('loss')


def score_rows(scores: Scores, prompts: Prompts) -> list[Row]:
  """Returns a row per (task, metric): each model's value and 95 % interval.

  Args:
    scores: scores of every model.
    prompts: prompts that differ by model; shown in a column.
  """
  rows = []
  for (task, metric), by_model in by_metric(scores).items():
    counts = sorted({score.n for score in by_model.values()})
    rows.append(
      {
        'task': task,
        'metric': metric,
        'n': ', '.join(map(str, counts)),
        **{
          name: _value(by_model[name]) if name in by_model else '-'
          for name in scores
        },
        **_prompts(prompts, task, scores),
      }
    )
  return rows


def _prompts(prompts: Prompts, task: str, models: Iterable[str]) -> Row:
  texts = prompts.get(task, {})
  cell = '; '.join(f'{x}: {texts[x]}' for x in models if x in texts)
  return {'prompts': cell or '-'} if prompts else {}


def comparison_rows(
  scores: Scores, arms: Mapping[str, Sequence[str]], prompts: Prompts
) -> list[Row]:
  """Returns a row per pair of arms and per-example metric.

  Args:
    scores: scores of every model.
    arms: models by arm.
    prompts: see `score_rows`.
  """
  names, rows = list(arms), []
  pairs = list(itertools.combinations(names, 2))
  if len(names) > _ALL_PAIRS:
    pairs = [pair for pair in pairs if pair[0] == names[0]]
  for (task, metric), by_model in by_metric(scores).items():
    for pair in pairs:
      runs = [[by_model.get(name) for name in arms[arm]] for arm in pair]
      # More attention is neither better nor worse.
      if task == attention.TASK or None in itertools.chain(*runs):
        continue
      x = comparisons.compare(*runs)
      if x is None:
        continue
      is_second = (x.difference > 0) != lower_is_better(metric)
      rows.append(
        {
          'task': task,
          'metric': metric,
          'models': f'{pair[1]} - {pair[0]}',
          'difference': f'{x.difference:+.4f}',
          '95 % interval': f'{x.low:+.4f} to {x.high:+.4f}',
          'p': _p_value(x.p),
          'better': (
            pair[is_second] if x.p < 1 - comparisons.CONFIDENCE else 'not clear'
          ),
          'over': x.units,
          'test': x.test,
          **_prompts(prompts, task, [arms[arm][0] for arm in pair]),
        }
      )
  return rows


def cost_rows(scores: Scores) -> list[Row]:
  """Returns a row per model with measured cost."""
  return [
    {'model': name, **inference_cost.describe(values)}
    for name, values in costs(scores).items()
  ]


def costs(scores: Scores) -> dict[str, dict[str, float]]:
  """Returns the measured cost of every model, by metric."""
  by_model: dict[str, dict[str, float]] = {}
  for name, model_scores in scores.items():
    for x in model_scores:
      if x.task == inference_cost.TASK:
        by_model.setdefault(name, {})[x.metric] = x.value
  return by_model


def column(scores: Scores, spec: str) -> list[float]:
  """Returns a number per model.

  Args:
    scores: scores of every model.
    spec: TASK or TASK/METRIC; TASK means the first metric of the task.

  Raises:
    UserError: a model has no such score.
  """
  column = []
  for name, model_scores in scores.items():
    values = [
      x.value for x in model_scores if spec in (x.task, f'{x.task}/{x.metric}')
    ]
    if not values:
      raise errors.UserError(
        f'{spec} is not a task, or TASK/METRIC, that {name} has scores of.'
      )
    column.append(values[0])
  return column


def quality(
  scores: Scores, requested: Container[str]
) -> tuple[str, dict[str, float]]:
  """Returns the name of a quality measure, and its value for every model.

  The measure is the mean over the requested tasks common to all models, each
  with its first higher-is-better metric; without such tasks, the negative
  held-out loss.
  """
  tasks: dict[str, dict[str, results_store.Score]] = {}
  for (task, metric), by_model in by_metric(scores).items():
    # A mean over other tasks would not compare the models.
    is_complete = by_model.keys() == scores.keys()
    if task in requested and is_complete and not lower_is_better(metric):
      tasks.setdefault(task, by_model)
  if tasks:
    label = f'mean of {len(tasks)} tasks'
    return label if len(tasks) > 1 else next(iter(tasks)), {
      name: statistics.fmean(x[name].value for x in tasks.values())
      for name in scores
    }
  losses = by_metric(scores).get((held_out.TASK, 'loss'), {})
  return '- held-out loss', {name: -x.value for name, x in losses.items()}


def text(rows: Sequence[Row]) -> str:
  """Renders a table for a terminal."""
  if not rows:
    return ''
  lines = [list(rows[0]), *(list(row.values()) for row in rows)]
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  return '\n'.join(
    '  '.join(
      cell.ljust(width) for cell, width in zip(line, widths, strict=True)
    ).rstrip()
    for line in lines
  )


def by_metric(
  scores: Scores,
) -> dict[tuple[str, str], dict[str, results_store.Score]]:
  """Groups scores by task and metric, then model.

  Excludes costs, attention by head (shown in another table and a figure), and
  `left_out` scores.
  """
  groups: dict[tuple[str, str], dict[str, results_store.Score]] = {}
  for name, model_scores in scores.items():
    for score in model_scores:
      if score.task != inference_cost.TASK and '/head_' not in score.metric:
        groups.setdefault((score.task, score.metric), {})[name] = score
  without = left_out(scores.values())
  return {key: x for key, x in groups.items() if key not in without}


def left_out(
  scores: Iterable[Iterable[results_store.Score]],
) -> list[tuple[str, str]]:
  """Returns (task, metric) of scores without information.

  These are counts of target tokens, and a held-out exact match near zero for
  all models, as in language modelling.
  """
  exact, tokens = (
    (held_out.TASK, x) for x in ('exact_match', held_out.TARGET_TOKENS)
  )
  values = [x.value for y in scores for x in y if (x.task, x.metric) == exact]
  return [tokens] + ([exact] if max(values, default=0) < _NO_MATCH else [])


def _p_value(p: float) -> str:
  return f'{p:.4f}' if p >= 1e-4 else '< 0.0001'


def _value(score: results_store.Score) -> str:
  if score.metric.endswith('_p'):  # P-values of MEAP's measures.
    return _p_value(score.value)
  if abs(score.value) >= 1000:
    return numbers.count(score.value)
  bounds = comparisons.interval(score)
  suffix = '' if bounds is None else f' ({bounds[0]:.3f} to {bounds[1]:.3f})'
  if bounds is None and len({*score.groups} or range(score.n)) < 2:
    unit = 'example' if score.n < 2 else 'group of documents'
    suffix = f' (no interval: one {unit})'
  return f'{score.value:.3f}{suffix}'
