"""The job stops after non-finite updates in a row and names their rows."""

import json

import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.training import guards


@pytest.mark.parametrize(
  'limit, in_a_row, named', [(3, [0, 1, 2, 3], 3), (2, [1, 0, 1, 0, 1, 2], 2)]
)
def test_stops_after_so_many_in_a_row(tmp_path, limit, in_a_row, named):
  guard = guards.NonFiniteGuard(str(tmp_path), limit)
  last = len(in_a_row)
  for step, count in enumerate(in_a_row[:-1], start=1):
    guard.check(step, count, np.array([10 * step]))
  assert not list(tmp_path.iterdir())
  with pytest.raises(errors.UserError, match='train.max_skipped'):
    guard.check(last, in_a_row[-1], np.array([10 * last]))
  found = json.loads((tmp_path / 'nonfinite-0.json').read_text())
  steps = range(last - named + 1, last + 1)
  assert found == [{'step': s, 'rows': [10 * s]} for s in steps]
