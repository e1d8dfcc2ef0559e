r"""What post-training is worth, on functions of Python's library.

    python -m encdec_adapt.study --study=adaptation:size=cpu
    python -m encdec_adapt.study --study=post_training:size=cpu

tunes the adapted pair and the decoder of as many parameters of `models`
(`runs/studies/adaptation_cpu`) on beginnings of functions
(`configs/functions.py`), post-trains them in every way of
`configs/post_training.md`, and measures what each is worth on functions of
held-out modules, and its price. Modules are the groups of its intervals; those
of the development part, a third, are left to choices of settings. `size=cpu`
has eight seeds, `size=quick` one, `size=smoke` is for tests. All start from the
first seed of `models`. Learning rates are those of `ARMS`; RLOO's and DPO's
were chosen on prompts of the earlier measurement. Single steps of it:

    python -m encdec_adapt.train --workdir=.. \
      --config=configs/studies/post_training.py:size=quick,run=pair_rloo

A run is MODEL_ARM, and starts from the model that was tuned with the same seed.
"""

import dataclasses
import json
import math

from absl import flags
import numpy as np

import encdec_adapt
from encdec_adapt import config as config_lib
from encdec_adapt import configs
from encdec_adapt.base import errors, option_strings
from encdec_adapt.cli import command
from encdec_adapt.configs import functions, post_training, sft
from encdec_adapt.data.sources import document_source
from encdec_adapt.evaluation.results import comparisons, results_store
from encdec_adapt.files import atomic, paths
from encdec_adapt.generation import answer_encoding, text_generation
from encdec_adapt.inference import log_likelihoods
from encdec_adapt.lab import pages, score_tables
from encdec_adapt.telemetry import compute_cost

# Model -> the run that it starts from, below the folder of the models.
MODELS = {'pair': 'adapted', 'decoder': 'wide'}
TOKENS = 48  # Most tokens of a prompt, and of a continuation.
SAMPLES = 8
MODEL = 'model'
# Measures of the price, and how they are shown.
_PRICES = dict.fromkeys(('kl', 'tokens', 'distinct', 'one_line'), '.2f')
_PRICES |= dict.fromkeys(('FLOPs', 'with sources'), '.1e')


@dataclasses.dataclass(frozen=True)
class Arm:
  """A way of training.

  Attributes:
    recipe: name of a recipe in `post_training.RECIPES`, or sft.
    share: steps, over those of the size.
    rate: learning rate.
    reward: reward of a policy: FILE#FUNCTION, or MODEL, the reward model of the
      same seed.
  """

  recipe: str
  share: float = 1.0
  rate: float = 5e-4
  reward: str = ''


_VALID = f'{configs.path("functions.py")}#valid'
ARMS = {
  'tuned': Arm('sft', 1.0, 1e-3),
  # As many FLOPs as a policy.
  'longer': Arm('sft', 4.2, 1e-3),
  'passing': Arm('sft', 1.0, 3e-4),
  'dpo': Arm('dpo', 1.0, 1e-4),
  'reward': Arm('reward', 1.0, 3e-4),
  'rloo': Arm('rloo', rate=1e-3, reward=_VALID),
  'rloo_model': Arm('rloo', rate=1e-3, reward=MODEL),
  'rloo_line': Arm(
    'rloo', rate=1e-3, reward=_VALID.replace('valid', 'one_line')
  ),
  'grpo': Arm('grpo', reward=_VALID),
  'distill': Arm('distill'),
}
# The arms of each model; the run that another starts from precedes it.
RUNS = [f'pair_{arm}' for arm in ARMS] + ['decoder_tuned', 'decoder_rloo']
# Taught by the tuned decoder.
RUNS.append(RUNS.pop(RUNS.index('pair_distill')))


@dataclasses.dataclass(frozen=True)
class Size:
  """A size of the study.

  Attributes:
    seeds: repetitions.
    steps: updates of an arm.
    prompts: training prompts that are sampled for preferences.
    held_out: held-out prompts that are measured.
    batch: prompts of a step.
  """

  seeds: int
  steps: int
  prompts: int
  held_out: int
  batch: int


SIZES = {
  'smoke': Size(1, 2, 48, 8, 8),
  'quick': Size(1, 40, 768, 128, 16),
  'cpu': Size(8, 40, 1536, 256, 16),
}


def _arguments(arg):
  args = config_lib.parse_arg(
    arg,
    size='quick',
    run='pair_tuned',
    models='runs/studies/adaptation_cpu',
  )
  if args['size'] not in SIZES or args['run'] not in RUNS:
    raise errors.UserError(
      f'size={args["size"]} must be one of {", ".join(SIZES)}, and'
      f' run={args["run"]} of {", ".join(RUNS)}.'
    )
  model, _, arm = args['run'].partition('_')
  root = f'{args["models"]}/post_training_{args["size"]}'
  return args | {'model': model, 'arm': arm}, root


def get_config(arg=None):
  """Returns the configuration of a `run` (of RUNS) at a `size` (of SIZES)."""
  args, root = _arguments(arg)
  size, arm = SIZES[args['size']], ARMS[args['arm']]
  # Its shape and vocabulary are those of the tuned model, not there yet.
  source = f'{args["models"]}/{MODELS[args["model"]]}'
  if arm.recipe == 'sft':
    config = sft.get_config(source=source)
  else:
    teacher = f'{root}/decoder_tuned' if arm.recipe == 'distill' else ''
    config = post_training.get_config(
      recipe=arm.recipe, source=source, teacher=teacher
    )
  if args['arm'] != 'tuned':
    config.init.encoder = f'{root}/{args["model"]}_tuned'
  config.data.folder = f'{root}/records'
  if text := _sampled(args['arm']):
    config.data.source = text.format(samples=f'{root}/samples')
    config.data.folder = f'{root}/samples/{arm.recipe}'
    config.data.eval_fraction, config.data.eval_rows = 0.2, 0
  else:
    config.data.source, config.data.eval_rows = _source(), size.held_out
    config.data.seqio_modules = ('encdec_adapt.configs.functions',)
  config.data.encoder_length, config.data.decoder_length = TOKENS, TOKENS + 1
  # Few samples pass, and a pass over the library takes seconds.
  config.data.passes = 8 if _sampled(args['arm']) else 2
  config.data.shards = config.data.workers = 1
  config.train.batch_size = config.train.eval_batch_size = 2 * size.batch
  if arm.reward or arm.recipe == 'distill':
    # Policies have a prompt in a row, and a few are longer than TOKENS.
    config.data.objective = 'pairs:too_long=drop'
    config.data.folder = f'{root}/records_prompts'
    config.data.eval_rows = config.train.eval_batch_size
  if arm.reward:
    config.train.batch_size = size.batch
    rollouts, rewards = config.train.rollouts, config.train.rewards
    rollouts.samples, rollouts.tokens = SAMPLES, TOKENS
    rollouts.cut, rollouts.cut_penalty, rollouts.max_kl = 'penalty', 1.0, 0.0
    if arm.reward == MODEL:
      rewards.models = (f'{root}/pair_reward',)
    else:
      rewards.functions = (arm.reward,)
  config.train.steps = math.ceil(arm.share * size.steps)
  config.train.log_every = 5
  config.evaluation.loss, config.evaluation.samples = 1000, 0
  config.checkpoint.every, config.checkpoint.keep_best = 1000, False
  config.optimizer.learning_rate = arm.rate
  config.optimizer.warmup_steps = 0
  config.compute.dtype = 'float32'
  config.compute.scan_unroll = 4
  config.compute.compile_cache = f'{args["models"]}/compiled'
  return config


def _sampled(arm):
  """Returns the source of an arm that learns from samples, else ''."""
  if arm == 'passing':
    return 'pairs:{samples}/passing.jsonl#prompt,chosen'
  if ARMS[arm].recipe in ('dpo', 'reward'):
    return 'preferences:{samples}/pairs.jsonl#prompt,chosen,rejected'
  return ''


def _arm(run, arg):
  """Returns an arm of the page, and what it starts from."""
  model, _, arm = run.partition('_')
  starts = {'init.encoder': f'{model}_tuned'} if arm != 'tuned' else {}
  if text := _sampled(arm):
    starts['data.source'] = text
  if ARMS[arm].recipe == 'distill':
    starts['teacher.checkpoint'] = 'decoder_tuned'
  if ARMS[arm].reward == MODEL:
    starts['train.rewards.models'] = 'pair_reward'
  return pages.Arm(run, f'studies/post_training:{arg},run={run}', starts=starts)


def get_study(arg=None):
  """Returns the page of a size; see `encdec_adapt.study`."""
  args, root = _arguments(arg)
  seeds = tuple(range(SIZES[args['size']].seeds))
  arg = f'size={args["size"]},models={option_strings.quote(args["models"])}'
  compared = tuple(run for run in RUNS if run != 'pair_reward')

  def step(name, step_name, *flags, seeds=seeds):
    flags = f'--step={step_name}', f'--size={arg}', *flags
    flags += (f'--output={{{name}}}',)
    return pages.Command(
      name, 'configs.studies.post_training', flags, seeds=seeds
    )

  measures = [
    step(
      f'measure_{run}',
      'measure',
      f'--run={run}',
      f'--model={{{run}}}',
      f'--tuned={{{run.partition("_")[0]}_tuned}}',
    )
    for run in RUNS
  ]
  suffixes = [f'_seed{seed}' if seed else '' for seed in seeds]
  table = (f'--measures={{measure_{r}{x}}}' for r in RUNS for x in suffixes)
  return pages.Study(
    name='post_training',
    title="Post-training on functions of Python's library",
    size=args['size'],
    root=root,
    arms=tuple(_arm(run, arg) for run in RUNS),
    seeds=seeds,
    evaluations=(
      pages.Evaluation('evaluate', records='pair_tuned', models=compared),
    ),
    commands=(
      step('samples', 'collect', '--model={pair_tuned}'),
      *measures,
      step('table', 'table', *table, seeds=()),
    ),
    table='table',
  )


define_flags = command.define(
  command.choice(
    'step',
    ['collect', 'measure', 'table'],
    'Samples a tuned model for preferences, measures a run, or writes a table.',
  ),
  command.string('size', 'Argument of the study.', default='size=quick'),
  command.string('run', 'Name of the run.', default='pair_tuned'),
  command.string('model', 'Work directory of the model.'),
  command.string('tuned', 'Work directory of the model that it began as.'),
  command.string('output', 'Folder that gets the results.'),
  command.flag('multi_string', 'measures', 'Folders of measures.', default=[]),
)


def main(values: flags.FlagValues) -> int:
  """Runs a step of the study that no other command does."""
  command.require(values, 'step', 'output')
  args, _ = _arguments(f'{values.size},run={values.run}')
  size, output = SIZES[args['size']], paths.at(values.output)
  if values.step == 'table':
    _write_table(output, values.measures, size)
  elif values.step == 'collect':
    _collect(output, values.model, size)
  else:
    _measure(output, values.model, values.tuned, args, size)
  return 0


def _source():
  return f'functions:{configs.path("decoders/held_out.txt")}'


def _prompts(split, vocabulary):
  """Returns prompts of a split that fit into a row, BOS included, by module.

  Those of the development part are left out.
  """
  source = functions.FunctionSource(_source())
  documents = source.documents(lambda x: source.in_split(x, split, 0, 0))
  rows = [
    (json.loads(x.text)[0], document_source.group(x.id)) for x in documents
  ]
  rows = [x for x in rows if not document_source.is_development(x[1])]
  return [x for x in rows if len(vocabulary.encode(x[0])) < TOKENS]


def _sample(model, prompts, count, temperature):
  options = text_generation.Options(
    max_tokens=TOKENS, temperature=temperature, batch_size=128
  )
  texts = {f'prompt {i}': prompt for i, prompt in enumerate(prompts)}
  encoder, ids = text_generation.encode(texts, model.stored, options, TOKENS)
  repeated = dict(enumerate(x for x in ids for _ in range(count)))
  drawn = dict(text_generation.complete(model, repeated, encoder, options))
  drawn = [drawn[i] for i in range(len(repeated))]
  return ids, [drawn[i : i + count] for i in range(0, len(drawn), count)]


def _passes(prompt, completion):
  """Returns 1 for a completion that ends, and is valid; else 0."""
  ended = completion.ended != 'length'
  return int(ended and functions.is_valid(prompt, completion.text))


def _passing(prompts, groups):
  return [_passes(p, x[0]) for p, x in zip(prompts, groups, strict=True)]


def _collect(folder, path, size):
  """Writes a tuned model's passing samples, and a pair for each prompt."""
  model = encdec_adapt.load(path)
  rows = _prompts('train', model.tokenizer)[: size.prompts]
  prompts = [prompt for prompt, _ in rows]
  pairs, passing = [], []
  _, groups = _sample(model, prompts, SAMPLES, 1.0)
  for prompt, group in zip(prompts, groups, strict=True):
    by_score = {0: [], 1: []}
    for completion in group:
      by_score[_passes(prompt, completion)].append(completion)
    rejected = [x.text for x in by_score[0] if x.text and x.ended == 'eos']
    rows = [{'prompt': prompt, 'chosen': x.text} for x in by_score[1]]
    passing += rows
    if rows and rejected:
      pairs.append(rows[0] | {'rejected': rejected[0]})
  folder.mkdir(parents=True, exist_ok=True)
  for name, rows in ('passing', passing), ('pairs', pairs):
    lines = ''.join(json.dumps(row) + '\n' for row in rows)
    (folder / f'{name}.jsonl').write_text(lines)
  count = len(prompts) * SAMPLES
  print(f'{len(passing)} of {count} samples pass; {len(pairs)} pairs')


def _measure(folder, path, tuned_path, args, size):
  """Measures a run on held-out prompts; a reward model by the best of 8."""
  run, tuned = args['run'], encdec_adapt.load(tuned_path)
  is_judge = args['arm'] == 'reward'
  model = tuned if is_judge else encdec_adapt.load(path)
  rows = _prompts('eval', tuned.tokenizer)[: size.held_out]
  prompts, modules = map(list, zip(*rows, strict=True))
  _, greedy = _sample(model, prompts, 1, 0.0)
  ids, drawn = _sample(model, prompts, SAMPLES if is_judge else 1, 1.0)
  if is_judge:
    # An upper bound (arXiv:2401.01879).
    kl = math.log(SAMPLES) - (SAMPLES - 1) / SAMPLES
    scores = answer_encoding.score_texts(
      encdec_adapt.load(path),
      [prompt for prompt in prompts for _ in range(SAMPLES)],
      [x.text for group in drawn for x in group],
      [x.ended != 'length' for group in drawn for x in group],
      batch_size=32,
    )
    best = scores.reshape(-1, SAMPLES).argmax(axis=1)
    drawn = greedy = [[x[i]] for x, i in zip(drawn, best, strict=True)]
  else:
    pairs = [
      log_likelihoods.Pair(context, x[0].tokens)
      for context, x in zip(ids, drawn, strict=True)
    ]
    scored = tuned.score_tokens(pairs, batch_size=128)
    log_probs = [x[0].log_probs.sum() for x in drawn]
    kl = np.mean(log_probs) - np.mean([x.log_prob for x in scored])
  texts = [x[0].text for x in greedy]
  summary = atomic.read_json(paths.at(path) / compute_cost.SUMMARY)
  measures = {
    'modules': modules,
    'greedy': _passing(prompts, greedy),
    'sampled': _passing(prompts, drawn),
    'kl': float(kl),
    'tokens': float(np.mean([len(x[0].tokens) for x in drawn])),
    'distinct': len(set(texts)) / len(texts),
    'one_line': float(np.mean(functions.one_line(prompts, texts, []))),
    'texts': texts[:8],
    'FLOPs': summary['flops'],
    'with sources': summary['inclusive']['flops'],
  }
  atomic.write_json(folder / 'measures.json', measures)
  for name in ('greedy', 'sampled'):
    print(f'{run}: {np.mean(measures[name]):.3f} {name}, KL {kl:.1f}')


def _write_table(folder, measures, size):
  """Writes each run's metrics and price, as means over seeds."""
  rows, rates = [], {}
  read = [atomic.read_json(paths.at(x) / 'measures.json') for x in measures]
  for i, name in enumerate(RUNS):
    seeds = read[i * size.seeds : (i + 1) * size.seeds]
    is_judge = name == 'pair_reward'
    row = {'run': f'best of {SAMPLES} by {name}' if is_judge else name}
    for metric in ('greedy', 'sampled'):
      # Averages seeds by prompt: intervals are over prompts, by module.
      values = np.mean([x[metric] for x in seeds], axis=0).tolist()
      groups = seeds[0]['modules']
      score = results_store.mean_score(name, metric, values, groups)
      low, high = comparisons.interval(score)
      rates[name, metric] = score
      row[metric] = f'{score.value:.3f} ({low:.2f} to {high:.2f})'
    for metric, form in _PRICES.items():
      row[metric] = format(np.mean([x[metric] for x in seeds]), form)
    rows.append(row)
  atomic.write_json(folder / 'table.json', {'rows': rows})
  print(score_tables.text(rows))
  pair, decoder = (rates[f'{x}_rloo', 'greedy'] for x in MODELS)
  paired = comparisons.compare([decoder], [pair])
  print(
    f'pair - decoder, rloo: {paired.difference:+.3f} ({paired.low:+.3f} to'
    f' {paired.high:+.3f}, {paired.test})'
  )


if __name__ == '__main__':
  command.main(__doc__, define_flags, main)
