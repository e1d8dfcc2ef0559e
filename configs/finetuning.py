r"""What adaptation is worth after fine-tuning, on the quickstart's models.

    bash launch/quickstart.sh
    python -m encdec_adapt.study --study=configs/finetuning.py:set=lookups
    python -m encdec_adapt.study \
      --study=configs/finetuning.py:set=gsm8k,file=/data/gsm8k/train.jsonl

Fine-tunes the adapted pair, the pair from scratch and the decoder of `models`
(`runs/quickstart`) on answers alone, with three seeds each, evaluates them on
the same held-out answers, and writes `models`/finetuning_SET/report.html with
paired intervals. `lookups` asks for an entry of a table (`configs/lookups.py`)
and counts exact matches; the adapted pair is also tuned with MEAP's masked
copies (arXiv:2502.07490). `gsm8k` reads questions and worked answers.
`runs=adapted+decoder_only_continued` names the models that are tuned. The cost
of a request is that of a row: a full input and a full answer. On two cores
gsm8k took 2 min 38 s, and lookups 26 min 38 s. All have the same learning rate.
"""

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.configs import sft
from encdec_adapt.evaluation import study_stages

# Set -> lengths of inputs and answers in tokens, and bytes of text used.
SETS = {'lookups': (384, 128, 0), 'gsm8k': (192, 256, 300_000)}
# Run -> what it starts from, below the folder of the models.
RUNS = {
  'adapted': 'adapted',
  'scratch': 'scratch',
  'decoder_only': 'decoder_only',
  'decoder_only_continued': 'decoder_only_continued',
  'adapted_meap': 'adapted',
}
SEEDS = 3


def _arguments(arg):
  args = config_lib.parse_arg(
    arg,
    set='lookups',
    run='adapted',
    models='runs/quickstart',
    file='',
    runs='',
  )
  if not args['runs']:
    meap = '+adapted_meap' * (args['set'] == 'lookups')
    args['runs'] = f'adapted+scratch+decoder_only{meap}'
  runs = {args['run'], *args['runs'].split('+')}
  if args['set'] not in SETS or not runs <= RUNS.keys():
    raise errors.UserError(
      f'set={args["set"]} must be one of {", ".join(SETS)}, and'
      f' run={args["run"]} and runs={args["runs"]} of {", ".join(RUNS)}.'
    )
  if (args['set'] == 'gsm8k') != bool(args['file']):
    raise errors.UserError(
      f'file={args["file"]!r} with set={args["set"]}: gsm8k needs the path of'
      ' its questions, and only it has one.'
    )
  return args


def _root(args):
  return f'{args["models"]}/finetuning_{args["set"]}'


def get_config(arg=None):
  """Returns the configuration of a `run` (of RUNS) on a `set` (of SETS)."""
  args = _arguments(arg)
  meap = ',meap=separate' if args['run'] == 'adapted_meap' else ''
  config = sft.get_config(f'source={args["models"]}/{RUNS[args["run"]]}{meap}')
  inputs, answers, max_bytes = SETS[args['set']]
  config.data.source = 'lookups'
  config.data.seqio_modules = 'encdec_adapt.configs.lookups'
  if args['file']:
    config.data.source = f'pairs:{args["file"]}#question,answer'
  config.data.encoder_length, config.data.decoder_length = inputs, answers
  config.data.max_bytes = max_bytes
  config.data.folder = f'{_root(args)}/records' + '_meap' * bool(meap)
  config.data.eval_fraction = 0.1
  config.data.eval_rows = 128
  config.data.passes = 1
  config.data.shards = config.data.workers = 1
  config.train.batch_size = config.train.eval_batch_size = 16
  config.train.log_every = 20
  # The evaluations before the first step and after the last suffice.
  config.train.evaluators = 'loss=1000'
  config.checkpoint.every = 1000
  config.optimizer.learning_rate = 2e-3
  config.compute.dtype = 'float32'
  config.compute.compile_cache = f'{_root(args)}/compiled'
  return config


def get_study(arg=None):
  """Returns the stages of a `set`; see `encdec_adapt.study`."""
  args = _arguments(arg)
  root = _root(args)
  models = args['runs'].split('+')

  def flag(run):
    """Returns the flag that chooses the configuration of a run."""
    chosen = ''.join(f',{key}={args[key]}' for key in ('models', 'file'))
    chosen = f'set={args["set"]},run={run}{chosen}'.removesuffix(',file=')
    return f'--config=finetuning:{chosen}'

  stages = [
    study_stages.Stage(
      f'records_{run}', 'materialize', (flag(run),), budget_seconds=60
    )
    for run in models
    # The others read those of the first.
    if run in (models[0], 'adapted_meap')
  ]
  runs = {
    run if not seed else f'{run}_seed{seed}': (run, seed)
    for run in models
    for seed in range(SEEDS)
  }
  stages += [
    study_stages.Stage(
      name,
      'train',
      (flag(run), f'--workdir={root}/{name}', f'--config.seed={seed}'),
      budget_seconds=100,
    )
    for name, (run, seed) in runs.items()
  ]
  inputs, answers, _ = SETS[args['set']]
  stages += [
    study_stages.Stage(
      name,
      'evaluate',
      (
        *flags,
        f'--output={root}/evaluation',
        *(f'--checkpoint={root}/{run}' for run in evaluated),
      ),
      budget_seconds=seconds * len(evaluated),
    )
    for name, flags, evaluated, seconds in (
      # Seeds cost the same. Before the losses, whose report replaces this one.
      ('cost', (f'--cost={inputs},{answers}',), models, 30),
      ('evaluate', (f'--records={root}/records/eval', '--cost='), runs, 10),
    )
  ]
  return study_stages.Study(
    root=root,
    title=f'Fine-tuning on answers: {args["set"]}',
    size=args['set'],
    stages=tuple(stages),
    runs=tuple(runs),
    results=f'{root}/evaluation',
  )
