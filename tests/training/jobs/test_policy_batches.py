"""Completions of a batch: their metrics, and the rows that the loss reads."""

import dataclasses
import types

import numpy as np
import pytest

from encdec_adapt.objectives import framing
from encdec_adapt.tokenizers import special_ids
from encdec_adapt.training import rollouts
from encdec_adapt.training.jobs import completion_rewards, policy_batches
from tests import gemma_ids
from tests.training import test_policy

PAIR = framing.Pair(np.zeros(0, np.int32), np.zeros(0, np.int32))


def _group(*tokens):
  return completion_rewards.Completions(
    'a', {}, [''] * len(tokens), PAIR, [np.array(x, np.int32) for x in tokens]
  )


# Two completions of three prompts, of which one is cut short, and a filler.
BATCH = policy_batches._Batch(
  rows=[4, -1, 2, 3],
  exists=[0, 2, 3],
  groups=[_group([5, 1], [5, 1]), _group([6, 1], [8]), _group([1], [1])],
  samples=rollouts.Samples(
    tokens=np.zeros((4, 2, 4), np.int32),
    counts=np.array([[2, 2], [4, 4], [2, 1], [1, 1]]),
    log_probs=np.zeros((4, 2, 4), np.float32),
    ended=np.array([[True, True], [False, False], [True, False], [True, True]]),
  ),
  values={'f': np.array([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])},
  counts={'timeouts': 1},
  rewards=np.array([[2.0, 2.0], [7.0, 0.0], [0.0, 2.0], [0.0, 0.0]]),
)


def test_metrics_are_of_the_prompts_that_exist():
  assert BATCH.metrics() == pytest.approx(
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


@pytest.mark.parametrize('forced', [None, 5])
@pytest.mark.parametrize('cut, last', [('keep', 1), ('mask', 0)])
def test_tokens_count_up_to_the_end_and_masked_completions_not(
  cut, last, forced
):
  """A forced token, which the policy does not choose, has weight 0."""
  ids = dataclasses.replace(gemma_ids.FRAMING.decoder, forced=forced)
  records = types.SimpleNamespace(framing=special_ids.Framing(ids, ids))
  rows = dataclasses.replace(test_policy.ROWS, lengths=framing.Lengths(4, 4))
  batches = types.SimpleNamespace(
    _recipe=types.SimpleNamespace(rows=rows),
    _local=range(4),
    _data=types.SimpleNamespace(train=records),
    _teacher=False,
  )
  rows = policy_batches.PolicyBatches._frame(
    batches, BATCH, masks=cut == 'mask'
  )
  counts = np.array([[2, 2], [0, 0], [2, last], [1, 1]])
  if forced:
    counts = np.maximum(counts - 1, 0)
    assert not rows['weights'][..., 0].any()
  np.testing.assert_array_equal(rows['weights'].sum(-1), counts)
  np.testing.assert_array_equal(rows['targets'][2, :, 0], [6, 8])
