"""What a study found, in sentences computed from its numbers.

Every sentence is written for both outcomes: a comparison that goes against
the method is stated as plainly as one that goes for it.
"""

from collections.abc import Mapping, Sequence
import math
from typing import Any

from encdec_adapt.evaluation import report_numbers as numbers

# Nats per target token by which the prefixes of other examples must raise
# the loss before the encoder counts as used.
ENCODER_USED = 0.1
# Smaller differences between two losses are called none.
NO_DIFFERENCE = 0.01

# Run that keeps nothing of its source but the embeddings.
EMBEDDINGS_CONTROL = 'adapted_embeddings'

Report = Mapping[str, Any]


def findings(report: Report) -> list[str]:
  """Sentences for the report, from its numbers alone.

  Args:
    report: see `evaluation.html_report`. Absent runs are left out.

  Returns:
    Plain sentences, the main comparison first.
  """
  runs = report['runs']
  found = _broken(runs)
  found += _start(runs)
  found += _end(runs)
  found += _course(runs)
  found += _embeddings(runs)
  found += _decoders(runs)
  found += _unbalanced(runs)
  found += _encoder_use(runs)
  found += _learning_rates(runs)
  return found


def _finite(runs: numbers.Runs, model: str, key: str) -> list[float]:
  """Values of every seed of a model; none if one is not finite."""
  found = [runs[name][key] for name in numbers.seeds(runs, model)]
  return found if all(math.isfinite(value) for value in found) else []


def _both(
  runs: numbers.Runs, first: str, second: str, key: str
) -> tuple[list[float], list[float]] | None:
  """Values of two models, or None where one is absent or broken."""
  a, b = _finite(runs, first, key), _finite(runs, second, key)
  return (a, b) if a and b else None


def _lower(name: str, difference: float) -> str:
  """`name` is below or above by that much; negative differences are lower."""
  if abs(difference) < NO_DIFFERENCE:
    return f'no difference (less than {NO_DIFFERENCE} nats)'
  side = 'lower' if difference < 0 else 'higher'
  return f'{name} is {abs(difference):.3f} nats {side}'


def _overlap(a: Sequence[float], b: Sequence[float]) -> str:
  """Whether the seeds of two models separate, where there are several."""
  if len(a) == 1 and len(b) == 1:
    return ''
  apart = max(a) < min(b) or max(b) < min(a)
  if apart:
    return ' The seeds do not overlap.'
  return ' The seeds overlap, so this is within their variation.'


def _broken(runs: numbers.Runs) -> list[str]:
  return [
    f'{name} ended with a loss that is not finite; it is left out of the'
    ' comparisons below.'
    for name, run in runs.items()
    if not math.isfinite(run['eval_loss'])
  ]


def _start(runs: numbers.Runs) -> list[str]:
  pair = _both(runs, 'adapted', 'scratch', 'eval_loss_at_step_0')
  if pair is None:
    return []
  adapted, scratch = pair
  difference = numbers.mean(adapted) - numbers.mean(scratch)
  verdict = (
    'Adapted starts below scratch'
    if difference <= -NO_DIFFERENCE
    else 'Adapted does not start below scratch'
  )
  return [
    f'{verdict}: before the first step its held-out loss, in nats per target'
    f' token, is {numbers.values(adapted)} and that of scratch'
    f' {numbers.values(scratch)}; {_lower("adapted", difference)}.'
  ]


def _end(runs: numbers.Runs) -> list[str]:
  pair = _both(runs, 'adapted', 'scratch', 'eval_loss')
  if pair is None:
    return []
  adapted, scratch = pair
  difference = numbers.mean(adapted) - numbers.mean(scratch)
  verdict = (
    'Adapted ends below scratch'
    if difference <= -NO_DIFFERENCE
    else 'Adapted does not end below scratch'
  )
  runs_of_both = runs['adapted'], runs['scratch']
  tokens = [numbers.count(r['inclusive']['total_tokens']) for r in runs_of_both]
  flops = [numbers.scientific(r['inclusive']['flops']) for r in runs_of_both]
  return [
    f'{verdict}: after {runs["adapted"]["steps"]} steps on'
    f' {numbers.count(runs["adapted"]["target_tokens"])} target tokens it is'
    f' at {numbers.values(adapted)}, scratch at {numbers.values(scratch)};'
    f' {_lower("adapted", difference)}.{_overlap(adapted, scratch)}',
    'This compares equal training after initialisation. With what their'
    f' sources and teachers cost, adapted took {tokens[0]} tokens and'
    f' {flops[0]} FLOPs, scratch {tokens[1]} and {flops[1]}.',
  ]


def _course(runs: numbers.Runs) -> list[str]:
  """Whether adapted stays below, and when it passes scratch's last loss."""
  if _both(runs, 'adapted', 'scratch', 'eval_loss') is None:
    return []
  adapted, scratch = (runs[name]['curve'] for name in ('adapted', 'scratch'))
  a = dict(zip(adapted['step'], adapted['eval_loss'], strict=True))
  b = dict(zip(scratch['step'], scratch['eval_loss'], strict=True))
  common = sorted(a.keys() & b.keys())
  if not common:
    return []
  above = [step for step in common if not a[step] < b[step]]
  if above:
    text = (
      f'Adapted is not below scratch at {len(above)} of the {len(common)}'
      f' evaluations during training (first at step {above[0]}).'
    )
  else:
    text = (
      f'Adapted is below scratch at each of the {len(common)} evaluations'
      ' during training.'
    )
  last = b[common[-1]]
  reached = [step for step in sorted(a) if a[step] <= last]
  if reached and reached[0] < common[-1]:
    text += (
      f" It has reached scratch's last loss by step {reached[0]} of"
      f' {common[-1]}.'
    )
  elif not reached:
    text += " It never reaches scratch's last loss."
  return [text]


def _embeddings(runs: numbers.Runs) -> list[str]:
  pair = _both(runs, 'adapted', EMBEDDINGS_CONTROL, 'eval_loss')
  if pair is None:
    return []
  adapted, fresh = pair
  difference = numbers.mean(adapted) - numbers.mean(fresh)
  verdict = (
    'the gain is not of the embeddings alone'
    if difference <= -NO_DIFFERENCE
    else 'copying more than the embeddings has not helped'
  )
  return [
    'Control, every weight fresh except the embeddings:'
    f' {numbers.values(fresh)} against {numbers.values(adapted)} of adapted;'
    f' {_lower("adapted", difference)}, so {verdict}.'
    f'{_overlap(adapted, fresh)}'
  ]


def _decoders(runs: numbers.Runs) -> list[str]:
  described = {
    'decoder_only': 'The decoder it was made from, not trained further',
    'decoder_only_continued': 'The same decoder, continued for the'
    " adaptation's tokens",
  }
  found = []
  for name, text in described.items():
    pair = _both(runs, 'adapted', name, 'eval_loss')
    if pair is None:
      continue
    adapted, decoder = pair
    difference = numbers.mean(adapted) - numbers.mean(decoder)
    verdict = 'better' if difference <= -NO_DIFFERENCE else 'not better'
    found.append(
      f'{text} ({name}), has {numbers.values(decoder)} on the same target'
      f' tokens and adapted {numbers.values(adapted)}: adapted is {verdict};'
      f' {_lower("adapted", difference)}.'
    )
  return found


def _unbalanced(runs: numbers.Runs) -> list[str]:
  if not _finite(runs, 'unbalanced', 'eval_loss'):
    return []
  run = runs['unbalanced']
  end = _finite(runs, 'unbalanced', 'eval_loss')
  text = (
    f'The unbalanced pair ({numbers.count(run["parameters"])} parameters)'
    f' goes from {numbers.loss(run["eval_loss_at_step_0"])} at step 0 to'
    f' {numbers.values(end)}'
  )
  for other in ('adapted', 'scratch'):
    pair = _both(runs, 'unbalanced', other, 'eval_loss')
    if pair:
      difference = numbers.mean(pair[0]) - numbers.mean(pair[1])
      text += f'; against {other}, {_lower("unbalanced", difference)}'
  return [text + '.']


def _encoder_use(runs: numbers.Runs) -> list[str]:
  found = []
  for model in numbers.models(runs):
    names = numbers.seeds(runs, model)
    right = _finite(runs, model, 'eval_loss')
    wrong = [runs[name]['eval_loss_shuffled_prefix'] for name in names]
    if not right or None in wrong:
      continue
    rise = round(numbers.mean(wrong) - numbers.mean(right), 3)
    moved = (
      f'the prefixes of other examples move its loss from'
      f' {numbers.values(right)} to {numbers.values(wrong)}, by {rise:+.3f}'
    )
    if not numbers.has_encoder(runs[names[0]]):
      found.append(f'{model}, what a prefix is worth to a decoder: {moved}.')
      continue
    verdict = (
      'the encoder is used'
      if rise > ENCODER_USED
      else 'the encoder does not count as used'
    )
    found.append(
      f'{model}, {verdict}: {moved} (used means more than {ENCODER_USED}'
      ' worse).'
    )
  return found


def learning_rates(runs: numbers.Runs) -> dict[str, dict[float, float]]:
  """Loss by learning rate of every model that was swept."""
  table: dict[str, dict[float, float]] = {}
  for name, run in runs.items():
    if numbers.is_sweep(name):
      rates = table.setdefault(numbers.model_of(name), {})
      rates[run['learning_rate']] = run['eval_loss']
  return {model: dict(sorted(rates.items())) for model, rates in table.items()}


def _learning_rates(runs: numbers.Runs) -> list[str]:
  found = []
  for model, rates in learning_rates(runs).items():
    finite = {rate: x for rate, x in rates.items() if math.isfinite(x)}
    if not finite:
      found.append(f'No learning rate of {model} gave a finite loss.')
      continue
    best = min(finite, key=finite.get)
    text = (
      f'Learning rate of {model}: the best of'
      f' {", ".join(f"{rate:g}" for rate in rates)} on the same held-out text'
      f' is {best:g}'
    )
    if len(rates) > 1 and best in (min(rates), max(rates)):
      text += ', at the edge of what was tried'
    used = runs[model]['learning_rate'] if model in runs else best
    if not math.isclose(used, best, rel_tol=1e-6):
      text += f'; the run shown used {used:g}'
    found.append(text + '.')
  return found
