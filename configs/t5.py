r"""T5 and its kin: pretraining from random weights, and training on.

    python -m encdec_adapt.train --workdir=runs/t5 \
      --config=configs/t5.py:size=t5_1.1_base \
      --config.data.source=jsonl:/data/*.jsonl \
      --config.data.vocabulary=/data/spiece.model

`size` is a key of `encdec_adapt.models.presets.T5`: t5_small, t5_1.1_base,
flan_t5_xl, mt5_base, umt5_small, byt5_large, ul2, .. `source=MODEL` trains a
model on that is on disk, a Hugging Face folder or a work directory, with its
own vocabulary, and `size` then names the recipe. The result is fine-tuned by
--config=configs/sft.py:source=runs/t5.

Span corruption as in T5 (arXiv:1910.10683, section 3.1): spans of 3 tokens, 15%
of 512 + 114 tokens, of 1024 + 229 in mT5 and UMT5, and of 20 bytes, 1024 + 189,
in ByT5 (arXiv:2105.13626, section 3.1); 2^20 tokens of inputs a step for a
million steps, without dropout. UL2's mixture has longer targets and needs mode
tokens, which T5's vocabularies lack; the spare rows of the tables (not of
ByT5's) take them:

    --config.data.objective=ul2 --config.data.decoder_length=512 \
      --config.data.add_sentinels=1

Adafactor has T5's parameter scale and no clipping of global norms; its rate is
0.01 for 10,000 steps, then 1 / sqrt(step). Training on is at that of the
millionth step, 0.001, with a fresh state; --config.init.optimizer=source and
--config.optimizer.schedule=rsqrt with its rate of 0.01 go on with a run's.

`topology` selects a row of `SHIPPED`: --config=t5:size=t5_11b,topology=h100:8.
"""

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.configs import gemma2, pretrained
from encdec_adapt.models import presets

# By the arguments after the colon. Other kernels than `chunked` take no bias.
SHIPPED = {
  'size=t5_11b,topology=h100:8': gemma2.ChipSettings(
    replica=1,
    fsdp=8,
    save_every=100,
    microbatches=64,
    remat='dots',
    optimizer='adafactor',
  ),
  'size=t5_11b,topology=v5e:8x8': gemma2.ChipSettings(
    replica=2,
    fsdp=32,
    save_every=200,
    microbatches=4,
    remat='full',
    optimizer='adafactor',
  ),
}
# Objective and lengths S and T, by the first part of a size.
_LONG = 'span_corruption', 1024, 229
_RECIPES = {
  'mt5': _LONG,
  'umt5': _LONG,
  'byt5': ('denoise:-:20:0.15', 1024, 189),
}


def get_config(arg=None):
  """`size`, a key of `presets.T5`; `source`, a model on disk; `topology`."""
  args = config_lib.parse_arg(arg, size='t5_1.1_small', source='', topology='')
  size, model = args['size'], presets.t5(args['size'], vocab_multiple=128)
  if args['source']:
    config = pretrained.get_config(source=args['source'])
  else:
    config = config_lib.defaults()
    config_lib.set_model(config.model, model)
    config.data.source = ''  # Not Python's own text.
    config.data.train_vocabulary = False
    config.data.vocabulary = 'byt5' if size.startswith('byt5') else ''
  family = size.partition('_')[0]
  short = 'span_corruption', 512, 114
  data, optimizer = config.data, config.optimizer
  data.objective, data.encoder_length, data.decoder_length = _RECIPES.get(
    family, short
  )
  data.shards = 256
  config.train.batch_size = 2**20 // data.encoder_length
  config.train.steps = 1_000_000
  config.evaluation.loss = 1000
  config.train.eval_batch_size = 64
  config.checkpoint.every = 1000
  config.loss.z_loss = 1e-4
  optimizer.kind, optimizer.clip_norm = 'adafactor', 0.0
  optimizer.schedule, optimizer.learning_rate = 'rsqrt', 0.01
  optimizer.warmup_steps = 0
  if args['source']:
    optimizer.schedule, optimizer.learning_rate = 'constant', 0.001
  if args['topology']:
    _spread(config, f'size={size},topology={args["topology"]}')
  return config


def _spread(config, name):
  """Sets what depends on the chips, from the row of `SHIPPED`."""
  if name not in SHIPPED:
    raise errors.UserError(
      f'{name} is not in configs/t5.py, which has {"; ".join(SHIPPED)}. Find a'
      ' mesh for other chips with `python -m encdec_adapt.plan --search=6`.'
    )
  gemma2.set_chips(config, SHIPPED[name])
  config.compute.dtype = 'bfloat16'
  config.compute.attention_chunk = 512
