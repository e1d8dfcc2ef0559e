"""The findings of a study, as sentences computed from its numbers.

Every sentence is written for both outcomes: a result against the method is
stated as plainly as a result for it. Nothing is read from disk or drawn here.
"""

from collections.abc import Mapping, Sequence
import math
import statistics
from typing import Any

import numpy as np

from encdec_adapt.evaluation.measures import inference_cost
from encdec_adapt.evaluation.reports import run_groups
from encdec_adapt.evaluation.results import crossed_intervals
from encdec_adapt.evaluation.results import number_format as numbers

# Nats per target token by which the prefixes of other examples must raise
# the loss before the encoder counts as used.
ENCODER_USED = 0.1
# Smaller differences between two losses count as none.
NO_DIFFERENCE = 0.01

# Parameters below which poor continuations are explained by the size: the
# smallest GPT-2, with 124 M, is about where general text becomes fluent.
_FLUENT = 1e8

# Models that `adapted` is compared with at the end, and their descriptions.
_COMPARED = {
  'scratch': 'the same pair from random weights',
  'unbalanced': 'a pair with the smaller decoder',
  'decoder_only': 'the decoder that adapted was made from',
  'decoder_only_continued': 'decoder_only, trained for as many tokens more',
  'adapted_meap': "adapted, tuned with MEAP's masked copies as well",
}


def findings(report: Mapping[str, Any]) -> list[str]:
  """Computes the sentences of a report from its runs.

  Args:
    report: the dictionary that `evaluation.reports.html_report` documents;
      sentences about absent runs are left out.

  Returns:
    Plain sentences, the main comparison first.
  """
  runs = report['runs']
  not_finite = [
    f'{name} ended with a loss that is not finite and is left out of the'
    ' comparisons below.'
    for name, run in runs.items()
    if not math.isfinite(run['eval_loss'])
  ]
  tuned = report['tuned']['findings'] if report['tuned'] else []
  return (
    not_finite
    + _start(runs)
    + _end(runs)
    + _exact(runs)
    + _encoder_use(runs)
    + _requests(runs)
    + _labels(runs, report.get('best', ()))
    + [f'After fine-tuning: {text}' for text in tuned]
    + [report['note']] * bool(report['note'])
  )


def crossing(runs: run_groups.Runs) -> tuple[int, float] | None:
  """Returns where the mean of `adapted` is first below `decoder_only`.

  Args:
    runs: the runs of a report; curves of encoder-decoders are of the held-out
      rows that all models are compared on.

  Returns:
    Step and target tokens of that evaluation; None where there is none.
  """
  source = _finite(runs, 'decoder_only', 'eval_loss')
  curves = [runs[n]['curve'] for n in run_groups.seeds(runs, 'adapted')]
  means = [
    # Not strict: a run may have stopped early.
    map(statistics.fmean, zip(*(curve[axis] for curve in curves), strict=False))
    for axis in ('step', 'target_tokens', 'eval_loss')
  ]
  for step, tokens, loss in zip(*means, strict=True):
    if source and loss < source[0]:
      return round(step), tokens
  return None


def verdict(runs: run_groups.Runs) -> str:
  """States whether language modelling tells adaptation from more training.

  Returns:
    A clause; '' without `decoder_only_continued`.
  """
  models = 'adapted', 'decoder_only_continued'
  if not all(losses := [_finite(runs, m, 'eval_loss') for m in models]):
    return ''
  difference = statistics.fmean(losses[0]) - statistics.fmean(losses[1])
  if abs(difference) < NO_DIFFERENCE:
    return 'Language modelling alone does not tell adapted from its control'
  side = 'below' if difference < 0 else 'above'
  return f'adapted ends {abs(difference):.3f} nats {side} its control'


def explain_continuations(report: Mapping[str, Any]) -> list[str]:
  """Explains poor continuations by the size of the models that wrote them.

  Args:
    report: the dictionary that `evaluation.reports.html_report` documents.

  Returns:
    A sentence for each model of fewer than `_FLUENT` parameters.
  """
  runs = report['runs']
  return [
    f'{name} wrote these continuations. With'
    f' {numbers.count(runs[name]["parameters"])} parameters and'
    f' {numbers.count(runs[name]["inclusive"]["total_tokens"])} tokens of'
    ' training, those of its sources included, it has learnt words and syntax'
    ' of its text and little meaning: Gemma 2 2B has 2.6 G parameters and was'
    ' trained on 2 T tokens (arXiv:2408.00118).'
    for name in dict.fromkeys(x['run'] for x in report['samples'])
    if name in runs and runs[name]['parameters'] < _FLUENT
  ]


def _labels(runs: run_groups.Runs, best: Sequence[str]) -> list[str]:
  """States the accuracies of the best classifiers, and their mean."""
  accuracies = {name: runs[name].get('label_accuracy') for name in best}
  if not accuracies or None in accuracies.values():
    return []
  texts = ', '.join(f'{name} {x:.3f}' for name, x in accuracies.items())
  mean = statistics.fmean(accuracies.values())
  return [f'The held-out accuracies are {texts}; their mean is {mean:.3f}.']


def _finite(runs: run_groups.Runs, model: str, key: str) -> list[float]:
  """Returns the values of a model's seeds; empty if any is not finite."""
  # A mean without the diverged seeds would flatter the model.
  values = [runs[name][key] for name in run_groups.seeds(runs, model)]
  is_complete = all(x is not None and math.isfinite(x) for x in values)
  return values if is_complete else []


def _compare(runs: run_groups.Runs, model: str, key: str) -> str:
  """States by how much the mean of `adapted` is lower than a model's.

  An interval is stated only where both have the same seeds.
  """
  first, second = (_finite(runs, m, key) for m in ('adapted', model))
  difference = statistics.fmean(first) - statistics.fmean(second)
  if abs(difference) < NO_DIFFERENCE:
    text = f'adapted does not differ (by less than {NO_DIFFERENCE} nats)'
  else:
    side = 'lower' if difference < 0 else 'higher'
    text = f'adapted is {abs(difference):.3f} nats {side}'
  if len(first) == len(second) == 1:
    return text
  if run_groups.seed_names(runs, 'adapted') == run_groups.seed_names(
    runs, model
  ):
    # Runs of equal seeds are paired: variation that they share cancels.
    differences = [a - b for a, b in zip(first, second, strict=True)]
    test = crossed_intervals.interval(
      np.array([differences]), np.ones(len(differences))
    )
    return (
      f'{text} (95 % interval of the paired seeds {test.low:+.3f} to'
      f' {test.high:+.3f})'
    )
  if max(first) < min(second) or max(second) < min(first):
    return text + '; the seeds do not overlap'
  return text + '; the seeds overlap, so this is within their variation'


def _start(runs: run_groups.Runs) -> list[str]:
  key = 'eval_loss_at_step_0'
  adapted, scratch = (_finite(runs, m, key) for m in ('adapted', 'scratch'))
  if not (adapted and scratch):
    return []
  difference = _compare(runs, 'scratch', key)
  return [
    f'At step 0, adapted has {numbers.values(adapted)} nats per target token'
    f' and scratch {numbers.values(scratch)}: {difference}.'
  ]


def _end(runs: run_groups.Runs) -> list[str]:
  adapted = _finite(runs, 'adapted', 'eval_loss')
  if not adapted:
    return []
  run = runs['adapted']
  sentences = [
    f'After {run["steps"]} steps on {numbers.count(run["target_tokens"])}'
    f' target tokens, adapted has {numbers.values(adapted)} nats per target'
    ' token.'
  ]
  for model, description in _COMPARED.items():
    if losses := _finite(runs, model, 'eval_loss'):
      difference = _compare(runs, model, 'eval_loss')
      sentences.append(
        f'{model} ({description}) has {numbers.values(losses)}: {difference}.'
      )
  if point := crossing(runs):
    sentences.append(
      f'adapted is first below decoder_only at step {point[0]}'
      f' ({numbers.count(point[1])} target tokens).'
    )
  if text := verdict(runs):
    sentences.append(f'{text}, decoder_only_continued.')
  return sentences


def _requests(runs: run_groups.Runs) -> list[str]:
  """States the cost of a request, by model where it was measured."""
  costs = {name: run['request'] for name, run in runs.items() if run['request']}
  sentences = []
  for name, x in costs.items():
    costs_by_axis = inference_cost.per_query(x, x['generated'])
    low, latency, high = costs_by_axis[inference_cost.LATENCY]
    sentences.append(
      f'A request of {x["prompt"]} + {x["generated"]} tokens costs {name}'
      f' {x["FLOPs"]:.3g} FLOPs and {latency:.1f} ms (quartiles {low:.1f} to'
      f' {high:.1f}).'
    )
  # All models of a study are measured with the same lengths.
  generated = next((x['generated'] for x in costs.values()), 0)
  return sentences + inference_cost.notes(costs, generated)


def _exact(runs: run_groups.Runs) -> list[str]:
  """States exact match, unless all models have none."""
  shares = {
    model: _finite(runs, model, 'exact_match')
    for model in run_groups.models(runs)
  }
  if not any(map(any, shares.values())):
    return []
  texts = ', '.join(
    f'{model} {numbers.values(share)}' for model, share in shares.items()
  )
  return [f'The shares of held-out rows that are exact are {texts}.']


def _encoder_use(runs: run_groups.Runs) -> list[str]:
  sentences = []
  for model in run_groups.models(runs):
    losses = _finite(runs, model, 'eval_loss')
    shuffled = _finite(runs, model, 'eval_loss_shuffled_prefix')
    if not (losses and shuffled):
      continue
    # Rounded as it is printed, so that verdict and number agree.
    rise = round(statistics.fmean(shuffled) - statistics.fmean(losses), 3)
    measured = (
      f'with the prefixes of other examples its loss is'
      f' {numbers.values(shuffled)} ({rise:+.3f}).'
    )
    if not run_groups.has_encoder(runs[run_groups.seeds(runs, model)[0]]):
      sentences.append(f'{model} reads prefixes without an encoder: {measured}')
      continue
    verdict = 'uses' if rise > ENCODER_USED else 'does not clearly use'
    sentences.append(
      f'{model} {verdict} its encoder (used: more than {ENCODER_USED} worse):'
      f' {measured}'
    )
  return sentences
