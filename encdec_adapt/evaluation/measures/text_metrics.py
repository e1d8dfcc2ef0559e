"""Metrics of generated texts against references: ROUGE, BLEU, chrF, EM, F1.

ROUGE comes from rouge-score, BLEU and chrF from sacreBLEU (the extra `eval`)
on its scale of 0 to 100; the others range from 0 to 1. Exact match and F1 are
SQuAD's (Rajpurkar et al. 2016, evaluate-v1.1.py): without case, punctuation,
articles and repeated spaces; the best over the references. ROUGE-Lsum compares
lines (Lin 2004, union of longest common subsequences); with a line each, it is
ROUGE-L. BLEU and chrF are scores of a corpus: their per-example values are a
linearisation (leave-one-out), and their statistics are stored, for
`comparisons`.

`choose` selects the tokenizers of BLEU and ROUGE by the most frequent script of
the references. Tokenizers other than `13a` and `english` are part of the
metric's name, as in `bleu/zh`:

| of    | tokenizer  | references                                           |
|-------|------------|------------------------------------------------------|
| BLEU  | `13a`      | words with spaces, as in most scripts                |
|       | `zh`       | Han characters                                       |
|       | `ja-mecab` | kana; `char` unless `sacrebleu[ja]` is installed     |
|       | `char`     | Thai, Lao, Khmer, Burmese, Tibetan                   |
| ROUGE | `english`  | at most 1 % of the words are not ASCII: rouge-score's |
|       |            | words, by Porter's stemmer                           |
|       | `unicode`  | all others: words of letters, marks and digits, and  |
|       |            | single characters of scripts without spaces          |

From `evaluation`, this module imports only `results`.
"""

import collections
from collections.abc import Sequence
import contextlib
import itertools
import re
import string
import types

import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.evaluation.results import results_store

_ARTICLES = re.compile(r'\b(a|an|the)\b')
_PUNCTUATION = str.maketrans('', '', string.punctuation)
_ROUGE = ('rouge1', 'rouge2', 'rougeL', 'rougeLsum')
_ROUGE_TOKENIZERS = ('english', 'unicode')
# Scripts without spaces between words -> BLEU's tokenizer.
_UNSPACED = {
  r'\p{Han}': 'zh',
  r'\p{Hiragana}\p{Katakana}': 'ja-mecab',
  r'\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}': 'char',
}
_LETTER, _SCRIPTS = r'[\p{L}\p{M}\p{N}]', ''.join(_UNSPACED)
_WORD = rf'(?V1)[[{_SCRIPTS}]&&{_LETTER}]\p{{M}}*|[{_LETTER}--[{_SCRIPTS}]]+'
_KANA = 0.1  # Minimum kana per Han character in Japanese text.
_FOREIGN = 0.01  # Maximum share of non-ASCII words in English text.


def choose(
  references: Sequence[Sequence[str]], names: str = ''
) -> tuple[str, str]:
  """Returns the tokenizers of BLEU and of ROUGE for references.

  Args:
    references: texts per example.
    names: BLEU,ROUGE; empty names are chosen by script.

  Raises:
    UserError: a tokenizer does not exist, or sacreBLEU cannot open it.
  """
  import regex  # A dependency of sacreBLEU.
  import sacrebleu

  text = '\n'.join(itertools.chain.from_iterable(references))
  words, (bleu, _, rouge) = _words(text), names.partition(',')
  if not bleu:
    counts = {
      name: len(regex.findall(f'[{scripts}]', text))
      for scripts, name in _UNSPACED.items()
    }
    counts = {'13a': len(words) - sum(counts.values()), **counts}
    if counts['ja-mecab'] > _KANA * counts['zh']:  # Japanese has both.
      counts['ja-mecab'] += counts.pop('zh')
    bleu = max(counts, key=counts.get)
    if bleu == 'ja-mecab' and not _has_mecab():
      bleu = 'char'
  foreign = sum(not word.isascii() for word in words)
  rouge = rouge or _ROUGE_TOKENIZERS[foreign > _FOREIGN * len(words)]
  try:
    sacrebleu.BLEU(tokenize=bleu)
    _ROUGE_TOKENIZERS.index(rouge)
  except Exception as error:  # Any error: some need packages or a download.
    raise errors.UserError(
      f'--tokenizers={names} must be BLEU,ROUGE, one of'
      f' {", ".join(sacrebleu.BLEU.TOKENIZERS)}, and one of'
      f' {" and ".join(_ROUGE_TOKENIZERS)} ({error}).'
    ) from error
  return bleu, rouge


def _has_mecab() -> bool:
  import sacrebleu

  with contextlib.suppress(Exception):  # MeCab raises any type.
    sacrebleu.BLEU(tokenize='ja-mecab')
    return True
  return False


def _words(text: str) -> list[str]:
  import regex

  return regex.findall(_WORD, text.lower())


def score(
  task: str,
  predictions: Sequence[str],
  references: Sequence[Sequence[str]],
  tokenizers: tuple[str, str],
) -> tuple[list[results_store.Score], list[dict[str, float]]]:
  """Scores predictions with all metrics, BLEU and chrF from 0 to 100.

  Args:
    task: name of the task.
    predictions: a text per example, not empty.
    references: texts per example, at least one.
    tokenizers: result of `choose`.

  Returns:
    The scores, and the values of each prediction by metric; BLEU and chrF of
    single sentences.
  """
  from rouge_score import rouge_scorer
  import sacrebleu

  bleu_name, rouge_name = (
    '' if name in ('13a', 'english') else f'/{name}' for name in tokenizers
  )
  suffixes = {'bleu': bleu_name, **dict.fromkeys(_ROUGE, rouge_name)}
  # Without a tokenizer, rouge-score's default.
  words = types.SimpleNamespace(tokenize=_words) if rouge_name else None
  scorer = rouge_scorer.RougeScorer(_ROUGE, use_stemmer=True, tokenizer=words)
  chrf = sacrebleu.CHRF()
  # Without it, sentences of fewer than four words score 0.
  bleu = sacrebleu.BLEU(tokenize=tokenizers[0], effective_order=True)
  values: dict[str, list[float]] = collections.defaultdict(list)
  for text, texts in zip(predictions, references, strict=True):
    best = scorer.score_multi(texts, text)
    for name in _ROUGE:
      values[name].append(best[name].fmeasure)
    is_exact = _normal(text) in map(_normal, texts)
    values['exact_match'].append(float(is_exact))
    values['f1'].append(max(_f1(text, x) for x in texts))
    values['bleu'].append(bleu.sentence_score(text, list(texts)).score)
    values['chrf'].append(chrf.sentence_score(text, list(texts)).score)
  values = {name + suffixes.get(name, ''): x for name, x in values.items()}
  scores = {
    name: results_store.mean_score(task, name, column)
    for name, column in values.items()
  }
  # The first references of all examples, the second, ..; None, ignored by
  # sacreBLEU, for examples with fewer.
  columns = list(itertools.zip_longest(*references))
  # Published numbers are corpus scores, not means over sentences.
  bleu = sacrebleu.BLEU(tokenize=tokenizers[0])
  for name, metric in ((f'bleu{bleu_name}', bleu), ('chrf', chrf)):
    scores[name] = _corpus_score(task, name, metric, predictions, columns)
  columns = zip(*values.values(), strict=True)
  rows = [dict(zip(values, x, strict=True)) for x in columns]
  return list(scores.values()), rows


def _corpus_score(task, name, metric, predictions, columns):
  statistics = metric._extract_corpus_statistics(predictions, columns)
  n, totals = len(statistics), np.sum(statistics, axis=0)
  score_of = lambda x: metric._compute_score_from_stats(x.tolist()).score  # noqa: E731
  value = score_of(totals)
  others = np.array([score_of(totals - x) for x in np.array(statistics)])
  scores = value + (n - 1) * (others.mean() - others)
  return results_store.Score(
    *(task, name, value, None, n, tuple(scores.tolist())),
    statistics=tuple(map(tuple, statistics)),
  )


def _normal(text: str) -> list[str]:
  """Returns the words compared by SQuAD's metrics."""
  plain = text.lower().translate(_PUNCTUATION)
  return _ARTICLES.sub(' ', plain).split()


def _f1(text: str, reference: str) -> float:
  """Returns the F1 of the words; 1 if neither text has words."""
  words, expected = _normal(text), _normal(reference)
  if not words or not expected:
    return float(words == expected)
  common = collections.Counter(words) & collections.Counter(expected)
  return 2 * common.total() / (len(words) + len(expected))
