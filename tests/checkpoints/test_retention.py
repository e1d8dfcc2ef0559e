"""How many checkpoints there are at a time.

What is deleted, and when, is in test_checkpoint.
"""

import pytest

from encdec_adapt.checkpoints import checkpoint_section


@pytest.mark.parametrize(
  'there, saves, most',
  [
    ([], [], 0),
    ([], [1], 1),
    ([], range(1, 6), 3),
    ([], range(1, 7), 4),  # 3 for ever; 4, 5, and 6 that is being written.
    ([], range(3, 31, 3), 10),
    ([1, 2], range(1, 4), 3),
    ([3, 4], range(1, 9), 4),
    ([3, 6, 7, 8], range(1, 9), 4),
    ([3, 6, 7, 8], range(1, 11), 5),
    ([1, 2, 4], [5], 4),  # Killed before 1 was deleted.
  ],
)
def test_what_is_kept_for_ever_and_what_is_being_written_count(
  there, saves, most
):
  kept = checkpoint_section.CheckpointConfig(keep=2, keep_every=3)
  assert kept.peak_count(there, saves) == most


@pytest.mark.parametrize(
  'there, saves, most',
  [([], range(1, 4), 3), ([], range(1, 5), 4), ([], range(1, 10), 6)],
)
def test_the_best_is_one_more_than_the_newest(there, saves, most):
  kept = checkpoint_section.CheckpointConfig(
    keep=2, keep_every=3, keep_best=True
  )
  assert kept.peak_count(there, saves) == most
