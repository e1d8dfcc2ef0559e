"""Decoder-only training with published speed, for calibrating plans.

    python -m tests.benchmarks.calibration

compiles each of `RUNS` and writes how far its estimate is from what was
measured. Batches are the published recipes' (MaxText's benchmark files) where
they are known; what they keep in the host's memory is recomputed here.
"""

from encdec_adapt import config as config_lib
from encdec_adapt.models import model_config, presets

# MaxText's default decoder at 16 and 32 times its size, as its rule spreads
# that over dimensions (configs/base.yml, `get_individual_scales`); changes to
# Llama 2 7B.
_SCALED = {
  'maxtext_16b': {'width': 4096, 'mlp_width': 28672, 'heads': 64},
  'maxtext_32b': {'width': 8192, 'mlp_width': 28672, 'heads': 64},
}


def get_config(arg=None):
  """`shape` of `presets.STACKS` or `_SCALED`; `length` of a row, `rows`.

  `replica` above 1 splits the chips into groups that share a table of the
  vocabulary; everything else is sharded over all of them.
  """
  args = config_lib.parse_arg(
    arg,
    shape='llama3.1_8b',
    length=8192,
    rows=1024,
    replica=1,
    remat='full',
    attention='splash',
  )
  config = config_lib.defaults()
  scaled = _SCALED.get(args['shape'])
  if scaled:
    stack = presets.stack(
      'llama2_7b', vocab_multiple=256, kv_heads=scaled['heads'], **scaled
    )
  else:
    stack = presets.stack(args['shape'], vocab_multiple=256)
  config_lib.set_model(config.model, model_config.DecoderOnlyConfig(stack))
  config.data.train_vocabulary = False
  config.data.decoder_length = args['length']
  config.train.batch_size = config.train.eval_batch_size = args['rows']
  config.compute.dtype = 'bfloat16'
  config.compute.attention = args['attention']
  config.compute.remat = args['remat']
  config.loss.chunk = 256
  if args['replica'] > 1:
    config.mesh.replica = args['replica']
    config.mesh.rules = 'fsdp_replica'
  return config
