"""The findings of a study, as sentences computed from its numbers.

Every sentence is written for both outcomes: a comparison that goes against
the method is stated as plainly as one that goes for it.
"""

from collections.abc import Mapping, Sequence
import math
import statistics
from typing import Any

from encdec_adapt.evaluation.results import number_format as numbers

# Nats per target token by which the prefixes of other examples must raise
# the loss before the encoder counts as used.
ENCODER_USED = 0.1
# Smaller differences between two losses count as none.
NO_DIFFERENCE = 0.01

# Parameters below which poor continuations are explained by the size: the
# smallest GPT-2, with 124 M, is about where general text becomes fluent.
_FLUENT = 1e8

# Models that `adapted` is compared with at the end, and what each one is.
_COMPARED = {
  'scratch': 'the same pair from random weights',
  'unbalanced': 'a pair with the smaller decoder',
  'adapted_embeddings': 'control: all weights fresh but the embeddings',
  'decoder_only': 'the decoder that adapted was made from',
  'decoder_only_continued': 'decoder_only, trained for as many tokens more',
  'adapted_meap': "adapted, tuned with MEAP's masked copies as well",
}


def findings(report: Mapping[str, Any]) -> list[str]:
  """Computes the sentences of a report from its runs.

  Args:
    report: the dictionary that `evaluation.reports.html_report` documents.
    Absent
      runs are left out.

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
  return (
    not_finite
    + _start(runs)
    + _end(runs)
    + _exact(runs)
    + _encoder_use(runs)
    + _labels(runs, report.get('best', ()))
  )


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


def _labels(runs: numbers.Runs, best: Sequence[str]) -> list[str]:
  """States the accuracies of the best classifiers, and their mean."""
  found = {name: runs[name].get('label_accuracy') for name in best}
  if not found or None in found.values():
    return []
  each = ', '.join(f'{name} {value:.3f}' for name, value in found.items())
  mean = statistics.fmean(found.values())
  return [f'The held-out accuracies are {each}; their mean is {mean:.3f}.']


def _finite(runs: numbers.Runs, model: str, key: str) -> list[float]:
  """Values of every seed of a model; empty if one is missing or not finite."""
  found = [runs[name][key] for name in numbers.seeds(runs, model)]
  return found if all(x is not None and math.isfinite(x) for x in found) else []


def _compare(runs: numbers.Runs, model: str, key: str) -> str:
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
  if numbers.seed_names(runs, 'adapted') == numbers.seed_names(runs, model):
    low, high = numbers.paired_interval(first, second)
    return (
      f'{text} (95 % interval of the paired seeds {low:+.3f} to {high:+.3f})'
    )
  if max(first) < min(second) or max(second) < min(first):
    return text + '; the seeds do not overlap'
  return text + '; the seeds overlap, so this is within their variation'


def _start(runs: numbers.Runs) -> list[str]:
  key = 'eval_loss_at_step_0'
  adapted, scratch = (_finite(runs, m, key) for m in ('adapted', 'scratch'))
  if not (adapted and scratch):
    return []
  difference = _compare(runs, 'scratch', key)
  return [
    f'At step 0, adapted has {numbers.values(adapted)} nats per target token'
    f' and scratch {numbers.values(scratch)}: {difference}.'
  ]


def _end(runs: numbers.Runs) -> list[str]:
  adapted = _finite(runs, 'adapted', 'eval_loss')
  if not adapted:
    return []
  run = runs['adapted']
  found = [
    f'After {run["steps"]} steps on {numbers.count(run["target_tokens"])}'
    f' target tokens, adapted has {numbers.values(adapted)} nats per target'
    ' token.'
  ]
  for model, description in _COMPARED.items():
    other = _finite(runs, model, 'eval_loss')
    if other:
      difference = _compare(runs, model, 'eval_loss')
      found.append(
        f'{model} ({description}) has {numbers.values(other)}: {difference}.'
      )
  return found


def _exact(runs: numbers.Runs) -> list[str]:
  """States exact match where a model has any."""
  shares = {
    model: _finite(runs, model, 'exact_match') for model in numbers.models(runs)
  }
  if not any(max(found, default=0) for found in shares.values()):
    return []
  found = ', '.join(
    f'{model} {numbers.values(share)}' for model, share in shares.items()
  )
  return [f'The shares of held-out rows that are exact are {found}.']


def _encoder_use(runs: numbers.Runs) -> list[str]:
  found = []
  for model in numbers.models(runs):
    right = _finite(runs, model, 'eval_loss')
    wrong = _finite(runs, model, 'eval_loss_shuffled_prefix')
    if not (right and wrong):
      continue
    rise = round(statistics.fmean(wrong) - statistics.fmean(right), 3)
    measured = (
      f'with the prefixes of other examples its loss is'
      f' {numbers.values(wrong)} ({rise:+.3f}).'
    )
    if not numbers.has_encoder(runs[numbers.seeds(runs, model)[0]]):
      found.append(f'{model} reads prefixes without an encoder: {measured}')
      continue
    verdict = 'uses' if rise > ENCODER_USED else 'does not clearly use'
    found.append(
      f'{model} {verdict} its encoder (used: more than {ENCODER_USED} worse):'
      f' {measured}'
    )
  return found
