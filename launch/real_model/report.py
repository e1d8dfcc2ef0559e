"""Comparisons of what a run has brought back: OUTPUT/report.json and .md.

Written down before any run: primary 1 is the pair minus the source trained on,
in nats per target token on the repository's own pages and code, over files;
what matters is .02. Primary 2 is ROUGE-L of the pair minus the decoder, both
tuned alike, in points over papers; what matters is 1. The baseline is always
the source trained on, never the source: further training heals quantisation.
One run of each: intervals are over documents, and there is no verdict.

The report reads results only: their line `source` has what was prepared.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
from typing import Any

import numpy as np

from launch import commands
from launch.real_model import plan

_MODELS = ('source', *plan.ARMS)
PRIMARY = {'own': 0.02, 'summaries': 1.0}
_FLOPS_TOLERANCE = 0.01  # Largest difference of arms with equal FLOPs.


def report(size: plan.Size, folders: plan.Folders) -> None:
  """Writes and prints the comparisons.

  Raises:
    LaunchError: the results are missing.
  """
  path = folders.output / 'parts.jsonl'
  if not path.is_file():
    raise commands.LaunchError(
      f'{path} is missing; copy the output of `run` here.'
    )
  parts = {}
  for line in path.read_text().splitlines():
    part = json.loads(line)
    parts.setdefault(part['part'], []).append(part)
  content = compare(parts, size)
  text = json.dumps(content, indent=2)
  (folders.output / 'report.json').write_text(f'{text}\n')
  page = describe(content)
  (folders.output / 'report.md').write_text(page)
  print(page)


def compare(
  parts: Mapping[str, Sequence[Mapping[str, Any]]], size: plan.Size
) -> dict[str, Any]:
  """Returns the content of the report.

  Args:
    parts: lines of the results by name of the part.
    size: sizes of the run.
  """
  latest = {name: lines[-1] for name, lines in parts.items()}
  source, tokens = latest['source'], size.rows * sum(size.lengths)
  models = _scores(latest.get('source_scores', {}))
  models |= _scores(latest.get('scores', {}))
  rows, inputs = [], []
  for name in plan.HELD_OUT:
    losses = {x: _score_on(models.get(x, {}), 'loss', name) for x in _MODELS}
    pair, decoder = (losses[arm] for arm in plan.ARMS)
    if pair and decoder:
      rows.append(_row(name, pair, decoder))
    for model, loss in losses.items():
      shifted = _score_on(models.get(model, {}), 'loss_shuffled_prefix', name)
      if loss and shifted:
        inputs.append({'model': model, **_row(name, shifted, loss)})
  for task in plan.TASKS:
    answers = [
      _scores(latest.get(f'{arm}_{task}_answers', {})).get(f'{arm}_{task}', {})
      for arm in plan.ARMS
    ]
    metric = 'rougeL' if task == 'summaries' else 'chrf'
    pair, decoder = (x.get(metric) for x in answers)
    if not (pair and decoder):
      continue
    if task == 'summaries':
      rows.append(_row(task, pair, decoder, scale=100))
    else:
      documents = source['documents']
      pair, decoder = (_by_document(x, documents) for x in (pair, decoder))
      row = _row(task, pair, decoder)
      rows.append(row | {'over': f'{row["n"]} documents'})
  return {
    'commit': source['commit'],
    'files': source['files'],
    'model': 'a rehearsal with the shipped decoder'
    if size.is_rehearsal
    else 'Gemma 3 270M, dequantised Q4_K_M',
    'card': source['card'],
    'rates': source['rates'],
    'training': {
      arm: {'steps': steps, 'FLOPs': steps * source['flops'][arm]}
      for arm in plan.ARMS
      if (steps := latest.get(arm, {}).get('steps'))
    },
    'differences': rows,
    'other_inputs': inputs,
    'floors': source['floors'],
    'curves': {
      arm: [
        {
          'tokens': x['step'] * tokens,
          'FLOPs': x['step'] * source['flops'][arm],
          'loss': x['loss'],
        }
        for x in latest.get(arm, {}).get('evaluations', ())
      ]
      for arm in plan.ARMS
    },
    'parts': [
      {k: x.get(k) for k in ('part', 'state', 'seconds', 'limit', 'reason')}
      | {k: x.get(k) for k in ('steps', 'step_seconds', 'mfu')}
      for lines in parts.values()
      for x in lines
    ],
  }


def _scores(part: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """Returns the scores of a part by model and metric."""
  from encdec_adapt.evaluation.results import results_store

  models: dict[str, dict[str, Any]] = {}
  for fields in part.get('scores', ()):
    score = results_store.Score(
      *(fields[x] for x in ('task', 'metric', 'value', 'stderr', 'n')),
      *(
        tuple(fields.get(x, ()))
        for x in ('scores', 'weights', 'groups', 'statistics')
      ),
    )
    name = fields['run'].rstrip('/').rpartition('/')[2]
    models.setdefault(name, {})[score.metric] = score
  return models


def _score_on(scores: Mapping[str, Any], metric: str, text: str) -> Any:
  """Returns a score on the documents of a held-out text; None without any."""
  from encdec_adapt.evaluation.results import contrasts, results_store

  if metric not in scores:
    return None
  score = scores[metric]
  (numerators,), weights = contrasts.sums([[score]])
  groups = sorted({*score.groups})
  # A document's id begins with its file.
  index = [i for i, x in enumerate(groups) if x.startswith(f'{text}.jsonl')]
  if not index:
    return None
  return results_store.ratio_score(
    text,
    metric,
    numerators[index],
    weights[index],
    [groups[i] for i in index],
  )


def _by_document(score: Any, documents: Sequence[str]) -> Any:
  """Returns a corpus score whose examples are documents."""
  names = documents[: score.n]
  sums = {}
  for name, statistics in zip(names, score.statistics, strict=True):
    sums[name] = np.add(sums.get(name, 0), statistics)
  # Resampled by their statistics; the examples' values are not read.
  return dataclasses.replace(
    score,
    n=len(sums),
    scores=(score.value,) * len(sums),
    statistics=tuple(tuple(map(int, x)) for x in sums.values()),
  )


def _row(
  name: str, pair: Any, decoder: Any, scale: float = 1
) -> dict[str, Any]:
  """Returns the difference of two scores, pair minus decoder."""
  from encdec_adapt.evaluation.results import comparisons

  row = {
    'text': name,
    'metric': pair.metric,
    'first': scale * pair.value,
    'second': scale * decoder.value,
    'difference': scale * (pair.value - decoder.value),
    'matters': PRIMARY.get(name),
    'n': pair.n,
  }
  if comparison := comparisons.compare([decoder], [pair]):
    row |= {'low': scale * comparison.low, 'high': scale * comparison.high}
    row['over'] = comparison.units
  return row


def describe(content: Mapping[str, Any]) -> str:
  """Returns the report as a page."""
  lines = [
    f'{content["model"]}, on {content["card"]}, at {content["commit"]}.'
    ' One run: intervals are over documents, and there is no verdict.',
    '',
    f'{_training(content["training"])} Learning rates:'
    f' {_rates(content["rates"])}.',
    '',
    '| text | metric | pair | source trained on | difference | 95 % | over |'
    ' matters from |',
    '|---|---|---|---|---|---|---|---|',
    *map(_line, content['differences']),
    '',
    f'Floors, ROUGE-L: {_values(content["floors"], 100)}.',
    '',
    'Other inputs are those of the row half a set away, always another kind of'
    ' text: they cost more than another document of the same kind would.',
    '',
    '| text | model | loss | with other inputs | difference | 95 % |',
    '|---|---|---|---|---|---|',
  ]
  lines += [
    f'| {x["text"]} | {x["model"]} | {x["second"]:.3f} | {x["first"]:.3f} |'
    f' {x["difference"]:+.3f} | {_bounds(x)} |'
    for x in content['other_inputs']
  ]
  lines += ['', '| model | held-out loss by M tokens read |', '|---|---|']
  for arm, curve in content['curves'].items():
    points = (f'{x["tokens"] / 1e6:.2f}: {x["loss"]:.3f}' for x in curve)
    lines.append(f'| {arm} | {", ".join(points)} |')
  lines += [
    '',
    '| part | state | s | of | steps | s a step | MFU |',
    '|---' * 7 + '|',
  ]
  lines += [
    f'| {x["part"]} | {x["state"]} | {x["seconds"]} | {x["limit"]} |'
    f' {x["steps"] or ""} | {_number(x["step_seconds"])} |'
    f' {_number(x["mfu"])} |'
    for x in content['parts']
  ]
  return '\n'.join(lines) + '\n'


def _training(arms: Mapping[str, Mapping[str, float]]) -> str:
  """Returns steps and FLOPs of the arms on text, and their ratio."""
  texts = [
    f'{arm} {x["steps"]} steps, {x["FLOPs"]:.3g} FLOPs'
    for arm, x in arms.items()
  ]
  if len(arms) < len(plan.ARMS):
    return f'Trained on text: {"; ".join(texts) or "neither arm"}.'
  flops = [arms[arm]['FLOPs'] for arm in plan.ARMS]
  ratio = flops[1] / flops[0]
  unequal = abs(ratio - 1) > _FLOPS_TOLERANCE
  warning = ' **Unequal FLOPs.**' if unequal else ''
  return f'Trained on text: {"; ".join(texts)}; ratio {ratio:.3f}.{warning}'


def _rates(rates: Mapping[str, Any]) -> str:
  state = 'tried' if rates['losses'] else 'untested'
  return ', '.join(f'{arm} {rates[arm]:g}' for arm in plan.ARMS) + f', {state}'


def _line(row: Mapping[str, Any]) -> str:
  return (
    f'| {row["text"]} | {row["metric"]} | {row["first"]:.3f} |'
    f' {row["second"]:.3f} | {row["difference"]:+.3f} | {_bounds(row)} |'
    f' {row.get("over", "")} | {row["matters"] or ""} |'
  )


def _bounds(row: Mapping[str, Any]) -> str:
  return f'{row["low"]:+.3f} to {row["high"]:+.3f}' if 'low' in row else ''


def _values(values: Mapping[str, float], scale: float) -> str:
  return ', '.join(f'{name} {scale * x:.1f}' for name, x in values.items())


def _number(value: float | None) -> str:
  return '' if value is None else f'{value:.3g}'
