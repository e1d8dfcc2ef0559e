"""Tables of scores: models beside each other, their comparisons, their cost.

A table is a list of rows, mappings from the same column names to text, which
`text` and `html_report` render.
"""

from collections.abc import Container, Mapping, Sequence
import itertools
import os
import statistics

from encdec_adapt.base import errors
from encdec_adapt.evaluation.measures import attention_analysis as attention
from encdec_adapt.evaluation.measures import held_out, inference_cost
from encdec_adapt.evaluation.results import comparisons, results_store
from encdec_adapt.evaluation.results import number_format as numbers

Row = Mapping[str, str]
# Scores of every model, by its short name.
Scores = Mapping[str, Sequence[results_store.Score]]

# Metrics of which less is better.
LOWER = ('loss', 'perplexity', 'word_perplexity', 'byte_perplexity')
LOWER += ('bits_per_byte', 'ter')
# With more models than this, each is compared with the first alone.
_ALL_PAIRS = 4


def short_names(runs: Sequence[str]) -> dict[str, str]:
  """Returns paths of runs without the folders that they share."""
  whole = [os.path.normpath(run) for run in runs]
  last = [os.path.basename(path) for path in whole]
  names = last if len(set(last)) == len(set(whole)) else whole
  return dict(zip(runs, names, strict=True))


def lower_is_better(metric: str) -> bool:
  """Returns whether less of a metric is better."""
  return metric in LOWER or metric.startswith('loss')


def score_rows(scores: Scores) -> list[Row]:
  """Returns a row per (task, metric): each model's value and 95 % interval."""
  rows = []
  for (task, metric), found in _by_metric(scores).items():
    counts = sorted({score.n for score in found.values()})
    rows.append(
      {
        'task': task,
        'metric': metric,
        'n': ', '.join(map(str, counts)),
        **{
          name: _value(found[name]) if name in found else '-' for name in scores
        },
      }
    )
  return rows


def comparison_rows(scores: Scores) -> list[Row]:
  """Returns a row per pair of models and metric of single examples."""
  names, rows = list(scores), []
  pairs = list(itertools.combinations(names, 2))
  if len(names) > _ALL_PAIRS:
    pairs = [pair for pair in pairs if pair[0] == names[0]]
  for (task, metric), found in _by_metric(scores).items():
    for pair in pairs:
      # More attention is neither better nor worse.
      if task == attention.TASK or not set(pair) <= found.keys():
        continue
      x = comparisons.compare(*(found[name] for name in pair))
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
          'test': f'{x.test}, n = {x.n}',
        }
      )
  return rows


def cost_rows(scores: Scores) -> list[Row]:
  """Returns a row per model whose cost was measured."""
  return [
    {'model': name, **inference_cost.describe(values)}
    for name, values in _costs(scores).items()
  ]


def per_query(scores: Scores, generated: int) -> dict[str, dict[str, float]]:
  """Returns the cost of one prompt of every measured model, by axis."""
  return {
    name: inference_cost.per_query(values, generated)
    for name, values in _costs(scores).items()
  }


def column(scores: Scores, spec: str) -> list[float]:
  """Returns one number per model.

  Args:
    scores: scores of every model.
    spec: TASK or TASK/METRIC; without a metric it is the first of the task.

  Raises:
    UserError: a model has no such score.
  """
  column = []
  for name, own in scores.items():
    found = [x for x in own if spec in (x.task, f'{x.task}/{x.metric}')]
    if not found:
      raise errors.UserError(
        f'{spec} is not a task, or TASK/METRIC, that {name} has scores of.'
      )
    column.append(found[0].value)
  return column


def quality(
  scores: Scores, asked: Container[str]
) -> tuple[str, dict[str, float]]:
  """Returns one number per model that stands for its quality, and its name.

  It is the mean of the first metric of every task that was asked for, that all
  models have and of which more is better; without such tasks, the negative of
  the held-out loss.
  """
  tasks: dict[str, dict[str, results_store.Score]] = {}
  for (task, metric), found in _by_metric(scores).items():
    of_all = found.keys() == scores.keys()
    if task in asked and of_all and not lower_is_better(metric):
      tasks.setdefault(task, found)
  if tasks:
    many = f'mean of {len(tasks)} tasks'
    return many if len(tasks) > 1 else next(iter(tasks)), {
      name: statistics.fmean(found[name].value for found in tasks.values())
      for name in scores
    }
  losses = _by_metric(scores).get((held_out.TASK, 'loss'), {})
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


def _costs(scores: Scores) -> dict[str, dict[str, float]]:
  """Returns the measured cost of every model, by metric."""
  found = {
    name: {x.metric: x.value for x in own if x.task == inference_cost.TASK}
    for name, own in scores.items()
  }
  return {name: values for name, values in found.items() if values}


def _by_metric(
  scores: Scores,
) -> dict[tuple[str, str], dict[str, results_store.Score]]:
  """Groups scores by task and metric, then model.

  Without the cost, and without what the attention's figure shows by head.
  """
  found: dict[tuple[str, str], dict[str, results_store.Score]] = {}
  for name, own in scores.items():
    for score in own:
      if score.task != inference_cost.TASK and '/head_' not in score.metric:
        found.setdefault((score.task, score.metric), {})[name] = score
  return found


def _p_value(p: float) -> str:
  return f'{p:.4f}' if p >= 1e-4 else '< 0.0001'


def _value(score: results_store.Score) -> str:
  """Formats a value with its interval."""
  if score.metric.endswith('_p'):
    return _p_value(score.value)
  if abs(score.value) >= 1000:
    return numbers.count(score.value)
  bounds = comparisons.interval(score)
  shown = '' if bounds is None else f' ({bounds[0]:.3f} to {bounds[1]:.3f})'
  return f'{score.value:.3f}{shown}'
