"""Metrics of generated texts against references: ROUGE, BLEU, chrF, EM, F1.

ROUGE is rouge-score's, BLEU and chrF sacreBLEU's (the extra `eval`). Exact
match and F1 are SQuAD's (Rajpurkar et al. 2016, evaluate-v1.1.py): without
case, punctuation, articles and repeated spaces; the best over the references.
"""

import collections
from collections.abc import Callable, Sequence
import dataclasses
import itertools
import re
import string

from encdec_adapt.base import errors
from encdec_adapt.evaluation.results import results_store

_ARTICLES = re.compile(r'\b(a|an|the)\b')
_PUNCTUATION = str.maketrans('', '', string.punctuation)
_ROUGE = ('rouge1', 'rouge2', 'rougeL')


def score(
  task: str,
  predictions: Sequence[str],
  references: Sequence[Sequence[str]],
) -> list[results_store.Score]:
  """Scores predictions by all metrics, from 0 to 1.

  Args:
    task: name of the task.
    predictions: one text per example, at least one.
    references: at least one text per example.

  Raises:
    UserError: the extra `eval` is not installed.
  """
  try:
    from rouge_score import rouge_scorer
    import sacrebleu
  except ImportError as error:
    raise errors.UserError(
      'metrics of texts need rouge-score and sacreBLEU: pip install'
      " 'encdec_adapt[eval]'"
    ) from error
  scorer = rouge_scorer.RougeScorer(_ROUGE, use_stemmer=True)
  chrf = sacrebleu.CHRF()
  bleu = sacrebleu.BLEU(effective_order=True)
  own: dict[str, list[float]] = collections.defaultdict(list)
  for text, some in zip(predictions, references, strict=True):
    best = scorer.score_multi(some, text)
    for name in _ROUGE:
      own[name].append(best[name].fmeasure)
    own['exact_match'].append(_best(_exact, text, some))
    own['f1'].append(_best(_f1, text, some))
    # Of sentences, for paired tests; the value is that of the corpus.
    own['bleu'].append(bleu.sentence_score(text, list(some)).score / 100)
    own['chrf'].append(chrf.sentence_score(text, list(some)).score / 100)
  whole = {'bleu': sacrebleu.BLEU(), 'chrf': chrf}
  # The first references of all examples, the second, ..
  columns = list(itertools.zip_longest(*references))
  corpus = {
    name: metric.corpus_score(predictions, columns)
    for name, metric in whole.items()
  }
  found = [results_store.mean_score(task, *item) for item in own.items()]
  return [
    dataclasses.replace(one, value=corpus[one.metric].score / 100, stderr=None)
    if one.metric in corpus
    else one
    for one in found
  ]


def _best(
  metric: Callable[[str, str], float], text: str, references: Sequence[str]
) -> float:
  return max(metric(text, reference) for reference in references)


def _normal(text: str) -> list[str]:
  """Returns the words that SQuAD's metrics compare."""
  plain = text.lower().translate(_PUNCTUATION)
  return _ARTICLES.sub(' ', plain).split()


def _exact(text: str, reference: str) -> float:
  return float(_normal(text) == _normal(reference))


def _f1(text: str, reference: str) -> float:
  """Returns the F1 of the words; texts without words are right together."""
  found, wanted = _normal(text), _normal(reference)
  if not found or not wanted:
    return float(found == wanted)
  common = collections.Counter(found) & collections.Counter(wanted)
  shared = sum(common.values())
  return 2 * shared / (len(found) + len(wanted))
