r"""What post-training is worth, on functions of Python's library.

    python -m encdec_adapt.study --study=post_training:size=cpu

Tunes the adapted pair and the wider decoder of `adaptation`, which has as many
parameters, on beginnings of functions (configs/functions.py), post-trains them
in every way of configs/post_training.md, and measures what each is worth on
functions of held-out modules, and its price: `kl` is that of a model's samples
from the model that it began as. Modules are the groups of the intervals; those
of the development part, 10 of 27, are left to choices of settings. `cpu` has
eight seeds, `quick` one and the learning rates of `ARMS`, `smoke` is for tests.

At cpu every arm chooses its learning rate: policies by their reward on prompts
of the development part, tunings and distillation by their loss there, and what
learns from samples of training prompts by its loss on a fifth of the samples.

Not controlled: policies are trained on the measure that is reported, `passing`,
`dpo` and `reward` on samples sorted by it; `pair_longer` is not, and its rate
is that of the lowest loss, not of the most passes. No arm tunes on passing
samples for as many FLOPs as RLOO takes, so that the second claim also compares
data with and without the check. Pair and decoder have equal parameters and
steps; the decoder takes twice the FLOPs of the pair in tuning and 2.9 times in
RLOO. The pair was adapted with a teacher. The decoder is from random weights
and begins .15 nats behind on text; after tuning .06 of its answers pass, .16 of
the pair's. Of the answers after RLOO .25 pass at another prompt, too (the
decoder's: .06): less these, the effects are .27 and .20, where .46 and .40
stand. In samples they are .37 and .48, alike over seeds; of the greedy answers
of `pair_rloo` .36 to .88 pass, by seed. RLOO shortens the answers of the pair
from 30 to 13 tokens, those of the decoder from 28 to 14. Longer tuning gains
.05, as much as the smallest effect that matters.

The rate of `decoder_rloo` was chosen by one run with a reward of .37 on
development prompts; eight seeds at it end at -.20 to .17 (a cut answer counts
-1), and one run at three times the rate at .16: the decoder may not have its
best rate, and 40 steps raise its reward from -.34 to .02, that of the pair from
-.18 to .78. The loss on preferences chooses the highest of five rates (.0027)
for `pair_dpo`, which spoils it: .02 of its answers pass. Every rate of
`pair_distill` raises the loss on true continuations, so that the lowest of five
is chosen, and the model moves little.
All seeds start from the first seed of both, so that intervals leave out their
training; rates are chosen in runs from the first seed's tuned model.
`pair_rloo_model` and `pair_rloo_line` share the rate of `pair_rloo`. `cpu` took
4.2 hours of stages, two at a time on two cores.

A run is MODEL_ARM, and starts from the model that was tuned with the same seed.
A single one, of models in the study's folder:

    python -m encdec_adapt.train --workdir=.. \
      --config=configs/studies/post_training.py:size=quick,run=pair_rloo
"""

import dataclasses
import functools
import json
import math

from absl import flags

import encdec_adapt
from encdec_adapt import config as config_lib
from encdec_adapt import configs
from encdec_adapt.base import errors
from encdec_adapt.cli import command
from encdec_adapt.configs import functions, post_training, sft
from encdec_adapt.configs.studies import adaptation, shared
from encdec_adapt.data.sources import document_source
from encdec_adapt.evaluation.results import results_store
from encdec_adapt.files import paths
from encdec_adapt.generation import answer_encoding, text_generation
from encdec_adapt.inference import log_likelihoods
from encdec_adapt.lab import pages

# Model -> the arm of `adaptation` that it starts from.
MODELS = {'pair': 'adapted', 'decoder': 'wide'}
TOKENS = 48  # Most tokens of a prompt, and of a continuation.
SAMPLES = 8
MODEL = 'model'
MODULE = 'configs.studies.post_training'
TASK = 'functions'
MEASURES = 'greedy', 'sampled'  # How answers are drawn.


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
# Run -> the run whose learning rate it shares.
SHARED = dict.fromkeys(('pair_rloo_model', 'pair_rloo_line'), 'pair_rloo')


@dataclasses.dataclass(frozen=True)
class Size:
  """A size of the study.

  Attributes:
    seeds: repetitions.
    steps: updates of an arm.
    prompts: training prompts that are sampled for preferences.
    held_out: most held-out rows, and prompts that are measured; there are 350
      rows, and 180 prompts outside of the development part that fit; reports
      count at most 32 of a module, 152.
    batch: prompts of a step.
    development: most rows of the development part that a job evaluates on; 113
      prompts of it fit.
    factors: learning rates that are tried, over those of `ARMS`.
  """

  seeds: int
  steps: int
  prompts: int
  held_out: int
  batch: int
  development: int
  factors: tuple[float, ...] = (1.0,)


SIZES = {
  # Two steps choose nothing.
  'smoke': Size(1, 2, 48, 8, 8, 0),
  'quick': Size(1, 40, 768, 128, 16, 64),
  'cpu': Size(8, 40, 1536, 400, 16, 128, (1 / 3, 1.0, 3.0)),
}


def _arguments(arg):
  args = config_lib.parse_arg(arg, size='quick', run='pair_tuned')
  if args['size'] not in SIZES or args['run'] not in RUNS:
    raise errors.UserError(
      f'size={args["size"]} must be one of {", ".join(SIZES)}, and'
      f' run={args["run"]} of {", ".join(RUNS)}.'
    )
  model, _, arm = args['run'].partition('_')
  root = f'runs/studies/post_training_{args["size"]}'
  return args | {'model': model, 'arm': arm}, root


def _source_page(size):
  """Returns the page of the models that all start from."""
  return adaptation.get_study(f'size={size if size == "smoke" else "cpu"}')


@functools.cache
def _shapes(size):
  """Returns the model that each run of a size starts from, by its name."""
  arms = {x.name: x for x in _source_page(size).arms}
  return {
    name: shared.settings(arms[arm]).model for name, arm in MODELS.items()
  }


def get_config(arg=None):
  """Returns the configuration of a `run` (of RUNS) at a `size` (of SIZES)."""
  args, root = _arguments(arg)
  size, arm = SIZES[args['size']], ARMS[args['arm']]
  config = config_lib.defaults()
  config_lib.set_model(config.model, _shapes(args['size'])[args['model']])
  config.init.mode = 'checkpoint'
  config.init.encoder = f'{root}/{MODELS[args["model"]]}'
  config.data.vocabulary = configs.path('decoders/base')
  config.data.train_vocabulary = False
  sft.set_tuning(config)
  if arm.recipe != 'sft':
    post_training.set_recipe(config, arm.recipe)
  if arm.recipe == 'distill':
    config.teacher.checkpoint = f'{root}/decoder_tuned'
  if args['arm'] != 'tuned':
    config.init.encoder = f'{root}/{args["model"]}_tuned'
  config.data.folder = f'{root}/records'
  if text := _sampled(args['arm']):
    config.data.source = text.format(samples=f'{root}/samples')
    config.data.folder = f'{root}/samples/{arm.recipe}'
    config.data.eval_fraction, config.data.eval_rows = 0.2, 0
  else:
    config.data.source, config.data.eval_rows = _source(), size.held_out
    config.data.development_rows = size.development
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
  return config


def _sampled(arm):
  """Returns the source of an arm that learns from samples, else ''."""
  if arm == 'passing':
    return 'pairs:{samples}/passing.jsonl#prompt,chosen'
  if ARMS[arm].recipe in ('dpo', 'reward'):
    return 'preferences:{samples}/pairs.jsonl#prompt,chosen,rejected'
  return ''


def _arm(run, arg, rates):
  """Returns an arm of the page, and what it starts from."""
  model, _, arm = run.partition('_')
  start = MODELS[model] if arm == 'tuned' else f'{model}_tuned'
  starts = {'init.encoder': start}
  if text := _sampled(arm):
    starts['data.source'] = text
  if ARMS[arm].recipe == 'distill':
    starts['teacher.checkpoint'] = 'decoder_tuned'
  if ARMS[arm].reward == MODEL:
    starts['train.rewards.models'] = 'pair_reward'
  rate = f'rate_{SHARED.get(run, run)}'
  rate = rate if rate in {x.name for x in rates} else ''
  config = f'studies/post_training:{arg},run={run}'
  return pages.Arm(run, config, starts=starts, rate=rate)


def _rate(run, size):
  """Returns the choice of the learning rate of a run."""
  arm = ARMS[run.partition('_')[2]]
  values = tuple(x * arm.rate for x in size.factors)
  metric = 'reward' if arm.reward else 'loss'
  return pages.Rate(f'rate_{run}', run, values, metric=metric)


def get_study(arg=None):
  """Returns the page of a size; see `encdec_adapt.study`."""
  args, _ = _arguments(arg)
  name, size = args['size'], SIZES[args['size']]
  source, arg = _source_page(name), f'size={name}'
  seeds = tuple(range(size.seeds))
  started = [
    dataclasses.replace(x, seeds=source.seeds[:1])
    for x in source.arms
    if x.name in MODELS.values()
  ]
  rates = [x for x in source.rates if x.arm in MODELS.values()]
  if len(size.factors) > 1:
    rates += [_rate(run, size) for run in RUNS if run not in SHARED]
  collect, measure = (
    (f'--step={step}', f'--prompts={count}', f'--samples={SAMPLES}')
    for step, count in (('collect', size.prompts), ('measure', size.held_out))
  )
  collect += '--checkpoint={pair_tuned}', '--output={samples}'
  return pages.Study(
    name='post_training',
    title="Post-training on functions of Python's library",
    size=name,
    arms=(*started, *(_arm(run, arg, rates) for run in RUNS)),
    seeds=seeds,
    rates=tuple(rates),
    evaluations=(
      pages.Evaluation(
        'evaluate',
        records='pair_tuned',
        models=tuple(run for run in RUNS if run != 'pair_reward'),
      ),
      pages.Evaluation(
        'measured',
        measure,
        (f'{TASK}/greedy', f'{TASK}/sampled'),
        models=tuple(RUNS),
        floors={f'{TASK}/{x}': f'{TASK}/{x}_of_others' for x in MEASURES},
        module=MODULE,
      ),
    ),
    commands=(
      *(x for x in source.commands if x.name == 'base'),
      pages.Command('samples', MODULE, collect, seeds=seeds),
    ),
    claims=CLAIMS,
    note=shared.note(__doc__),
  )


_FIELDS = {'metric': f'{TASK}/greedy', 'direction': 'greater', 'smallest': 0.05}
_FIELDS |= {'reason': 'half of what longer tuning gained in a first run'}
CLAIMS = shared.claims(
  (
    ('decoder_rloo', 'pair_rloo'),
    'After RLOO, the pair passes more often than a decoder of its parameters.',
    shared.OURS,
    '-',
    {**_FIELDS, 'primary': True},
  ),
  (
    ('pair_longer', 'pair_rloo'),
    'RLOO passes more often than tuning for as many FLOPs.',
    shared.OURS,
    '-',
    {**_FIELDS, 'primary': True},
  ),
  (
    ('decoder_tuned', 'pair_tuned'),
    'Before RLOO, the pair passes more often than the decoder.',
    shared.OURS,
    '-',
    _FIELDS,
  ),
)


define_flags = command.define(
  command.choice(
    'step',
    ['collect', 'measure'],
    'Samples a tuned model for preferences, or measures a model.',
  ),
  command.integer('prompts', 'Most prompts.', default=256, lower_bound=1),
  command.integer('samples', 'Samples of a prompt.', default=8, lower_bound=1),
  command.string('checkpoint', 'Work directory of the model.'),
  command.string('output', 'Folder that gets the results.'),
)


def main(values: flags.FlagValues) -> int:
  """Runs a step of the study that no other command does."""
  command.require(values, 'step', 'checkpoint', 'output')
  step = {'collect': _collect, 'measure': _measure}[values.step]
  counts = values.prompts, values.samples
  step(paths.at(values.output), values.checkpoint, *counts)
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


def _collect(folder, path, count, samples):
  """Writes a tuned model's passing samples, and a pair for each prompt."""
  model = encdec_adapt.load(path)
  prompts = [prompt for prompt, _ in _prompts('train', model.tokenizer)[:count]]
  pairs, passing = [], []
  _, groups = _sample(model, prompts, samples, 1.0)
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
  count = len(prompts) * samples
  print(f'{len(passing)} of {count} samples pass; {len(pairs)} pairs')


def _measure(folder, path, count, samples):
  """Measures a run on held-out prompts; a reward model by its best sample."""
  config, model = config_lib.load_run(path), encdec_adapt.load(path)
  start, judge = encdec_adapt.load(config.init.encoder), None
  if not config.model.architecture.generates:
    model, judge = start, model
  rows = _prompts('eval', model.tokenizer)[:count]
  prompts, modules = map(list, zip(*rows, strict=True))
  _, greedy = _sample(model, prompts, 1, 0.0)
  ids, drawn = _sample(model, prompts, samples if judge else 1, 1.0)
  if judge:
    values = answer_encoding.score_texts(
      judge,
      [prompt for prompt in prompts for _ in range(samples)],
      [x.text for group in drawn for x in group],
      [x.ended != 'length' for group in drawn for x in group],
      batch_size=32,
    )
    best = values.reshape(-1, samples).argmax(axis=1)
    drawn = greedy = [[x[i]] for x, i in zip(drawn, best, strict=True)]
    # An upper bound (arXiv:2401.01879).
    kl = [math.log(samples) - (samples - 1) / samples] * len(prompts)
  else:
    pairs = [
      log_likelihoods.Pair(context, x[0].tokens)
      for context, x in zip(ids, drawn, strict=True)
    ]
    before = start.score_tokens(pairs, batch_size=128)
    kl = [
      x[0].log_probs.sum() - y.log_prob
      for x, y in zip(drawn, before, strict=True)
    ]
  texts = [x[0].text for x in greedy]
  measures = {
    'kl': kl,
    'tokens': [len(x[0].tokens) for x in drawn],
    'one_line': functions.one_line(prompts, texts, []),
    # 1 for the first of equal texts.
    'distinct': [text not in texts[:i] for i, text in enumerate(texts)],
  }
  for name, answers in zip(MEASURES, (greedy, drawn), strict=True):
    measures[name] = _passing(prompts, answers)
    # Answers that pass whatever was asked.
    measures[f'{name}_of_others'] = _passing(
      prompts, [*answers[1:], answers[0]]
    )
  scores = [
    results_store.mean_score(TASK, name, values, modules)
    for name, values in measures.items()
  ]
  for x in scores:
    print(f'{x.metric}: {x.value:.3f}')
  made = results_store.Model(path, None, model.stored.fingerprint)
  with results_store.Store(folder) as store:
    store.add(made, {'prompts': len(prompts)}, scores)


if __name__ == '__main__':
  command.main(__doc__, define_flags, main)
