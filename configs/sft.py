r"""Supervised fine-tuning of a model on disk: the loss is on answers only.

    python -m encdec_adapt.train --workdir=runs/sft \
      --config=configs/sft.py:source=runs/adapted \
      --config.data.source='pairs:/data/*.jsonl#question,answer'

`source` is a work directory or a Hugging Face folder, an encoder-decoder (as T5
and its kin are) or a decoder-only model. With `format=chat` the data are
conversations (`--config.data.source=chat:/data/*.jsonl`) in the chat format of
the model's vocabulary, whose assistant's turns are learnt; `generate --chat`
then answers. `meap=separate` or `meap=concat` adds MEAP's masked copies of long
answers (arXiv:2502.07490), `meap=inputs` copies with masks in what an encoder
reads.
`lora=16` trains adapters of rank 16 over the frozen model (configs/lora.md), at
ten times the learning rate, about the ratio of the best rates in "LoRA Without
Regret" (Thinking Machines, 2025).
Lengths are those of T0's fine-tuning (Wang et al. 2022: 1024 + 256); examples
that are longer are dropped and counted, and short ones packed. A pass draws
every example once and `config.train.steps` is 0, so that the job ends with its
records: `--config.data.passes=3` are three epochs, which the learning rate's
warm-up and decay follow. Every save is evaluated, and the checkpoint with the
lowest held-out loss is kept and used (`config.checkpoint.keep_best`); every
evaluation prints the model's answers to two held-out examples
(`config.evaluation.samples`).
"""

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.configs import pretrained


def get_config(arg=None, **values):
  """`source`, `format`, `meap` separate, concat or inputs; `lora`, a rank."""
  args = config_lib.parse_arg(arg, source='', format='pairs', meap='', lora=0)
  args |= values  # Of other configurations.
  if args['format'] not in ('pairs', 'chat'):
    raise errors.UserError(f'format={args["format"]} must be pairs or chat.')
  config = pretrained.get_config(source=args['source'])
  set_tuning(config, args['format'], args['meap'])
  pretrained.set_adapters(config, args['lora'])
  return config


def set_tuning(config, form='pairs', meap=''):
  """Changes a configuration of a model on disk into its fine-tuning."""
  config.data.objective = form + (f':meap={meap}' if meap else '')
  config.data.encoder_length, config.data.decoder_length = 1024, 256
  config.data.passes = 3
  config.train.steps = 0
  config.evaluation.loss = config.evaluation.samples = 200
  config.checkpoint.every = 200
  config.checkpoint.keep_best = True
  config.optimizer.learning_rate = 1e-4
