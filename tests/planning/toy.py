"""A toy pair, what it is planned for, and what its plans have."""

from encdec_adapt import config as config_lib
from encdec_adapt.models import model_config, presets
from encdec_adapt.planning import chips

WHERE = chips.parse('h100:8')
BUDGET = 64 * 2**20
ROWS, LENGTH = 16, 64
KEYS = {'memory', 'flops', 'collectives', 'kernels', 'roofline', 'mfu'}
KEYS |= {'compile_s', 'fits', 'replicated', 'copies'}


def settings(**changes):
  """Those of a job on the pair; `section__field` changes one."""
  config = config_lib.defaults()
  pair = model_config.EncoderDecoderConfig(
    *(presets.t5gemma('toy_toy').stacks[s] for s in ('encoder', 'decoder'))
  )
  config_lib.set_model(config.model, pair)
  config.data.objective = 'prefix_lm'
  config.data.encoder_length = config.data.decoder_length = LENGTH
  config.train.batch_size = ROWS
  config.compute.dtype = 'bfloat16'
  config.compute.remat = 'full'
  for key, value in changes.items():
    section, _, name = key.partition('__')
    config[section][name] = value
  return config_lib.load(config, sources=False)
