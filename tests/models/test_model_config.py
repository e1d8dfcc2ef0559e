"""Fields of stacks that cannot be."""

import pytest

from encdec_adapt.base import errors
from encdec_adapt.ops import relative_bias, rope
from tests import toy_models

EXPERTS = dict(experts=4, experts_per_token=2)
LINEAR = rope.Scaling('linear')


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'eoi_token': 53}, 'eoi_token is 53.*below vocab_size, 53'),
    ({'cross_merged': True, 'cross_width': 8}, 'must be the'),
    ({'norm_topk': True}, 'norm_topk is True'),
    ({'experts': 4}, 'experts_per_token is 0'),
    ({**EXPERTS, 'experts_per_token': 5}, 'experts_per_token is 5'),
    ({**EXPERTS, 'dense_layers': 3}, 'dense_layers is 3'),
    ({**EXPERTS, 'shared_expert_gate': True}, 'shared_expert_width'),
    ({**EXPERTS, 'mlp_bias': True}, 'mlp_bias'),
    ({**EXPERTS, 'mlp_gated': False}, 'mlp_gated'),
    ({**toy_models.T5, 'attention_softcap': 5.0}, 'attention_softcap is 5'),
    ({**toy_models.T5, 'cross_merged': True}, 'set cross_merged to False'),
    ({**toy_models.T5, 'rope_theta': 5e5}, 'rope_theta is 500000'),
    ({**toy_models.T5, 'rope_scaling': LINEAR}, 'rope_scaling is .*linear'),
    ({'head_dim': 5}, 'head_dim is 5'),
  ],
)
def test_fields_that_cannot_be(changes, message, small_stack):
  with pytest.raises(errors.UserError, match=message):
    small_stack(**changes)


@pytest.mark.parametrize(
  'section, values, message',
  [
    (rope.Scaling, {'kind': 'yarn'}, "kind is 'yarn'; .*one of none, linear"),
    (rope.Scaling, {'kind': 'linear', 'factor': 0.0}, 'scaling.factor is 0.0'),
    (rope.Scaling, {'kind': 'linear', 'low': 2.0}, 'low is 2.0, which is not'),
    (rope.Scaling, {'kind': 'llama3', 'low': 4.0}, 'low must be below high'),
    (
      relative_bias.Positions,
      {'kind': 'relative', 'buckets': 9},
      'buckets is 9',
    ),
    (
      relative_bias.Positions,
      {'kind': 'relative', 'distance': 16},
      'distance 16',
    ),
  ],
)
def test_options_that_cannot_be(section, values, message):
  with pytest.raises(errors.UserError, match=message):
    section(**values)
