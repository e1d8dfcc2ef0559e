"""Metrics of generated texts against references: ROUGE, BLEU, chrF, EM, F1.

ROUGE is rouge-score's, BLEU and chrF sacreBLEU's (the extra `eval`), in its
scale of 0 to 100; the others are from 0 to 1. Exact match and F1 are SQuAD's
(Rajpurkar et al. 2016, evaluate-v1.1.py): without case, punctuation, articles
and repeated spaces; the best over the references. Of the other rooms of
`evaluation`, only `results` is imported.
"""

import collections
from collections.abc import Sequence
import dataclasses
import itertools
import re
import string

from encdec_adapt.base import packages
from encdec_adapt.evaluation.results import results_store

_ARTICLES = re.compile(r'\b(a|an|the)\b')
_PUNCTUATION = str.maketrans('', '', string.punctuation)
_ROUGE = ('rouge1', 'rouge2', 'rougeL')


def require_packages() -> None:
  """Raises a `UserError` if the extra `eval` is not installed."""
  packages.require('a metric of texts', 'eval', 'rouge_score', 'sacrebleu')


def score(
  task: str, predictions: Sequence[str], references: Sequence[Sequence[str]]
) -> list[results_store.Score]:
  """Scores predictions by all metrics, BLEU and chrF from 0 to 100.

  Args:
    task: name of the task.
    predictions: a text per example, not empty.
    references: texts per example, at least one.
  """
  from rouge_score import rouge_scorer
  import sacrebleu

  scorer = rouge_scorer.RougeScorer(_ROUGE, use_stemmer=True)
  chrf = sacrebleu.CHRF()
  # Without it, the score of a sentence of fewer than four words is 0.
  bleu = sacrebleu.BLEU(effective_order=True)
  values: dict[str, list[float]] = collections.defaultdict(list)
  for text, texts in zip(predictions, references, strict=True):
    best = scorer.score_multi(texts, text)
    for name in _ROUGE:
      values[name].append(best[name].fmeasure)
    is_exact = _normal(text) in map(_normal, texts)
    values['exact_match'].append(float(is_exact))
    values['f1'].append(max(_f1(text, x) for x in texts))
    # Scores of sentences are for paired tests; the value is the corpus's.
    values['bleu'].append(bleu.sentence_score(text, list(texts)).score)
    values['chrf'].append(chrf.sentence_score(text, list(texts)).score)
  scores = {
    name: results_store.mean_score(task, name, column)
    for name, column in values.items()
  }
  # The first references of all examples, the second, ..; None where an example
  # has fewer, which sacreBLEU leaves out.
  columns = list(itertools.zip_longest(*references))
  # The published numbers are those of corpora, which are not means of sentences
  # and so have no standard error.
  for name, metric in (('bleu', sacrebleu.BLEU()), ('chrf', chrf)):
    value = metric.corpus_score(predictions, columns).score
    scores[name] = dataclasses.replace(scores[name], value=value, stderr=None)
  return list(scores.values())


def _normal(text: str) -> list[str]:
  """Returns the words that SQuAD's metrics compare."""
  plain = text.lower().translate(_PUNCTUATION)
  return _ARTICLES.sub(' ', plain).split()


def _f1(text: str, reference: str) -> float:
  """Returns the F1 of the words; two texts without words have 1."""
  words, expected = _normal(text), _normal(reference)
  if not words or not expected:
    return float(words == expected)
  common = collections.Counter(words) & collections.Counter(expected)
  return 2 * common.total() / (len(words) + len(expected))
