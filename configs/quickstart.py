"""The main job on text that every Python carries, small enough for two cores.

    bash launch/quickstart.sh [--size=full]

runs the study below; each of its stages is a command of its own, for example

    python -m encdec_adapt.train --config=configs/quickstart.py:run=adapted \
      --workdir=runs/quickstart/adapted

Both sizes start from the decoders of configs/decoders, as a user starts from a
Hugging Face folder. `size=default` takes 5 to 10 minutes on two cores. Expect
adapted far below scratch after 140 steps, an encoder that is used, and a loss
still above that of the decoder.

`size=full` takes at most two and a half hours. It trains `adapted`, `scratch`
and the control, the decoder trained on, for about one pass of the text, with
three seeds and the learning rates that were best in short runs. It then tunes
all three on questions (`configs/finetuning.py`) and measures what generating
costs. `size=smoke` is for tests.
"""

import dataclasses

from encdec_adapt import config as config_lib
from encdec_adapt import configs
from encdec_adapt.base import errors
from encdec_adapt.evaluation import study_stages
from encdec_adapt.models import model_config

RUNS = {
  'decoder_only': 'the causal decoder that is adapted',
  'decoder_only_small': 'the smaller decoder of the unbalanced pair',
  'adapted': 'balanced encoder-decoder from decoder_only',
  'scratch': 'the same encoder-decoder from random initialisation',
  'unbalanced': 'encoder from decoder_only, decoder from the small one',
  'decoder_only_continued': 'control: decoder_only for as many tokens more',
}
# Pretrained decoders, and digests of the documents held out from them.
DECODERS = configs.path('decoders')
FOLDERS = {'decoder_only': 'base', 'decoder_only_small': 'small'}
VOCABULARY = 2048
PROMPTS = (
  'The "with" statement is used to wrap the execution of a block with',
  'def __init__(self, name, value=None):\n    self.name = name\n',
  'Return the number of',
  'import os\nimport sys\n\n\nclass Test',
)
# What the full size trains to compare, with the rates and seeds of each. Rates
# below 2e-3 win in short runs of a trained decoder, and lose over a full pass.
COMPARED = ('adapted', 'scratch', 'decoder_only_continued')
LEARNING_RATES = (2e-3, 4e-3, 8e-3)
SEEDS = 3
# For the budgets of stages, on two cores.
SECONDS_PER_STEP = 0.6
TUNING_SECONDS = 1200


@dataclasses.dataclass(frozen=True)
class Size:
  """One size of the study.

  Attributes:
    root: folder of all its runs.
    max_bytes: most bytes of text that are read; 0 for all.
    adapt_steps: optimizer updates of a pair.
    evaluations: evaluations during the training of a pair.
    eval_rows: held-out rows.
    warmup_steps: first updates of a pair, with rising learning rates.
    rate_steps: updates of the runs that choose the learning rates; 0 for the
      rates of `get_config`, a single seed and no control.
  """

  root: str
  max_bytes: int
  adapt_steps: int
  evaluations: int
  eval_rows: int
  warmup_steps: int = 20
  rate_steps: int = 0


SIZES = {
  'smoke': Size('runs/quickstart_smoke', 400_000, 4, 2, 16),
  'default': Size('runs/quickstart', 3_000_000, 140, 4, 64),
  'full': Size('runs/quickstart_full', 0, 900, 18, 192, 40, rate_steps=130),
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
  """Returns the configuration of a `run` (of RUNS) at a `size` (of SIZES)."""
  args = config_lib.parse_arg(arg, size='default', run='decoder_only')
  size, run = _size(args['size']), args['run']
  if run not in RUNS:
    raise errors.UserError(
      f'run={run} is unknown; choose one of {", ".join(RUNS)}.'
    )
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
  # Importing TensorFlow costs a worker more than it saves on so little text.
  config.data.workers = 1
  config.data.vocabulary = f'{DECODERS}/base'
  config.data.shards = 2
  config.data.eval_rows = size.eval_rows
  config.train.log_every = 20
  config.optimizer.warmup_steps = size.warmup_steps
  if run.startswith('decoder_only'):
    _set_causal(config, size, run)
  else:
    _set_pair(config, size, run)
  steps = config.train.steps
  config.optimizer.warmup_steps = min(config.optimizer.warmup_steps, steps // 4)
  config.train.evaluators = f'loss={max(steps // size.evaluations, 1)}'
  config.checkpoint.every = max(steps // 2, 1)
  return config


def _set_causal(config, size, run):
  """Causal language model on rows of 256 tokens: pretraining, or more of it."""
  config.model.kind = 'decoder_only'
  config.data.folder = f'{size.root}/records/causal_lm'
  config.data.objective = 'causal_lm'
  config.data.decoder_length = 256
  config.optimizer.weight_decay = 0.01
  if run == 'decoder_only_continued':
    config.train.steps = size.adapt_steps
    config.init.mode = 'checkpoint'
    config.init.encoder = f'{size.root}/decoder_only'
    config.optimizer.learning_rate = 1e-3
  else:
    config.data.folder = f'{size.root}/records/pretraining'
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
  config.loss.distillation = 0.5
  config.train.steps = size.adapt_steps
  config.optimizer.learning_rate = 2e-3
  if run == 'adapted':
    config.init.mode = 'adapt'
  elif run == 'unbalanced':
    config.init.mode = 'adapt'
    config.init.decoder = f'{size.root}/decoder_only_small'
    # About 5 % of the steps, as K = 1000 is of the paper's.
    config.train.cross_attention_warmup = max(size.adapt_steps // 20, 1)
  if config.init.mode != 'random':
    config.init.encoder = f'{size.root}/decoder_only'


def get_study(arg=None):
  """Returns the stages of a size, in order; see `encdec_adapt.study`."""
  name = config_lib.parse_arg(arg, size='default')['size']
  size = _size(name)
  root = size.root
  sources = ('decoder_only',) if size.rate_steps else FOLDERS
  stages = [_import(size, run) for run in sources]
  stages.append(_records(name, 'adapted'))
  if size.rate_steps:
    stages.append(_records(name, 'decoder_only_continued'))
    training = [stage for run in COMPARED for stage in _repeated(name, run)]
    stages += [stage for run in COMPARED for stage in _sweep(name, run)]
  else:
    runs = 'adapted', 'scratch', 'unbalanced'
    training = [_train(name, run) for run in runs]
  runs = [*(stage.name for stage in training), 'decoder_only']
  stages += [*training, *_final_stages(root, runs)]
  tuned, note = '', ''
  if size.rate_steps:
    tuning = f'set=lookups,models={root},runs={"+".join(COMPARED)}'
    stages.append(
      study_stages.Stage(
        'tune',
        'study',
        (f'--study=finetuning:{tuning}',),
        budget_seconds=TUNING_SECONDS,
      )
    )
    tuned = f'{root}/finetuning_lookups'
  else:
    note = (
      f'{size.adapt_steps} steps are few: `bash launch/quickstart.sh'
      f' --size=full` trains {SIZES["full"].adapt_steps}, in which adapted ends'
      ' below the decoder that it was made from.'
    )
  return study_stages.Study(
    root=root,
    title='Adapting a decoder-only model on the text that Python carries',
    size=name,
    stages=tuple(stages),
    runs=tuple(runs),
    results=f'{root}/evaluation',
    samples=_samples(root),
    tuned=tuned,
    note=note,
  )


def _samples(root):
  """Path of the texts that the adapted model writes."""
  return f'{root}/samples.jsonl'


def _final_stages(root, runs):
  """Evaluation of all runs; generation with the adapted one, and its export."""
  adapted, exported = f'{root}/adapted', f'{root}/t5gemma'
  return [
    study_stages.Stage(
      'evaluate',
      'evaluate',
      (
        f'--records={root}/records/prefix_lm/eval',
        f'--output={root}/evaluation',
        '--cost=',
        *(f'--checkpoint={root}/{run}' for run in runs),
      ),
      budget_seconds=6 * len(runs),
    ),
    study_stages.Stage(
      'generate',
      'generate',
      (
        f'--checkpoint={adapted}',
        *(f'--prompt={prompt}' for prompt in PROMPTS),
        '--max_tokens=48',
        '--temperature=0.7',
        '--top_p=0.9',
        f'--output={_samples(root)}',
      ),
      budget_seconds=20,
    ),
    study_stages.Stage(
      'export',
      'convert',
      ('export', f'--checkpoint={adapted}', f'--output={exported}'),
      budget_seconds=10,
    ),
    study_stages.Stage(
      'verify',
      'convert',
      ('verify', adapted, exported, '--tolerance=1e-4'),
      budget_seconds=15,
    ),
  ]


def _flag(name, run):
  return f'--config=quickstart:size={name},run={run}'


def _import(size, run):
  """Imports a shipped Hugging Face folder."""
  return study_stages.Stage(
    f'import_{run}',
    'convert',
    (
      'import',
      f'--source={DECODERS}/{FOLDERS[run]}',
      f'--output={size.root}/{run}',
    ),
    budget_seconds=10,
  )


def _records(name, run):
  """Makes the records of a run, and its vocabulary where there is none."""
  return study_stages.Stage(
    f'records_{run}', 'materialize', (_flag(name, run),), budget_seconds=60
  )


def _train(name, run, *flags, folder=None, steps=0, rate_of=()):
  """A training run; its budget is for two cores, compiling included."""
  size = _size(name)
  folder = folder or run
  return study_stages.Stage(
    folder,
    'train',
    (_flag(name, run), f'--workdir={size.root}/{folder}', *flags),
    budget_seconds=30 + SECONDS_PER_STEP * (steps or size.adapt_steps),
    rate_of=rate_of,
  )


def _sweep(name, run):
  """A short run at every learning rate."""
  steps = _size(name).rate_steps
  return [
    _train(
      name,
      run,
      f'--config.train.steps={steps}',
      f'--config.optimizer.learning_rate={rate:g}',
      folder=f'{run}_lr_{rate:g}',
      steps=steps,
    )
    for rate in LEARNING_RATES
  ]


def _repeated(name, run):
  """A run at the best learning rate for each seed."""
  rates = tuple(stage.name for stage in _sweep(name, run))
  return [
    _train(
      name,
      run,
      f'--config.seed={seed}',
      folder=run if not seed else f'{run}_seed{seed}',
      rate_of=rates,
    )
    for seed in range(SEEDS)
  ]
