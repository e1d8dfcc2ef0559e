"""Intervals and paired tests against published and hand-made examples."""

import numpy as np
import pytest
from scipy import stats

from encdec_adapt.evaluation.results import comparisons, results_store


def _score(*scores):
  n = len(scores)
  error = float(np.std(scores, ddof=1)) / n**0.5
  return results_store.Score('t', 'm', float(np.mean(scores)), error, n, scores)


def test_interval_of_a_share_is_wilsons():
  score = _score(*[1.0] * 15, *[0.0] * 5)
  want = stats.binomtest(15, 20).proportion_ci(method='wilson')
  assert comparisons.interval(score) == pytest.approx((want.low, want.high))
  # All right is no certainty.
  low, high = comparisons.interval(_score(*[1.0] * 10))
  assert 0.7 < low < 0.75 and high == pytest.approx(1.0)


def test_interval_of_a_mean_is_students():
  score = _score(1.0, 2.0, 3.0)
  # t of 2 degrees of freedom is 4.3027, the standard error 1 / sqrt(3).
  want = 2 - 2.4841, 2 + 2.4841
  assert comparisons.interval(score) == pytest.approx(want, abs=1e-4)
  unknown = results_store.Score('t', 'bleu', 12.0, None, 3)
  assert comparisons.interval(unknown) is None
  # In the scale of 0 to 100, 0 everywhere is not a share of examples.
  nothing = results_store.Score('t', 'bleu', 0.0, None, 3, (0.0,) * 3)
  assert comparisons.interval(nothing) is None
  assert comparisons.compare([nothing], [nothing]).test == 'paired t'


def test_mcnemar():
  # 2 are right for the first alone, 8 for the second alone.
  first = [1.0] * 10 + [0.0] * 10
  second = [1.0] * 8 + [0.0] * 2 + [1.0] * 8 + [0.0] * 2
  found = comparisons.compare([_score(*first)], [_score(*second)])
  assert found.difference == pytest.approx(0.3)
  # Of 10 changed examples 8 are better: 2 * (1 + 10 + 45) / 1024.
  assert found.p == pytest.approx(112 / 1024)
  assert (found.units, found.test) == ('20 examples', 'McNemar, exact')
  # 6 / 22 -+ 1.96 sqrt(11 - 36 / 22) / 22
  want = 6 / 22 - 0.27265, 6 / 22 + 0.27265
  assert (found.low, found.high) == pytest.approx(want, abs=1e-4)
  swapped = comparisons.compare([_score(*second)], [_score(*first)])
  assert (swapped.low, swapped.high) == pytest.approx((-found.high, -found.low))
  # Equal answers leave an interval.
  equal = comparisons.compare([_score(*first)], [_score(*first)])
  assert equal.p == 1.0 and equal.low < 0 < equal.high


def test_paired_t():
  first = _score(2.0, 3.5, 1.0, 4.0, 2.5)
  second = _score(2.5, 3.75, 2.0, 4.0, 3.5)
  found = comparisons.compare([first], [second])
  want = stats.ttest_rel(second.scores, first.scores)
  bounds = want.confidence_interval(0.95)
  assert found.difference == pytest.approx(0.55)
  assert found.p == pytest.approx(want.pvalue)
  assert (found.low, found.high) == pytest.approx((bounds.low, bounds.high))


@pytest.mark.parametrize('seed', [0, 1, 2])
def test_corpus_scores_are_compared_as_by_sacrebleu(seed):
  sacrebleu = pytest.importorskip('sacrebleu')
  from sacrebleu import significance

  from encdec_adapt.evaluation.measures import text_metrics

  rng = np.random.default_rng(seed)
  words = np.array('the a dog cat red sees house runs to old'.split())
  texts = [list(rng.choice(words, 8)) for _ in range(40)]

  def changed(share):
    drawn = [
      [rng.choice(words) if rng.random() < share else w for w in x]
      for x in texts
    ]
    return [' '.join(x) for x in drawn]

  references = [' '.join(x) for x in texts]
  systems = [changed(0.5), changed(0.4)]
  want = significance.PairedTest(
    [('first', systems[0]), ('second', systems[1])],
    {'bleu': sacrebleu.BLEU(), 'chrf': sacrebleu.CHRF()},
    [references],
    test_type='bs',
  )()[1]
  scores = [
    text_metrics.score('t', x, [[y] for y in references], ('13a', 'english'))[0]
    for x in systems
  ]
  for metric, name in (('bleu', 'BLEU'), ('chrf', 'chrF2')):
    first, second = (
      next(x for x in system if x.metric == metric) for system in scores
    )
    found = comparisons.compare([first], [second])
    old, new = want[name]
    assert (first.value, second.value) == pytest.approx((old.score, new.score))
    assert found.difference == pytest.approx(new.score - old.score)
    assert found.p == pytest.approx(new.p_value, abs=1e-12)
    assert found.low < found.difference < found.high
    assert found.test == 'bootstrap, 1,000 resamples'
    same = comparisons.compare([first], [first])
    assert (same.difference, same.p) == (0.0, 1.0)
    # Several runs are compared by linearisations, of the same corpus scores.
    runs = comparisons.compare([first, second], [second, first])
    assert runs.difference == pytest.approx(0, abs=1e-9)
    single = comparisons.contrasts.interval([[first], [second]])
    assert single.effect == pytest.approx(found.difference)
    assert single.high - single.low == pytest.approx(
      found.high - found.low, rel=0.3
    )


def test_no_comparison_without_the_same_examples():
  whole = results_store.Score('t', 'bleu', 12.0, None, 3)
  assert comparisons.compare([whole], [whole]) is None
  assert (
    comparisons.compare([_score(1.0, 2.0)], [_score(1.0, 2.0, 3.0)]) is None
  )


# T5Gemma (2504.06225), table 2: pretrained and instruction-tuned averages.
TABLE_2 = {
  '2B-2B': [(47.9, 39.0), (49.7, 46.4), (50.1, 42.4)],
  '9B-2B': [(55.0, 49.3), (52.9, 45.7)],
  '9B-9B': [(61.7, 59.6), (63.1, 62.9), (63.9, 61.5)],
  'S-S': [(23.4, 6.2), (22.8, 9.8), (23.1, 10.7)],
  'B-B': [(26.7, 9.8), (26.9, 12.9), (26.0, 11.1)],
  'L-L': [(32.3, 12.9), (31.6, 17.5), (30.9, 18.9)],
  'XL-XL': [(39.7, 23.5), (39.5, 30.7), (38.5, 29.2)],
}


def test_correlation_of_pretraining_with_instruction_tuning():
  points = [
    (size, f'{size} {i}', *pair)
    for size, pairs in TABLE_2.items()
    for i, pair in enumerate(pairs)
  ]
  pooled, within = comparisons.correlations(points)
  # The paper states 0.97 over all points, and 0.42 within a size, of more
  # models than the table has.
  assert pooled.value == pytest.approx(0.97, abs=0.005)
  assert (pooled.arms, pooled.is_descriptive) == (20, False)
  assert within.value < 0.5
  # Six sizes have three models, and none has six.
  assert (within.arms, within.is_descriptive) == (18, True)
  assert comparisons.correlations(points[:2])[1] is None
  assert comparisons.correlations(points[:8])[0].is_descriptive


def test_the_unit_of_a_correlation_is_the_arm():
  # By run 1 and 3 are in order; by arm all six are reversed.
  points = [
    ('S', f'arm {i}', i, -i + sign) for i in range(6) for sign in (-9, 9)
  ]
  pooled, within = comparisons.correlations(points)
  assert (pooled.value, pooled.arms) == (pytest.approx(-1), 6)
  assert (within.value, within.is_descriptive) == (pytest.approx(-1), False)


def _ratio(numerators, groups=('a', 'b', 'b', 'c')):
  weights = np.array([1.0, 2.0, 1.0, 4.0])
  return results_store.ratio_score(
    'held_out', 'loss', np.array(numerators), weights, groups
  )


def test_examples_of_a_group_are_no_evidence_of_their_own():
  first, second = _ratio([3.0, 6.0, 3.0, 12.0]), _ratio([4.0, 8.0, 4.0, 12.0])
  found = comparisons.compare([first], [second])
  # Groups have the differences 1, 3 and 0 and the weights 1, 3 and 4, thus
  # the cells (1 - .5) / (8 / 3), (3 - 1.5) / (8 / 3) and -2 / (8 / 3).
  cells = np.array([0.5, 1.5, -2.0]) * 3 / 8
  half = stats.t.ppf(0.975, 2) * cells.std(ddof=1) / 3**0.5
  assert found.difference == pytest.approx(0.5)
  assert (found.low, found.high) == pytest.approx((0.5 - half, 0.5 + half))
  assert (found.units, found.test) == ('3 groups', 'paired t')
  low, high = comparisons.interval(second)
  assert low < second.value < high
  # One group says nothing of others.
  single = _ratio([3.0, 6.0, 3.0, 12.0], groups=('a',) * 4)
  assert comparisons.interval(single) is None
  assert comparisons.compare([single], [single]) is None
  assert comparisons.compare([single], [first]) is None


def test_proportions_of_groups_are_between_0_and_1():
  score = results_store.mean_score('t', 'accuracy', [1, 1, 1, 0], 'aabc')
  low, high = comparisons.interval(score)
  assert 0 <= low < 0.75 < high == 1


def test_several_runs_of_an_arm():
  rng = np.random.default_rng(0)
  arms = [[_ratio(rng.normal(3, 1, 4)) for _ in range(3)] for _ in range(2)]
  found = comparisons.compare(*arms)
  assert (found.units, found.test) == ('3 runs and 3 groups', 'crossed t')
  assert found.low < found.difference < found.high
  # Answers of tasks have no groups.
  arms = [[_score(*rng.integers(0, 2, 9)) for _ in range(2)] for _ in range(2)]
  assert comparisons.compare(*arms).units == '2 runs and 9 examples'
