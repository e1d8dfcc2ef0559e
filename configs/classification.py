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
and F1. A grid of learning rates, batches and dropout, of which `budget` runs
are drawn, is

    python -m encdec_adapt.study --study=configs/classification.py:source=\
      runs/adapted,data=/data/train.jsonl,fields=question+passage+label,labels=no|yes

It writes runs/classification/report.html, with the run of the lowest held-out
loss as `best`. The same command again resumes a study that was interrupted.
"""

import itertools
import random

from configs import pretrained
from encdec_adapt import config as config_lib
from encdec_adapt.evaluation import study_stages
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


def get_study(arg=None):
  """Returns the grid; lists are separated by +."""
  args = config_lib.parse_arg(
    arg,
    source='',
    data='',
    fields='text+label',
    labels='no|yes',
    root='runs/classification',
    rates='1e-4+3e-4+1e-3',
    batches='16+32',
    dropouts='0+0.1',
    budget=6,
    length=512,
    passes=10,
    patience=3,
  )
  root, fields = args['root'], args['fields'].replace('+', ',')
  shared = (
    f'--config=configs/classification.py:source={args["source"]}',
    f'--config.data.source=labels:{args["data"]}#{fields}',
    f'--config.data.objective=classify:labels={args["labels"]}',
    f'--config.data.folder={root}/records',
    f'--config.data.encoder_length={args["length"]}',
    f'--config.data.passes={args["passes"]}',
    '--config.data.eval_fraction=0.1',
    '--config.data.eval_rows=0',
    f'--config.train.patience={args["patience"]}',
  )
  grid = itertools.product(
    *(args[name].split('+') for name in ('rates', 'batches', 'dropouts'))
  )
  grid = [tuple(map(float, point)) for point in grid]
  if args['budget'] < len(grid):
    grid = sorted(random.Random(0).sample(grid, args['budget']))
  runs = {
    f'rate_{rate:g}_batch_{batch:g}_dropout_{dropout:g}': (
      f'--config.optimizer.learning_rate={rate:g}',
      f'--config.train.batch_size={batch:g}',
      f'--config.train.dropout={dropout:g}',
    )
    for rate, batch, dropout in grid
  }
  stages = [study_stages.Stage('records', 'materialize', shared, 60)]
  stages += [
    study_stages.Stage(
      name, 'train', (*shared, f'--workdir={root}/{name}', *flags), 600
    )
    for name, flags in runs.items()
  ]
  evaluated = (f'--checkpoint={root}/{name}' for name in runs)
  given = f'--records={root}/records/eval', f'--output={root}/evaluation'
  stages.append(
    study_stages.Stage(
      'evaluate', 'evaluate', (*given, '--cost=', *evaluated), 10 * len(runs)
    )
  )
  return study_stages.Study(
    root=root,
    title=f'Classification: {args["data"]}',
    size=f'{len(runs)} runs',
    stages=tuple(stages),
    runs=tuple(runs),
    results=f'{root}/evaluation',
    best_of={'best': tuple(runs)},
  )
