r"""Classification: a model on disk with a head for labels, all of it tuned.

    python -m encdec_adapt.train --workdir=runs/boolq \
      --config=configs/classification.py:source=runs/adapted \
      --config.data.source='labels:/data/train.jsonl#question,passage,label' \
      --config.data.objective='classify:labels=no|yes'

`source` is a work directory or a Hugging Face folder. Of an encoder-decoder the
encoder is tuned, of a decoder-only model the decoder; the label is predicted
from the state of the last token (Encoder-Decoder Gemma, arXiv:2504.06225,
section 4). The last field of the source is the label, the others are texts.
With `tag:labels=O|PER|LOC` the texts are one list of words and the label a list
with one for each. Every save is evaluated, and the checkpoint with the lowest
held-out loss is kept (`config.checkpoint.keep_best`); `config.train.patience`
ends the job when the loss stops falling. `evaluate --records` gives accuracy
and F1.
"""

from configs import pretrained
from encdec_adapt import config as config_lib
from encdec_adapt.models import model_config


def get_config(arg=None):
  """`source`: work directory or Hugging Face folder to start from."""
  args = config_lib.parse_arg(arg, source='')
  config = pretrained.get_config(f'source={args["source"]}')
  opened = pretrained.open_model(args['source'])
  stack, choice = next(iter(opened.model.stacks.values())), opened.vocabularies
  config_lib.set_model(config.model, model_config.DecoderOnlyConfig(stack))
  if choice and choice.encoder:
    config.data.vocabulary, config.data.encoder_vocabulary = choice.encoder, ''
  config.data.encoder_length, config.data.decoder_length = 512, 0
  config.data.objective = 'classify:labels=no|yes'
  config.data.passes = 3
  config.train.steps = 0
  config.train.batch_size = 32
  config.train.evaluators = 'loss=100'
  config.checkpoint.every = 100
  config.checkpoint.keep_best = True
  config.optimizer.learning_rate = 1e-4
  return config
