"""Your own text, or examples, on two CPU cores.

    python -m encdec_adapt.train --config=laptop --workdir=runs/decoder \
      --config.data.source='text:books/*.txt'
    python -m encdec_adapt.train --config=laptop:encoder=runs/decoder \
      --workdir=runs/pair --config.data.source='text:books/*.txt'

The first trains a vocabulary and a causal decoder of 1.2M parameters, the
second an encoder-decoder that is adapted from it, each for a few minutes. With
`laptop:encoder=runs/decoder,task=pairs` and a `pairs:` source the adapted model
is tuned on answers. configs/your_data.md has all commands, from text to an
export. Small sources are repeated; of large ones the first `MAX_BYTES` are
read, up to the end of a paragraph. Short texts share held-out rows.

`vocabulary_size=N` of a decoder: fewer tokens for short texts, more for several
languages. Any key is set by a flag: `--config.train.steps=5000` trains longer.
"""

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.configs import pretrained, quickstart
from encdec_adapt.models import model_config

MAX_BYTES = 8_000_000
# Windows of fewer tokens, the ends of longer documents, are dropped.
SHORTEST = 16


def get_config(arg=None):
  """`vocabulary_size` of a new decoder; or `encoder`, its run, and `task`."""
  args = config_lib.parse_arg(
    arg, vocabulary_size=2048, encoder='', task='text'
  )
  task = args['task']
  if task not in ('text', 'pairs') or task == 'pairs' and not args['encoder']:
    raise errors.UserError(
      f'task={task} must be text, or pairs with encoder=RUN, the work directory'
      ' of the decoder that is adapted (--config=laptop trains one).'
    )
  if args['encoder']:
    config = pretrained.get_config(encoder=args['encoder'])
    config.data.encoder_length = config.data.decoder_length = 128
    config.data.objective = f'prefix_lm:shortest={SHORTEST}'
    config.train.steps = 700
    config.optimizer.learning_rate = 2e-3
  else:
    config = config_lib.defaults()
    stack = quickstart.stack(4, 128, args['vocabulary_size'])
    config_lib.set_model(config.model, model_config.DecoderOnlyConfig(stack))
    config.data.source = ''  # Not Python's own text.
    # Sentences and lines are joined, so that they fill rows.
    config.data.objective = f'causal_lm:concatenate,shortest={SHORTEST}'
    config.data.decoder_length = 256
    config.train.batch_size = 8
    config.train.steps = 1000
    config.optimizer.learning_rate = 3e-3
  config.evaluation.loss = 0.2
  if task == 'pairs':
    config.data.objective = 'pairs'
    config.data.encoder_length = config.data.decoder_length = 64
    config.train.steps = 1000
    config.evaluation.loss = config.evaluation.samples = 0.2
    config.checkpoint.keep_best = True
  config.compute.scan_unroll = config.model.decoder.layers
  config.data.max_bytes = MAX_BYTES
  config.data.repeat = config.data.eval_pack = True
  # A second process takes longer to start than it saves on so little text.
  config.data.shards = config.data.workers = 1
  config.train.log_every = 50
  config.checkpoint.every = 0.2
  config.optimizer.warmup_steps = 40
  config.optimizer.weight_decay = 0.01
  return config
