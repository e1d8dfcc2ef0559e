r"""What adaptation is worth after fine-tuning, on the quickstart's models.

    bash launch/quickstart.sh
    python -m encdec_adapt.study --study=tuning:set=lookups
    python -m encdec_adapt.study \
      --study=tuning:set=gsm8k,file=/data/gsm8k/train.jsonl

Fine-tunes the adapted pair, the pair from scratch and the decoder of `models`
(`runs/quickstart`) on answers alone, with three seeds each, evaluates them on
the same held-out answers, and writes `models`/tuning_SET/report.html with
intervals over seeds. `lookups` asks for an entry of a table
(`configs/lookups.py`); the adapted pair is also tuned with MEAP's masked copies
(arXiv:2502.07490). `gsm8k` reads questions and worked answers.
`runs=adapted+decoder_only_continued` names the models that are tuned. The cost
of a request is that of a row: a full input and a full answer. On two cores
gsm8k took 2 min 38 s, and lookups 26 min 38 s. All have the same learning rate.
"""

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.configs import pretrained, sft
from encdec_adapt.evaluation.studies import pages

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
SEEDS = (0, 1, 2)


def _arguments(arg):
  args = config_lib.parse_arg(
    arg,
    set='lookups',
    run='adapted',
    models='runs/quickstart',
    size='',
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


def get_config(arg=None):
  """Returns the configuration of a `run` (of RUNS) on a `set` (of SETS).

  Its shape is that of the run in the folder `models`, or of the quickstart's
  `size`, whose models need not be there yet.
  """
  args = _arguments(arg)
  run, meap = RUNS[args['run']], 'separate' * args['run'].endswith('_meap')
  if args['size']:
    # Late: the quickstart's page has arms of this one.
    from encdec_adapt.configs import quickstart

    source = quickstart.get_config(f'size={args["size"]},run={run}')
    config, models = config_lib.defaults(), quickstart.SIZES[args['size']].root
    config.model.update(source.model)
    config.data.vocabulary = source.data.vocabulary
    config.data.train_vocabulary = False
    config.init.mode, config.init.encoder = 'checkpoint', f'{models}/{run}'
  else:
    models = args['models']
    config = pretrained.get_config(f'source={models}/{run}')
  folder = f'{models}/tuning_{args["set"]}'
  sft.set_tuning(config, meap=meap)
  inputs, answers, max_bytes = SETS[args['set']]
  config.data.source = 'lookups'
  config.data.seqio_modules = 'encdec_adapt.configs.lookups'
  if args['file']:
    config.data.source = f'pairs:{args["file"]}#question,answer'
  config.data.encoder_length, config.data.decoder_length = inputs, answers
  config.data.max_bytes = max_bytes
  config.data.folder = f'{folder}/records' + '_meap' * bool(meap)
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
  config.compute.compile_cache = f'{folder}/compiled'
  return config


def tuned(size, runs):
  """Returns arms that tune runs of the quickstart on look-ups, and measures."""
  arms = tuple(
    pages.Arm(
      f'{run}_tuned',
      f'tuning:size={size},run={run}',
      starts={'init.encoder': RUNS[run]},
    )
    for run in runs
  )
  return arms, _evaluations('lookups', arms)


def _evaluations(name, arms):
  """Returns the losses of tuned arms on held-out answers, and their costs."""
  inputs, answers, _ = SETS[name]
  models = tuple(arm.name for arm in arms)
  return (
    pages.Evaluation(
      'answers',
      metrics=('held_out/loss', 'held_out/exact_match'),
      records=models[0],
      models=models,
    ),
    pages.Evaluation(
      'cost',
      (f'--cost={inputs},{answers}',),
      metrics=('cost/decode_ms',),
      models=models,
      all_seeds=False,  # Seeds cost the same.
      seconds=30,
    ),
  )


def get_study(arg=None):
  """Returns the page of a `set`; see `encdec_adapt.study`."""
  args = _arguments(arg)
  rest = ''.join(f',{k}={args[k]}' for k in ('models', 'file') if args[k])
  arms = tuple(
    pages.Arm(run, f'tuning:set={args["set"]},run={run}{rest}')
    for run in args['runs'].split('+')
  )
  return pages.Study(
    name='tuning',
    title=f'Fine-tuning on answers: {args["set"]}',
    size=args['set'],
    root=f'{args["models"]}/tuning_{args["set"]}',
    arms=arms,
    seeds=SEEDS,
    claims=_claims(args),
    evaluations=_evaluations(args['set'], arms),
  )


def _claims(args):
  """Returns the claims about the runs that are tuned."""
  runs = args['runs'].split('+')
  claims = []
  for other, sentence, source, paper in (
    (
      'decoder_only',
      'The adapted pair ends below its decoder after fine-tuning.',
      'Encoder-Decoder Gemma (arXiv:2504.06225), Table 1',
      '+7.1 points at 2B after instruction tuning, +1.8 before',
    ),
    (
      'scratch',
      'The adapted pair ends below the pair from scratch after fine-tuning.',
      'Encoder-Decoder Gemma (arXiv:2504.06225), Table 4',
      '+2.6 points at 2B',
    ),
    (
      'adapted_meap',
      "MEAP's masked copies make tuning better.",
      'MEAP (arXiv:2502.07490), Table 4',
      '+11.8 points on documents',
    ),
  ):
    if {other, 'adapted'} <= {*runs}:
      pair = (
        (other, 'adapted') if other != 'adapted_meap' else ('adapted', other)
      )
      claims.append(
        pages.Claim(
          sentence=sentence,
          source=source,
          paper=paper,
          contrast=pair,
          metric='held_out/loss',
          direction='less',
          smallest=0.05,
          reason='a twentieth of the loss of a tuned pair',
        )
      )
  return tuple(claims)
