"""The key of a draw is all that it depends on."""

import numpy as np
import pytest

from encdec_adapt.objectives import randomness

KEY = (0, 0, 'python', 'topic/for#0')


def _generator(seed, pass_index, source, example_id):
  return randomness.Keyed(seed, pass_index, source)(example_id)


def _draw(key):
  return _generator(*key).integers(0, 2**63, 4).tolist()


@pytest.mark.parametrize(
  'other',
  [
    (1, 0, 'python', 'topic/for#0'),
    (0, 1, 'python', 'topic/for#0'),
    (0, 0, 'text:x', 'topic/for#0'),
    (0, 0, 'python', 'topic/for#1'),
    (0, 0, 'pythont', 'opic/for#0'),
  ],
)
def test_another_key_draws_anew(other):
  assert _draw(KEY) == _draw(KEY) != _draw(other)


def test_draws_are_those_of_every_machine_and_run():
  assert randomness.digest('a', 1) == 0x90FD11F9FE6E6A2AAAB309C063BBAE51
  np.testing.assert_array_equal(
    _generator(*KEY).integers(0, 100, 5), [16, 9, 41, 96, 18]
  )


def test_a_generator_draws_the_same_after_other_keys():
  keyed = randomness.Keyed(3, 1, 'a source')
  for name in ('x#0', 'y#1', 'x#0'):
    single = _generator(3, 1, 'a source', name)
    shared = keyed(name)
    # Also 32-bit draws, which leave half a number behind.
    draws = [x.integers(9, dtype='int32') for x in (shared, single)]
    assert draws[0] == draws[1]
    assert (shared.permutation(50) == single.permutation(50)).all()
    assert shared.random() == single.random()
