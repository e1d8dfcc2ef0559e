"""Fields of stacks that cannot be."""

import pytest

from encdec_adapt.base import errors
from tests import toy_models

EXPERTS = dict(experts=4, experts_per_token=2)


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'rope_scaling': 'linear:0'}, "rope_scaling is 'linear:0'"),
    ({'rope_scaling': 'linear'}, "rope_scaling is 'linear'"),
    ({'rope_scaling': 'yarn:8'}, 'column 1 must be .*llama3:FACTOR'),
    ({'rope_scaling': 'llama3:8,4,4,64'}, 'LOW below HIGH'),
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
    ({**toy_models.T5, 'rope_scaling': 'linear:2'}, 'rope_scaling is linear'),
    ({**toy_models.T5, 'positions': 'relative:9,8'}, "is 'relative:9,8'"),
    ({'head_dim': 5}, 'head_dim is 5'),
  ],
)
def test_fields_that_cannot_be(changes, message, small_stack):
  with pytest.raises(errors.UserError, match=message):
    small_stack(**changes)
