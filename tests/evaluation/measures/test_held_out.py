"""F1 on literal counts."""

import numpy as np
import pytest

from encdec_adapt.evaluation.measures import held_out


def test_f1_of_counts():
  # Right label by row, given label by column.
  table = np.array([[4, 1, 0], [2, 3, 0], [0, 0, 0]])
  macro, micro = held_out.f1(table)
  # 2 * 4 / (5 + 6), and 2 * 3 / (5 + 4); the third label does not occur.
  assert macro == pytest.approx((8 / 11 + 6 / 9) / 2)
  assert micro == pytest.approx(6 / 9)
  assert held_out.f1(np.diag([3, 0, 0])) == (1.0, 0.0)
