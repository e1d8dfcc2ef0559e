"""Metrics of texts on literal ones."""

import pytest

from encdec_adapt.evaluation.measures import text_metrics

pytest.importorskip('sacrebleu', reason="needs pip install -e '.[eval]'")
PREDICTIONS = ['The cat sat on the mat.', 'two dogs', '', 'A red house']
REFERENCES = [
  ['the cat sat on the mat'],
  ['three dogs ran', 'two dogs!'],
  ['nothing'],
  ['the blue house stands'],
]


def _scores(predictions, references):
  scores = text_metrics.score('x', predictions, references)
  return {score.metric: score for score in scores}


def test_literal_scores():
  found = _scores(PREDICTIONS, REFERENCES)
  assert found['exact_match'].scores == (1, 1, 0, 0)
  # 'red house' and 'blue house stands' share one word of 2 and 3.
  assert found['f1'].scores == pytest.approx((1, 1, 0, 0.4))
  assert found['f1'].value == pytest.approx(0.6)
  assert found['f1'].stderr == pytest.approx(0.2449, abs=1e-4)
  # 'a red house' against 'the blue house stands': 2 * (1/3 * 1/4) / (7/12).
  assert found['rouge1'].scores == pytest.approx((1, 1, 0, 2 / 7))
  assert found['rougeL'].n == 4
  assert 1 < found['bleu'].value < 100 and 1 < found['chrf'].value < 100
  assert found['bleu'].stderr is None


def test_corpus_scores_are_those_of_sacrebleu():
  import sacrebleu

  texts = ['the cat is on a mat today', 'a dog barks at the red car']
  references = [['the cat is on the mat today'], ['the dog barks at a red car']]
  found = _scores(texts, references)
  want = sacrebleu.corpus_bleu(texts, [[one for (one,) in references]])
  assert found['bleu'].value == pytest.approx(want.score)
  assert 10 < found['bleu'].value < 90
