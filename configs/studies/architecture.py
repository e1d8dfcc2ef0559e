"""Architecture and objective from random weights, each question alone.

    python -m encdec_adapt.study --study=configs/studies/architecture.py

Arms read equal rows of S inputs and S targets, with one vocabulary, width and
table, so that counts with and without embeddings agree: `causal` and `prefix`
decoders of L layers with the loss on targets; `all`, causal with the loss on
all tokens; pairs of L/2 + L/2 layers with the parameters of `causal`, for as
many tokens (`half`) and FLOPs (`half_flops`); of L + L layers with rows of as
many FLOPs (`whole`). `gpu` and `pod` add pairs that match `prefix`, a pair of
equal FLOPs as published, decoders of 2 L layers with the parameters of `whole`,
for as many tokens (`deep`) and FLOPs, and span corruption at equal FLOPs. All
matches are within 1 %. `size=cpu` takes an hour on two quiet cores, `gpu` two
on an H100; `pod`, of 64 of them, needs a `source` of text and its vocabulary.
"""

import dataclasses
import functools

from encdec_adapt import config as config_lib
from encdec_adapt import configs
from encdec_adapt.base import errors
from encdec_adapt.configs import gemma2, quickstart
from encdec_adapt.evaluation.studies import budgets, pages
from encdec_adapt.models import forward_flops, model_config, presets
from encdec_adapt.objectives import framing

SPANS = {f'spans_{name}': name for name in ('causal', 'prefix', 'half')}
# Arms of equal FLOPs as others (all else: tokens), and with others' rates.
FLOPS = {'half_flops': 'causal', 'half_prefix': 'prefix', 'deep_flops': 'whole'}
RATES = {'half_flops': 'half', 'half_prefix': 'half', 'deep_flops': 'deep'}
RATES |= {'all': 'causal', 'whole_prefix': 'whole', 'published': 'whole'}
_OPTIONS = dict(size='cpu', source='', vocabulary='')
_REASON = 'a seventh of what the loss on all tokens gained in a first run'
_NONE = 'a comparison that no paper makes', ''
_REDLLM = 'arXiv 2510.26622', 'decoders (loss on all tokens) nearly dominate'
_WANG = 'arXiv 2204.05832, table 8', 'ED:PLM 39.9, ND:PLM 43.5, CD:FLM 44.2'
# Sentence: contrast, direction, and source with the numbers of the paper.
CLAIMS = {
  'With equal parameters and tokens a pair is behind a causal decoder.': (
    *('causal half', 'greater', _NONE),
  ),
  'With equal parameters and FLOPs a pair is no better than the decoder.': (
    *('causal half_flops', 'no better', _REDLLM),
  ),
  'With equal FLOPs of a row a pair is behind a causal decoder.': (
    *('causal whole', 'greater', _WANG),
  ),
  'A prefix decoder is no better than a causal decoder.': (
    *('causal prefix', 'no better', _WANG),
  ),
  'The loss on all tokens is worth more to a decoder than becoming a pair.': (
    *('half_flops all', 'less', _NONE),
  ),
}


@dataclasses.dataclass(frozen=True)
class Size:
  """A size of the study; a row has `length` inputs and as many targets."""

  decoder: model_config.StackConfig
  length: int
  batch: int
  tokens: float  # Target tokens.
  seeds: int = 5
  rates: tuple[float, ...] = (1e-3, 3e-3, 9e-3)
  eval_rows: int = 512


_STACK = quickstart.stack(4, 128)
_LARGE = dict(layers=8, width=512, mlp_width=2048, heads=8, kv_heads=2)
SIZES = {
  'smoke': Size(quickstart.stack(2, 32), 32, 4, 12_800, 1, (3e-3,), 16),
  'cpu': Size(_STACK, 128, 8, 4e5),
  'gpu': Size(dataclasses.replace(_STACK, **_LARGE), 512, 32, 8e6),
  'pod': Size(presets.stack('2b'), 4096, 512, 84e9, 1, (1e-4, 3e-4, 9e-4)),
}


@functools.cache
def models(name):
  """Returns the model of every arm of a size."""
  size = SIZES[name]
  lengths = framing.Lengths(size.length, size.length)
  match = functools.partial(budgets.match, lengths=lengths)

  def model(layers, **changes):
    changes |= {'layers': layers, 'vocab_multiple': 128}
    return dataclasses.replace(size.decoder, **changes)

  def pair(layers):
    stacks = model(layers), model(layers)
    return model_config.encoder_decoder(*stacks, shared_table=True)

  layers, single = size.decoder.layers, model_config.DecoderOnlyConfig
  causal, prefix = single(model(layers)), single(model(layers, role='prefix'))
  half = match(pair(layers // 2), causal, 'parameters')
  whole = match(pair(layers), causal, 'flops')
  arms = {'causal': causal, 'prefix': prefix, 'all': causal}
  arms |= {'half': half, 'half_flops': half, 'whole': whole}
  if name in ('smoke', 'cpu'):
    return arms
  deep = match(single(model(2 * layers)), whole, 'parameters')
  arms |= {'half_prefix': half, 'deep': deep, 'deep_flops': deep}
  arms['whole_prefix'] = match(pair(layers), prefix, 'flops')
  arms['published'] = match(pair(layers), causal, 'published')
  return arms | {spans: arms[arm] for spans, arm in SPANS.items()}


def get_config(arg=None):
  """Returns the configuration of an `arm` at a `size`."""
  args = config_lib.parse_arg(arg, **_OPTIONS, arm='causal')
  size, arm = SIZES[args['size']], args['arm']
  config = config_lib.defaults()
  data, train = config.data, config.train
  config_lib.set_model(config.model, models(args['size'])[arm])
  config.loss.on_inputs = arm == 'all'
  # Spans of 512 inputs are targets of 114 tokens.
  data.objective = 'span_corruption' if arm in SPANS else 'prefix_lm'
  data.encoder_length = data.decoder_length = size.length
  data.decoder_length //= 4 if arm in SPANS else 1
  held_out = configs.path('decoders/held_out.txt')
  data.source = args['source'] or f'python:{held_out}'
  data.vocabulary = args['vocabulary'] or configs.path('decoders/base')
  data.repeat, data.eval_rows = True, size.eval_rows
  data.development_rows = 0 if args['size'] == 'smoke' else 64
  train.batch_size = size.batch
  train.evaluators, config.checkpoint.every = 'loss=20%', '50%'
  config.optimizer.learning_rate = size.rates[len(size.rates) // 2]
  if args['size'] == 'pod':
    chips = dict(topology='h100:64', slices=1)
    gemma2.spread(config, size='2b_2b', objective='prefixlm', **chips)
  return config


def get_study(arg=None):
  """Returns the page of a `size`; `source` and `vocabulary` of another text."""
  args = config_lib.parse_arg(arg, **_OPTIONS)
  name = args['size']
  if name not in SIZES:
    raise errors.UserError(f'size={name} must be one of {", ".join(SIZES)}.')
  size, shapes = SIZES[name], models(name)
  rows, tuned = size.tokens / size.length, len(size.rates) > 1
  file = configs.path('studies/architecture.py')
  text = ''.join(f',{key}={value}' for key, value in args.items() if value)

  def budget(arm):
    if arm not in FLOPS | SPANS:
      return budgets.Tokens(size.tokens)
    like, length = shapes[(FLOPS | SPANS)[arm]], size.length
    row = forward_flops.forward(like, length, length, 2 * length)
    return budgets.FLOPs(forward_flops.TRAINING * row * rows)

  arms, rates, shared = [], [], RATES | SPANS
  for arm in shapes:
    rate = f'rate_{shared.get(arm, arm)}' * tuned
    config = f'{file}:arm={arm}{text}'
    arms.append(pages.Arm(arm, config, budget=budget(arm), rate=rate))
    if tuned and arm not in shared:
      steps = round(rows / size.batch / 2)
      rates.append(pages.Rate(rate, arm, size.rates, steps))
  evaluations = [pages.Evaluation('targets', records='causal')]
  if 'spans_causal' in shapes:
    evaluations.append(pages.Evaluation('spans', (), (), 'spans_causal'))
  return pages.Study(
    'architecture',
    'Architecture and objective from random weights',
    name,
    tuple(arms),
    tuple(range(size.seeds)),
    tuple(_claim(sentence, *claim) for sentence, claim in CLAIMS.items()),
    tuple(evaluations),
    rates=tuple(rates),
    platform='' if name in ('smoke', 'cpu') else 'gpu',
  )


def _claim(sentence, contrast, direction, paper):
  arms, metric = tuple(contrast.split()), 'held_out/loss'
  values = sentence, *paper, arms, metric, direction, 0.02, _REASON
  return pages.Claim(*values, primary=True, paired=True)
