"""The main job on text that every Python carries, small enough for two cores.

    bash launch/quickstart.sh [--size=full]

runs the study below; each of its stages is a command of its own, for example

    python -m encdec_adapt.train --config=configs/quickstart.py:run=adapted \
      --workdir=runs/quickstart/adapted

`size=default` takes under 10 minutes on two cores, and `size=full`, whose
stages have budgets of 1 h 20 in all, under 2 hours. It holds what the README
shows: three learning rates and three seeds of `adapted` and `scratch`, and the
controls. `size=smoke` is for tests.
"""

import dataclasses

from encdec_adapt import config as config_lib
from encdec_adapt import study
from encdec_adapt.cli import errors
from encdec_adapt.models import model_config

RUNS = {
  'decoder_only': 'the causal decoder that is adapted',
  'decoder_only_small': 'the smaller decoder of the unbalanced pair',
  'adapted': 'balanced encoder-decoder from decoder_only',
  'scratch': 'the same encoder-decoder from random initialisation',
  'unbalanced': 'encoder from decoder_only, decoder from the small one',
  'decoder_only_continued': 'control: decoder_only for as many tokens more',
  'adapted_embeddings': 'control: adapted, all fresh but the embeddings',
}


@dataclasses.dataclass(frozen=True)
class Size:
  """One size of the study. Steps are counts of optimizer updates.

  `passes` is of the text, for the causal decoders; pairs need only one.
  """

  root: str
  max_bytes: int
  vocab_size: int
  base: dict
  small: dict
  passes: int
  pretrain_steps: int
  small_steps: int
  adapt_steps: int
  eval_rows: int


def _shape(layers, width, mlp_width):
  return dict(layers=layers, width=width, mlp_width=mlp_width)


# Digests of the documents that no decoder in configs/decoders has seen.
HELD_OUT = 'configs/decoders/held_out.txt'
SIZES = {
  # For a test that every stage runs; its numbers mean nothing.
  'smoke': Size(
    root='runs/quickstart_smoke',
    max_bytes=400_000,
    vocab_size=512,
    base=_shape(2, 32, 64),
    small=_shape(1, 16, 32),
    passes=1,
    pretrain_steps=8,
    small_steps=8,
    adapt_steps=8,
    eval_rows=16,
  ),
  'default': Size(
    root='runs/quickstart',
    max_bytes=3_000_000,
    vocab_size=2048,
    base=_shape(4, 128, 512),
    small=_shape(3, 96, 384),
    passes=1,
    pretrain_steps=90,
    small_steps=60,
    adapt_steps=40,
    eval_rows=64,
  ),
  'full': Size(
    root='runs/quickstart_full',
    max_bytes=0,
    vocab_size=2048,
    base=_shape(4, 128, 512),
    small=_shape(3, 96, 384),
    passes=2,
    pretrain_steps=3000,
    small_steps=1500,
    adapt_steps=130,
    eval_rows=192,
  ),
}
PROMPTS = (
  'The "with" statement is used to wrap the execution of a block with',
  'def __init__(self, name, value=None):\n    self.name = name\n',
  'Return the number of',
  'import os\nimport sys\n\n\nclass Test',
)
LEARNING_RATES = (5e-4, 1.5e-3, 4.5e-3)


def _size(name):
  if name not in SIZES:
    raise errors.UserError(
      f'size={name} is not known; choose one of {", ".join(SIZES)}.'
    )
  return SIZES[name]


def _stack(size, shape):
  return model_config.StackConfig(
    **shape,
    heads=2,
    kv_heads=1,
    head_dim=64,
    query_scale=64.0,
    vocab_size=size.vocab_size,
    vocab_multiple=128,
    window=64,
  )


def get_config(arg=None):
  """`run` is one of RUNS, `size` one of SIZES."""
  args = config_lib.parse_arg(arg, size='default', run='decoder_only')
  size, run = _size(args['size']), args['run']
  if run not in RUNS:
    raise errors.UserError(
      f'run={run} is not known; choose one of {", ".join(RUNS)}.'
    )
  config = config_lib.defaults()
  small = _stack(size, size.small)
  large = _stack(size, size.base)
  config_lib.set_stack(config.model.encoder, large)
  config_lib.set_stack(
    config.model.decoder,
    small if run in ('decoder_only_small', 'unbalanced') else large,
  )
  config.compute.scan_unroll = 4
  config.compute.compile_cache = f'{size.root}/compiled'
  config.data.source = f'python:{HELD_OUT}'
  config.data.max_bytes = size.max_bytes
  # Importing TensorFlow costs a worker more than it saves on so little text.
  config.data.workers = 1
  config.data.vocabulary = f'{size.root}/records/vocabulary.model'
  config.data.shards = 2
  config.data.eval_rows = size.eval_rows
  config.optimizer.learning_rate = 2e-3
  config.train.batch_size = 16
  config.train.log_every = 20
  if run.startswith('decoder_only'):
    _causal(config, size, run)
  else:
    _pairs(config, size, run)
  config.optimizer.warmup_steps = min(
    100 if config.model.kind == 'decoder_only' else 20,
    config.train.steps // 4,
  )
  config.train.eval_every = max(config.train.steps // 8, 1)
  config.checkpoint.every = max(config.train.steps // 2, 1)
  return config


def _causal(config, size, run):
  """Pretraining: causal language model on rows of 256 tokens."""
  config.model.kind = 'decoder_only'
  config.data.folder = f'{size.root}/records/causal_lm'
  config.data.objective = 'causal_lm'
  config.data.decoder_length = 256
  config.data.passes = size.passes
  config.optimizer.weight_decay = 0.01
  config.train.batch_size = 8
  config.optimizer.learning_rate = 3e-3
  if run == 'decoder_only_small':
    config.train.steps = size.small_steps
  elif run == 'decoder_only':
    config.train.steps = size.pretrain_steps
  else:
    config.train.steps = size.adapt_steps
    config.init.mode = 'checkpoint'
    config.init.encoder = f'{size.root}/decoder_only'
    config.optimizer.learning_rate = 1e-3
    config.seed = 3  # Another order than that it was trained in.


def _pairs(config, size, run):
  """Adaptation: PrefixLM cut in half, distilled from decoder_only."""
  config.model.kind = 'encoder_decoder'
  config.data.folder = f'{size.root}/records/prefix_lm'
  config.data.objective = 'prefix_lm'
  config.data.encoder_length = config.data.decoder_length = 128
  config.teacher.checkpoint = f'{size.root}/decoder_only'
  config.loss.distillation = 0.5
  config.train.steps = size.adapt_steps
  source = f'{size.root}/decoder_only'
  if run == 'adapted':
    config.init.mode = 'adapt'
  elif run == 'adapted_embeddings':
    config.init.mode = 'embeddings'
  elif run == 'unbalanced':
    config.init.mode = 'adapt'
    config.init.decoder = f'{size.root}/decoder_only_small'
    # About 5 % of the steps, as K = 1000 is of the paper's.
    config.train.cross_attention_warmup = max(size.adapt_steps // 20, 1)
  if config.init.mode != 'random':
    config.init.encoder = source


def get_study(arg=None):
  """The stages of a size, in order; see `encdec_adapt.study`."""
  name = config_lib.parse_arg(arg, size='default')['size']
  size = _size(name)
  records = [
    study.Stage(
      f'records_{run}', 'materialize', (_flag(name, run),), budget_seconds=60
    )
    for run in ('decoder_only', 'adapted')
  ]
  training = [_train(name, 'decoder_only'), _train(name, 'decoder_only_small')]
  for run in ('adapted', 'scratch'):
    training += _swept(name, run) if name == 'full' else [_train(name, run)]
  training.append(_train(name, 'unbalanced'))
  if name == 'full':
    training.append(_train(name, 'decoder_only_continued'))
    training.append(_train(name, 'adapted_embeddings'))
  runs = [stage.name for stage in training]
  evaluate = study.Stage(
    'evaluate',
    'evaluate',
    (
      f'--records={size.root}/records/prefix_lm/eval',
      *(f'--checkpoint={size.root}/{run}' for run in runs),
    ),
    budget_seconds=6 * len(runs),
  )
  samples = f'{size.root}/samples.json'
  writer = 'adapted_seed1' if name == 'full' else 'adapted'
  generate = study.Stage(
    'generate',
    'generate',
    (
      f'--checkpoint={size.root}/{writer}',
      *(f'--prompt={prompt}' for prompt in PROMPTS),
      '--max_tokens=48',
      f'--output={samples}',
    ),
    budget_seconds=20,
  )
  swept = ('adapted', 'scratch') if name == 'full' else ()
  return study.Study(
    root=size.root,
    title='Adapting a decoder-only model on the text that Python carries',
    size=name,
    stages=(*records, *training, evaluate, generate),
    runs=tuple(runs),
    best_of={run: _sweep(run) for run in swept},
    samples=samples,
  )


def _flag(name, run):
  return f'--config=configs/quickstart.py:size={name},run={run}'


def _train(name, run, *flags, folder=None, rate_of=()):
  """A training run; its budget is for two cores, compiling included."""
  size = _size(name)
  seconds = {
    'decoder_only': 20 + 1.0 * size.pretrain_steps,
    'decoder_only_small': 15 + 0.6 * size.small_steps,
    'unbalanced': 50 + 1.2 * size.adapt_steps,
  }.get(run, 30 + 1.2 * size.adapt_steps)
  folder = folder or run
  return study.Stage(
    name=folder,
    module='train',
    flags=(_flag(name, run), f'--workdir={size.root}/{folder}', *flags),
    budget_seconds=seconds,
    rate_of=rate_of,
  )


def _sweep(run):
  return tuple(f'{run}_lr_{rate:g}' for rate in LEARNING_RATES)


def _swept(name, run):
  """Every learning rate, then two more seeds of the best."""
  stages = [
    _train(
      name,
      run,
      f'--config.optimizer.learning_rate={rate:g}',
      folder=folder,
    )
    for folder, rate in zip(_sweep(run), LEARNING_RATES, strict=True)
  ]
  return stages + [
    _train(
      name,
      run,
      f'--config.seed={seed}',
      folder=f'{run}_seed{seed}',
      rate_of=_sweep(run),
    )
    for seed in (1, 2)
  ]
