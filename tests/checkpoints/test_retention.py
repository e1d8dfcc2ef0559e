"""How many checkpoints there are at a time.

Which are deleted, and when, is in test_manager.
"""

import dataclasses

import pytest

from encdec_adapt.checkpoints import checkpoint_section

NEWEST = checkpoint_section.CheckpointConfig(keep=2, keep_every=3)
AND_BEST = dataclasses.replace(NEWEST, keep_best=True)


@pytest.mark.parametrize(
  'config, present, saves, most',
  [
    (NEWEST, [], [], 0),
    (NEWEST, [], [1], 1),
    (NEWEST, [], range(1, 6), 3),
    # 3 for ever; 4, 5, and 6 that is being written.
    (NEWEST, [], range(1, 7), 4),
    (NEWEST, [], range(3, 31, 3), 10),
    (NEWEST, [1, 2], range(1, 4), 3),
    (NEWEST, [3, 4], range(1, 9), 4),
    (NEWEST, [3, 6, 7, 8], range(1, 9), 4),
    (NEWEST, [3, 6, 7, 8], range(1, 11), 5),
    (NEWEST, [1, 2, 4], [5], 4),  # Killed before 1 was deleted.
    # The best adds to the newest.
    (AND_BEST, [], range(1, 4), 3),
    (AND_BEST, [], range(1, 5), 4),
    (AND_BEST, [], range(1, 10), 6),
  ],
)
def test_permanent_steps_and_the_step_being_written_count(
  config, present, saves, most
):
  assert config.peak_count(present, saves) == most
