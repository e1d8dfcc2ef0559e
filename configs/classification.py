r"""Classification: a model on disk with a head for labels, all of it tuned.

    python -m encdec_adapt.train --workdir=runs/boolq \
      --config=configs/classification.py:source=runs/adapted \
      --config.data.source='labels:/data/train.jsonl#question,passage,label' \
      --config.data.objective='classify:labels=no|yes'

`source` is a work directory or a Hugging Face folder. Of an encoder-decoder the
encoder is tuned, of a decoder-only model the decoder; the label is predicted
from the state of the last token (Encoder-Decoder Gemma, arXiv:2504.06225,
section 4). With `pair=1` both stacks of an encoder-decoder read the text (BART,
arXiv:1910.13461, section 3.1), as they do where such a classifier is tuned
again. The last field of the source is the label, the
others are texts. With `tag:labels=O|PER|LOC` the texts are one list of words
and the label a list with one for each. Every save is evaluated, and the
checkpoint with the lowest held-out loss is kept
(`config.checkpoint.keep_best`); `config.train.patience` ends the job when the
loss stops falling. `evaluate --records` gives accuracy and F1. With
`books=GLOB` the task is which of these text files a passage is from
(`configs/books.py`), without `--config.data` flags. A grid of learning rates,
batches and dropout, of which `budget` runs are drawn, is

    TASK='data=/data/train.jsonl,fields=question+passage+label,labels=no|yes'
    python -m encdec_adapt.study \
      --study="configs/classification.py:source=runs/adapted,$TASK"

It writes runs/classification/report.html, with the run of the lowest held-out
loss as `best_...`. Several tasks are separated by ; in `data`, `fields` and
`labels`: each has a grid of its own, and the report the mean of the best runs'
accuracies, as the paper's table of SuperGLUE. The same command again resumes a
study that was interrupted.
"""

import itertools
import json
import pathlib
import random

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors, option_strings
from encdec_adapt.configs import books, pretrained
from encdec_adapt.lab import pages


def get_config(arg=None):
  """`source`: work directory or Hugging Face folder; `books`; `pair`."""
  args = config_lib.parse_arg(arg, source='', books='', pair=0)
  pair = bool(args['pair']) or None
  config = pretrained.get_stack_config(args['source'], pair)
  config.data.objective = 'classify:labels=no|yes'
  if args['books']:
    config.data.source = f'books:{option_strings.quote(args["books"])}'
    config.data.seqio_modules = ('encdec_adapt.configs.books',)
    labels = '|'.join(books.BookSource(config.data.source).labels)
    config.data.objective = f'classify:labels={json.dumps(labels)}'
    config.data.eval_fraction, config.data.eval_rows = 0.2, 0
  config.train.batch_size = 32
  config.compute.dtype = 'float32'
  return config


def get_study(arg=None):
  """Returns the page of the grid; lists are separated by +, tasks by ;."""
  args = config_lib.parse_arg(
    arg,
    source='',
    data='',
    pair=0,
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
  tasks = [args[name].split(';') for name in ('data', 'fields', 'labels')]
  if len({len(given) for given in tasks}) > 1:
    raise errors.UserError(
      f'data, fields and labels have {[len(given) for given in tasks]} parts'
      ' separated by ; and need one for each task.'
    )
  grid = _draw_grid(args)
  arms, evaluations, best_of = [], [], {}
  for data, fields, labels in zip(*tasks, strict=True):
    name = '_'.join(pathlib.Path(data).with_suffix('').parts[-2:])
    changes = {
      'data.source': f'labels:{option_strings.quote(data)}#'
      + fields.replace('+', ','),
      'data.objective': f'classify:labels={labels}',
      'data.encoder_length': args['length'],
      'data.passes': args['passes'],
      'data.eval_fraction': 0.1,
      'data.eval_rows': 0,
      # Checkpoints are chosen on a third, which is not reported.
      'data.development_rows': 4096,
      'train.patience': args['patience'],
    }
    runs = tuple(_arm(args, name, changes, point) for point in grid)
    best_of[f'best_{name}'] = tuple(arm.name for arm in runs)
    evaluations.append(
      pages.Evaluation(
        f'evaluate_{name}',
        metrics=('held_out/loss', 'held_out/accuracy', 'held_out/macro_f1'),
        records=runs[0].name,
        models=best_of[f'best_{name}'],
      )
    )
    arms += runs
  return pages.Study(
    name='classification',
    title=f'Classification: {args["data"]}',
    size=f'{len(grid)} runs of each of {len(best_of)} tasks',
    root=args['root'],
    arms=tuple(arms),
    evaluations=tuple(evaluations),
    best_of=best_of,
  )


def _arm(args, task, changes, point):
  rate, batch, dropout = point
  return pages.Arm(
    f'{task}_{rate:g}_{batch:g}_{dropout:g}',
    f'classification:source={option_strings.quote(args["source"])}'
    + f',pair={args["pair"]}' * bool(args['pair']),
    changes
    | {
      'optimizer.learning_rate': f'{rate:g}',
      'train.batch_size': f'{batch:g}',
      'train.dropout': f'{dropout:g}',
    },
  )


def _draw_grid(args):
  """Returns at most `budget` points (learning rate, batch, dropout)."""
  values = [
    [
      part.read(float, 'a number')
      for part in option_strings.Part(name, args[name]).divide(r'\+')
    ]
    for name in ('rates', 'batches', 'dropouts')
  ]
  grid = list(itertools.product(*values))
  if args['budget'] < len(grid):
    grid = sorted(random.Random(0).sample(grid, args['budget']))
  return grid
