r"""Gemma 3 270M becomes a pair; see configs/gemma3_270m.md.

    python -m encdec_adapt.train --workdir=runs/gemma3_270m/text \
      --config=gemma3_270m:source=runs/gemma3_270m/source,target=t5gemma2 \
      --config.data.source='jsonl:text/*.jsonl'
    python -m encdec_adapt.train --workdir=runs/gemma3_270m/tuned \
      --config=gemma3_270m:pair=runs/gemma3_270m/pair \
      --config.data.source='pairs:train.jsonl#source,target'

The first adapts `source`, a folder or an address, by prefix_lm on rows of 512 +
512 tokens. Without `target` the pair has Gemma 3's blocks with cross-attention
and a table for each stack (565.7M parameters); `target=t5gemma2` has merged
attention and one table (368M), as the released T5Gemma 2 270M-270M. The second
trains adapters of rank 16, and the fresh cross-attention of a `pair` whole.
"""

from encdec_adapt import config as config_lib
from encdec_adapt.configs import pretrained, sft

SOURCE = 'hf://google/gemma-3-270m'


def get_config(arg=None):
  """`source` and `target` of an adaptation, or the `pair` that is tuned."""
  args = config_lib.parse_arg(arg, source=SOURCE, target='', pair='')
  if args['pair']:
    return _tuned(args['pair'])
  config = pretrained.get_config(encoder=args['source'], target=args['target'])
  config.data.encoder_length = config.data.decoder_length = 512
  config.data.passes, config.train.steps = 1, 0
  config.train.batch_size = 64
  config.optimizer.learning_rate = 3e-4
  config.optimizer.warmup_steps = 20
  config.evaluation.loss = 50
  config.checkpoint.every = 100
  return config


def _tuned(pair):
  config = sft.get_config(source=pair, lora=16)
  config.train.lora.full = ('cross_attention',)
  config.data.objective = 'pairs:too_long=truncate'
  config.data.encoder_length, config.data.decoder_length = 256, 64
  config.data.passes, config.train.batch_size = 1, 8
  config.data.eval_rows = config.train.eval_batch_size = 16
  config.evaluation.loss = config.evaluation.samples = 0.25
  config.checkpoint.every = 0.25
  config.train.log_every = 5
  return config
