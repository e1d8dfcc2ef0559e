"""Differences of arms by seed and group, and the rows that a report takes."""

import dataclasses

import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.data.sources import document_source
from encdec_adapt.evaluation.results import contrasts, results_store

GROUPS = 'a', 'b', 'a', 'c'
WEIGHTS = np.array([1.0, 2.0, 3.0, 2.0])


def _loss(*numerators, groups=GROUPS, weights=WEIGHTS):
  return results_store.ratio_score(
    't', 'loss', np.array(numerators), np.asarray(weights), groups
  )


def test_sums_by_seed_and_group():
  arm = [_loss(1.0, 5.0, 6.0, 4.0), _loss(2.0, 5.0, 6.0, 8.0)]
  sums, weights = contrasts.sums([arm])
  np.testing.assert_allclose(sums, [[7, 5, 4], [8, 5, 8]])
  np.testing.assert_allclose(weights, [4, 2, 2])
  assert contrasts.interval([arm]).effect == pytest.approx((16 + 21) / 16)


def test_contrasts_of_two_and_four_arms():
  a, b, c, d = (
    [_loss(*np.full(4, x)), _loss(*np.full(4, x + 1.0))] for x in (0, 3, 1, 2)
  )
  np.testing.assert_allclose(contrasts.sums([a, b])[0], [[6, 3, 3]] * 2)
  # (3 - 0) - (2 - 1) of every row.
  both, _ = contrasts.sums([a, b, c, d])
  np.testing.assert_allclose(both, [[4, 2, 2]] * 2, atol=1e-12)


def test_examples_without_groups_are_their_own():
  arm = [results_store.mean_score('t', 'acc', [0, 1, 1])]
  sums, weights = contrasts.sums([arm])
  np.testing.assert_allclose(sums, [[0, 1, 1]], atol=1e-12)
  assert weights.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
  'second, words',
  [
    ([_loss(1, 2, 3, 4, groups=('a', 'b', 'a', 'd'))], 'other examples'),
    ([_loss(1, 2, 3, 4, weights=[1, 2, 3, 4])], 'other examples'),
    ([_loss(1, 2, 3, 4)] * 2, '1, 2 runs'),
    (
      [results_store.Score('t', 'loss', 1.0, None, 4)],
      'not a metric of single',
    ),
  ],
)
def test_refusals(second, words):
  with pytest.raises(errors.UserError, match=words):
    contrasts.sums([[_loss(1, 2, 3, 4)], second])


def test_a_report_takes_32_rows_of_the_other_groups():
  names = [f'module_{i}' for i in range(12)]
  part = [name for name in names if document_source.is_development(name)]
  (first, *_), development = [x for x in names if x not in part], part[0]
  groups = [development, *[first] * 64, 'json::x']
  numerators = np.arange(66, dtype=np.float64)
  score = _loss(*numerators, groups=groups, weights=np.full(66, 2.0))
  reported = contrasts.reported(score)
  assert reported.groups == ('json::x', first)
  assert reported.weights == (2.0, 64.0)
  # Every other row of the 64, and the last.
  want = [*range(1, 65, 2), 65]
  assert reported.value == pytest.approx(sum(want) / (2 * 33))
  sums, _ = contrasts.sums([[reported]])
  assert sums[0] == pytest.approx([65, sum(want[:-1])])
  again = contrasts.reported(reported)
  assert again.weights == reported.weights
  assert again.scores == pytest.approx(reported.scores)
  with pytest.raises(errors.UserError, match='all in the development part'):
    contrasts.reported(dataclasses.replace(score, groups=(development,) * 66))
  plain = results_store.mean_score('t', 'acc', [0, 1])
  assert contrasts.reported(plain) is plain


def test_a_third_of_the_groups_is_for_development():
  names = [f'module_{i}.py' for i in range(3000)]
  part = sum(map(document_source.is_development, names))
  assert abs(part - 1000) < 80  # Three standard deviations.
