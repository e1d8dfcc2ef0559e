"""The job stops after updates in a row that are not finite, and says why."""

import json

import numpy as np
import pytest

from encdec_adapt.cli import errors
from encdec_adapt.training import guards


def _rows(step):
  """Row numbers as a batch holds them."""
  return np.array([10 * step, 10 * step + 1], np.int32)


def _entry(step):
  return {'step': step, 'rows': [10 * step, 10 * step + 1]}


def test_stops_after_so_many_in_a_row_and_names_their_rows(tmp_path):
  guard = guards.NonFiniteGuard(str(tmp_path), 3)
  path = tmp_path / 'nonfinite-0.json'
  guard.check(1, 0, _rows(1))
  guard.check(2, 1, _rows(2))
  guard.check(3, 2, _rows(3))
  assert not path.exists()
  with pytest.raises(errors.UserError, match='last 3 updates.*step 4') as error:
    guard.check(4, 3, _rows(4))
  assert 'train.max_skipped' in str(error.value)
  assert str(path) in str(error.value)
  assert json.loads(path.read_text()) == [_entry(2), _entry(3), _entry(4)]


def test_a_good_step_starts_the_count_anew(tmp_path):
  guard = guards.NonFiniteGuard(str(tmp_path), 2)
  for step, in_a_row in enumerate([1, 0, 1, 0, 0, 1], start=1):
    guard.check(step, in_a_row, _rows(step))
  assert not list(tmp_path.iterdir())
  with pytest.raises(errors.UserError, match='last 2 updates'):
    guard.check(7, 2, _rows(7))
  found = json.loads((tmp_path / 'nonfinite-0.json').read_text())
  assert found == [_entry(6), _entry(7)]


def test_the_first_one_stops_a_job_that_allows_none(tmp_path):
  guard = guards.NonFiniteGuard(str(tmp_path), 1)
  with pytest.raises(errors.UserError, match='not finite'):
    guard.check(1, 1, _rows(1))
