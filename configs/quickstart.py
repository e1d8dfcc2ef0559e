"""The main job on text that every Python carries, small enough for two cores.

    bash launch/quickstart.sh

runs the page below; each of its stages is a command of its own, for example

    python -m encdec_adapt.train --config=configs/quickstart.py:run=adapted \
      --workdir=runs/quickstart/adapted

It starts from the decoders of configs/decoders, as a user starts from a Hugging
Face folder, and takes 5 to 10 minutes on two cores. It adapts a balanced and an
unbalanced pair, and tunes the balanced one and its decoder on look-ups
(`run=adapted_tuned`: questions about a table, of `configs/lookups.py`). Expect
the tuned pair to copy descriptions from its input, often not the one that is
asked for, and the tuned decoder to copy none. With `seeds=3` the difference of
their losses has an interval. `size=smoke` is for tests. What adaptation is
worth beside its alternatives is the question of configs/studies/adaptation.py.
"""

import dataclasses

from encdec_adapt import config as config_lib
from encdec_adapt import configs
from encdec_adapt.base import errors
from encdec_adapt.configs import sft
from encdec_adapt.lab import pages
from encdec_adapt.models import model_config

RUNS = {
  'decoder_only': 'the causal decoder that is adapted',
  'decoder_only_small': 'the smaller decoder of the unbalanced pair',
  'adapted': 'balanced encoder-decoder from decoder_only',
  'unbalanced': 'encoder from decoder_only, decoder from the small one',
}
# Pretrained decoders, and digests of the documents held out from them.
DECODERS = configs.path('decoders')
FOLDERS = {'decoder_only': 'base', 'decoder_only_small': 'small'}
VOCABULARY = 2048
# Questions on a table as those of the look-ups; the report shows the answers.
QUESTIONS = f'{DECODERS}/questions.jsonl'
ADAPTED = 'adapted', 'unbalanced'
TUNED = 'adapted_tuned', 'decoder_only_tuned'


@dataclasses.dataclass(frozen=True)
class Size:
  """One size of the study.

  Attributes:
    root: folder of all its runs.
    max_bytes: most bytes of text that are read; 0 for all.
    adapt_steps: optimizer updates of a pair.
    unbalanced_steps: those of the unbalanced pair, which is not tuned.
    tune_steps: optimizer updates of tuning.
    evaluations: evaluations during the training of a pair.
    eval_rows: held-out rows.
  """

  root: str
  max_bytes: int
  adapt_steps: int
  unbalanced_steps: int
  tune_steps: int
  evaluations: int
  eval_rows: int


SIZES = {
  'smoke': Size('runs/quickstart_smoke', 400_000, 4, 4, 2, 2, 16),
  'default': Size('runs/quickstart', 3_000_000, 140, 35, 110, 4, 64),
}


def _size(name):
  if name not in SIZES:
    raise errors.UserError(
      f'size={name} is unknown; choose one of {", ".join(SIZES)}.'
    )
  return SIZES[name]


def stack(layers, width, vocabulary_size=VOCABULARY):
  """Returns a small Gemma 2 stack."""
  return model_config.StackConfig(
    layers=layers,
    width=width,
    mlp_width=4 * width,
    heads=2,
    kv_heads=1,
    head_dim=64,
    query_scale=64.0,
    vocab_size=vocabulary_size,
    vocab_multiple=128,
    window=64,
  )


def get_config(arg=None):
  """Returns the configuration of a `run` at a `size` (of SIZES).

  A run is of RUNS or of TUNED.
  """
  args = config_lib.parse_arg(arg, size='default', run='decoder_only')
  size, run = _size(args['size']), args['run']
  if run not in (*RUNS, *TUNED):
    raise errors.UserError(
      f'run={run} is unknown; choose one of {", ".join((*RUNS, *TUNED))}.'
    )
  if run in TUNED:
    return _tuned(args['size'], run.removesuffix('_tuned'))
  config = config_lib.defaults()
  large, small = stack(4, 128), stack(3, 96)
  is_small = run in ('decoder_only_small', 'unbalanced')
  config_lib.set_model(
    config.model,
    model_config.encoder_decoder(large, small if is_small else large),
  )
  config.compute.dtype = 'float32'
  config.compute.scan_unroll = 4
  config.compute.compile_cache = f'{size.root}/compiled'
  config.data.source = f'python:{DECODERS}/held_out.txt'
  config.data.max_bytes = size.max_bytes
  # A second process takes longer to start than it saves on so little text.
  config.data.workers = 1
  config.data.vocabulary = f'{DECODERS}/base'
  config.data.shards = 2
  config.data.eval_rows = size.eval_rows
  config.train.log_every = 20
  config.optimizer.warmup_steps = 20
  if run.startswith('decoder_only'):
    _set_causal(config, size, run)
  else:
    _set_pair(config, size, run)
  steps = config.train.steps
  config.optimizer.warmup_steps = min(config.optimizer.warmup_steps, steps // 4)
  config.evaluation.loss = max(steps // size.evaluations, 1)
  config.checkpoint.every = max(steps // 2, 1)
  return config


def _set_causal(config, size, run):
  """Causal language model on rows of 256 tokens."""
  config.model.kind = 'decoder_only'
  config.data.folder = f'{size.root}/records/pretraining'
  config.data.objective = 'causal_lm'
  config.data.decoder_length = 256
  config.optimizer.weight_decay = 0.01
  config.data.passes = 2
  config.train.steps = 3000 if run == 'decoder_only' else 1500
  config.train.batch_size = 8
  config.optimizer.learning_rate = 3e-3
  config.optimizer.warmup_steps = 100


def _set_pair(config, size, run):
  """Adaptation: PrefixLM cut in half, distilled from decoder_only."""
  config.model.kind = 'encoder_decoder'
  config.data.folder = f'{size.root}/records/prefix_lm'
  config.data.objective = 'prefix_lm'
  config.data.encoder_length = config.data.decoder_length = 128
  config.teacher.checkpoint = f'{size.root}/decoder_only'
  config.loss.kind, config.loss.distill.share = 'distill', 0.5
  config.train.steps = size.adapt_steps
  config.optimizer.learning_rate = 2e-3
  config.init.mode = 'adapt'
  config.init.encoder = f'{size.root}/decoder_only'
  if run == 'unbalanced':
    config.init.decoder = f'{size.root}/decoder_only_small'
    # About 5 % of the steps, as K = 1000 is of the paper's.
    config.train.steps = size.unbalanced_steps
    config.train.cross_attention_warmup = max(config.train.steps // 20, 1)


def _tuned(name, run):
  """Fine-tunes a run on look-ups, with the loss on answers only."""
  size, source = _size(name), get_config(f'size={name},run={run}')
  config = config_lib.defaults()
  config.model.update(source.model)
  config.init.mode, config.init.encoder = 'checkpoint', f'{size.root}/{run}'
  sft.set_tuning(config)
  data, train = config.data, config.train
  data.vocabulary, data.train_vocabulary = source.data.vocabulary, False
  data.source = 'lookups:length=short'
  data.seqio_modules = ('encdec_adapt.configs.lookups',)
  data.folder = f'{size.root}/records/lookups'
  # A decoder reads both: fewer than the 256 tokens that it was trained on.
  data.encoder_length, data.decoder_length = 184, 40
  data.max_bytes = 0 if name != 'smoke' else size.max_bytes
  data.eval_fraction, data.eval_rows = 0.1, 128
  data.passes = data.shards = data.workers = 1
  data.repeat = True
  train.batch_size = train.eval_batch_size = 16
  train.steps, train.log_every = size.tune_steps, 20
  config.evaluation.loss = max(size.tune_steps // 5, 1)
  config.evaluation.samples = 0
  # The last one is compared: a choice by these rows would favour the models.
  config.checkpoint.every, config.checkpoint.keep_best = size.tune_steps, False
  config.optimizer.learning_rate = 2e-3
  config.compute.dtype = 'float32'
  config.compute.compile_cache = source.compute.compile_cache
  return config


def get_study(arg=None):
  """Returns the page of a size; see `encdec_adapt.study`.

  `seeds`, if given, is the number of seeds of every arm.
  """
  args = config_lib.parse_arg(arg, size='default', seeds=1)
  name, size = args['size'], _size(args['size'])
  return pages.Study(
    name='quickstart',
    title=(
      'A decoder, two pairs adapted from it, and decoder and pair tuned to'
      ' answer from their input'
    ),
    size=name,
    root=size.root,
    arms=tuple(_arm(name, run) for run in (*ADAPTED, *TUNED)),
    seeds=tuple(range(args['seeds'])),
    claims=(CLAIM,) if args['seeds'] > 1 else (),
    evaluations=(
      pages.Evaluation(
        'answers',
        metrics=('held_out/loss', 'held_out/exact_match'),
        records='adapted_tuned',
        models=(*TUNED, 'decoder_only', *ADAPTED),
      ),
    ),
    commands=tuple(_commands()),
    samples=tuple(f'samples_{run}' for run in TUNED),
  )


CLAIM = pages.Claim(
  'Tuned on look-ups in its input, the adapted pair has a lower loss than the'
  ' decoder it is made from, tuned alike.',
  source='Encoder-Decoder Gemma (arXiv:2504.06225), section 4.3',
  paper='a larger gain from tuning than the decoder',
  contrast=('decoder_only_tuned', 'adapted_tuned'),
  metric='held_out/loss',
  direction='less',
  smallest=0.02,
  reason='two seeds of a model of this size differ by about as much',
)


def _arm(name, run):
  """Returns an arm, and the imported decoders that its configuration reads."""
  starts = {}
  if run in TUNED:
    starts['init.encoder'] = run.removesuffix('_tuned')
  else:
    starts = {x: 'decoder_only' for x in ('teacher.checkpoint', 'init.encoder')}
    if run == 'unbalanced':
      starts['init.decoder'] = 'decoder_only_small'
  return pages.Arm(run, f'quickstart:size={name},run={run}', starts=starts)


def _commands():
  """Imports decoders; answers with tuned models, and exports the pair."""
  for run in FOLDERS:
    yield pages.Command(
      run,
      'convert',
      (
        'import',
        f'--source={DECODERS}/{FOLDERS[run]}',
        f'--output={{{run}}}',
      ),
      seconds=10,
    )
  for run in TUNED:
    name = f'samples_{run}'
    yield pages.Command(
      name,
      'generate',
      (
        f'--checkpoint={{{run}}}',
        f'--prompts={QUESTIONS}',
        '--max_tokens=40',
        f'--output={{{name}}}/samples.jsonl',
      ),
      seconds=20,
    )
  yield pages.Command(
    't5gemma',
    'convert',
    ('export', '--checkpoint={adapted_tuned}', '--output={t5gemma}'),
    seconds=10,
  )
  yield pages.Command(
    'verify',
    'convert',
    ('verify', '{adapted_tuned}', '{t5gemma}', '--tolerance=1e-4'),
    seconds=15,
  )
