"""Metrics of the completions of a batch."""

import numpy as np
import pytest

from encdec_adapt.objectives import framing
from encdec_adapt.training import policy_batches, rollouts

PAIR = framing.Pair(np.zeros(0, np.int32), np.zeros(0, np.int32))


def _group(*tokens):
  return policy_batches.Completions(
    'a', {}, [''] * len(tokens), PAIR, [np.array(x, np.int32) for x in tokens]
  )


def test_metrics_are_of_the_prompts_that_exist():
  samples = rollouts.Samples(
    tokens=np.zeros((4, 2, 4), np.int32),
    counts=np.array([[2, 2], [4, 4], [2, 1], [1, 1]]),
    log_probs=np.zeros((4, 2, 4), np.float32),
    ended=np.array([[True, True], [False, False], [True, False], [True, True]]),
  )
  batch = policy_batches._Batch(
    rows=[4, -1, 2, 3],
    exists=[0, 2, 3],
    groups=[_group([5, 1], [5, 1]), _group([6, 1], [8]), _group([1], [1])],
    samples=samples,
    values={'f': np.array([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])},
    counts={'timeouts': 1},
    rewards=np.array([[2.0, 2.0], [7.0, 0.0], [0.0, 2.0], [0.0, 0.0]]),
  )
  assert batch.metrics() == pytest.approx(
    {
      'reward': 1,
      'reward/f': 0.5,
      'sampled_tokens': 9,
      'length': 1.5,
      'cut_short': 1 / 6,
      'without_spread': 2 / 3,
      'distinct': 4 / 6,
      'timeouts': 1,
    }
  )
