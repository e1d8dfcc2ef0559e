"""Every family from the folder that transformers saves: logits and text."""

import dataclasses

import numpy as np
import pytest

import encdec_adapt
from encdec_adapt.models import build, parameters
from encdec_adapt.ops import rope
from tests import tiny
from tests.parity import tiny_models

pytestmark = pytest.mark.parity
# A token that takes another expert, or of Gemma one seed in ten, weighs much.
UNSTEADY = ('gemma', 'mixtral', 'qwen2_moe', 'qwen3_moe')
SEEDS = {False: 8, True: 40}
CHANCE = 0.05
DECODED = tiny.slow_except(
  ['gemma2', 'llama3', 'mixtral', 't5gemma_unbalanced', 't5gemma2', 't5_v1_1'],
  tiny_models.CASES,
)


@pytest.mark.parametrize('name', tiny_models.CASES)
def test_logits(name, saved):
  theirs, _, ours = saved(name)
  if not name.endswith(('images', 't5gemma2')):  # Their vision part counts.
    assert parameters.count(ours.config) == theirs.num_parameters()
  rows = tiny_models.batch(tiny_models.CASES[name])
  tiny_models.assert_same_logits(ours, theirs, rows)
  # Weights and caps are at work.
  assert np.abs(tiny_models.their_logits(theirs, rows)).max() > 2


@pytest.mark.long
@pytest.mark.parametrize('name', [x for x in DECODED if 'bert' not in str(x)])
def test_greedy_text(name, saved):
  theirs, _, ours = saved(name)
  rows = tiny_models.batch(tiny_models.CASES[name])
  tiny_models.assert_same_text(ours, theirs, rows)


@pytest.mark.long
@pytest.mark.parametrize('name', DECODED)
def test_bfloat16_is_no_worse_than_theirs(name, tmp_path):
  """Our bf16 logits are as close to fp32 as theirs, up to chance."""
  case, seeds = tiny_models.CASES[name], SEEDS[name in UNSTEADY]
  ratio, _ = tiny_models.rounding_ratios(
    [tiny_models.in_bfloat16(case, s, tmp_path / str(s)) for s in range(seeds)]
  )
  assert ratio <= 1 + CHANCE


@pytest.mark.long
@pytest.mark.parametrize(
  'name, stack, change',
  [
    ('gemma2', 'decoder', {'window': 5}),
    ('gemma2', 'decoder', {'query_scale': 12.0}),
    ('gemma2', 'decoder', {'attention_softcap': None}),
    ('gemma2', 'decoder', {'final_softcap': None}),
    ('gemma2', 'decoder', {'rope_theta': 11000.0}),
    ('gemma3', 'decoder', {'rope_scaling': rope.Scaling()}),
    ('gemma3', 'decoder', {'local_rope_theta': 110.0}),
    ('mixtral', 'decoder', {'norm_topk': False}),
    ('mixtral', 'decoder', {'experts_per_token': 3}),
    ('qwen2_moe', 'decoder', {'norm_topk': True}),
    ('gemma4_experts', 'decoder', {'experts_per_token': 2}),
    ('modernbert', 'decoder', {'window_rule': 'exclusive'}),
    ('modernbert', 'decoder', {'local_rope_theta': 110.0}),
    ('bert', 'decoder', {'activation': 'gelu_tanh'}),
    ('t5gemma_unbalanced', 'encoder', {'window_rule': 'exclusive'}),
    ('t5gemma_unbalanced', 'encoder', {'role': 'causal'}),
    ('t5gemma2', 'encoder', {'window_rule': 'exclusive'}),
  ],
  ids=str,
)
def test_the_comparison_would_notice(name, stack, change, saved):
  theirs, _, ours = saved(name)
  changed = dataclasses.replace(ours.config.stacks[stack], **change)
  config = dataclasses.replace(ours.config, **{stack: changed})
  ours = dataclasses.replace(ours, model=build.build(config))
  rows = tiny_models.batch(tiny_models.CASES[name])
  expected = tiny_models.their_logits(theirs, rows)
  difference = np.abs(tiny_models.our_logits(ours, rows) - expected)
  assert difference.max() > 10 * tiny_models.TOLERANCE


def test_the_exclusive_window_is_the_next_inclusive_one(saved):
  """|q-k| < W + 1 is |q-k| <= W: both rules meet the same reference."""
  name = 't5gemma_unbalanced'
  theirs, folder, _ = saved(name)
  ours = encdec_adapt.load(folder)
  encoder = ours.config.encoder
  assert encoder.window_rule == 'exclusive'
  wider = dataclasses.replace(encoder, window=encoder.window + 1)
  config = dataclasses.replace(ours.config, encoder=wider)
  ours = dataclasses.replace(ours, model=build.build(config))
  rows = tiny_models.batch(tiny_models.CASES[name])
  tiny_models.assert_same_logits(ours, theirs, rows)
