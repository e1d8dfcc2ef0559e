"""What a step of adapters costs, compared with tuning all parameters."""

import pytest

from encdec_adapt.models import adapters as adapters_lib
from encdec_adapt.models import build, execution, model_config
from encdec_adapt.training import step as step_lib
from tests import toy_models
from tests.training.conftest import Trainer, make_batch

STACK = toy_models.stack(
  layers=4, width=128, mlp_width=512, heads=8, kv_heads=8, head_dim=16
)
MODEL = build.build(
  model_config.encoder_decoder(STACK, STACK),
  execution.ComputeConfig('float32', 'full'),
)


def _compile(**lora):
  """Compiles a step from shapes."""
  trainer = Trainer(model=MODEL, lora=adapters_lib.Options(**lora))
  batch = step_lib.place_batch(make_batch(4), trainer.where)
  base = trainer.where.abstract_base()
  arguments = trainer.phases.abstract(), batch, {}, base
  return trainer.phases.make_step(trainer.schedule).lower(*arguments).compile()


@pytest.mark.long
@pytest.mark.parametrize(
  'base, share',
  [
    ('', 0.55),
    pytest.param('int8', 0.2, marks=pytest.mark.slow),
    ('nf4', 0.17),
  ],
)
def test_memory_and_flops_are_a_share_of_full_tunings(base, share):
  full, tuned = _compile(), _compile(rank=4, base=base)
  sizes, flops = [], []
  for program in (full, tuned):
    stats = program.memory_analysis()
    sizes.append(stats.argument_size_in_bytes + stats.temp_size_in_bytes)
    flops.append(program.cost_analysis()['flops'])
  assert sizes[1] < share * sizes[0], (sizes, flops)
  # No gradients of kernels: a fourth of the products, with rematerialisation.
  if not base:
    assert flops[1] < 0.85 * flops[0], flops
