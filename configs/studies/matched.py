"""Models that are matched in parameters or FLOPs: arms of `architecture`.

    python -m encdec_adapt.train --workdir=runs/half \
      --config=configs/studies/matched.py:size=cpu,arm=half

trains an arm from random weights. All matches are within 1 %.
"""

import dataclasses
import functools

from encdec_adapt import config as config_lib
from encdec_adapt import configs
from encdec_adapt.configs import gemma2, quickstart
from encdec_adapt.configs.studies import shared
from encdec_adapt.evaluation.studies import budgets
from encdec_adapt.models import model_config, presets
from encdec_adapt.objectives import framing

# Arms with span corruption, and those with the same models.
SPANS = {f'spans_{name}': name for name in ('causal', 'prefix', 'half')}
OPTIONS = dict(size='cpu', source='', vocabulary='')
TOPOLOGY = 'h100:64'  # At pod.


@dataclasses.dataclass(frozen=True)
class Size:
  """A size of the study.

  Attributes:
    decoder: the decoder that others are matched to.
    length: tokens S of the inputs of a row, and of its targets.
    batch: rows of a step.
    tokens: target tokens of an arm.
    seeds: number of seeds.
    rates: learning rates to choose from.
    eval_rows: held-out rows.
  """

  decoder: model_config.StackConfig
  length: int
  batch: int
  tokens: float
  seeds: int = 5
  rates: tuple[float, ...] = (1e-3, 3e-3, 9e-3)
  eval_rows: int = 512


_STACK = quickstart.stack(4, 128)
_LARGE = dict(layers=8, width=512, mlp_width=2048, heads=8, kv_heads=2)
SIZES = {
  'smoke': Size(quickstart.stack(2, 32), 32, 4, 12_800, 1, (3e-3,), 16),
  'cpu': Size(_STACK, 128, 8, 4e5),
  'gpu': Size(dataclasses.replace(_STACK, **_LARGE), 512, 32, 8e6),
  'pod': Size(presets.stack('2b'), 4096, 512, 84e9, 1, (3e-4,)),
}


@functools.cache
def models(name):
  """Returns the model of every arm of a size."""
  is_large, size = shared.Size(name).large, SIZES[name]
  lengths = framing.Lengths(size.length, size.length)
  match = functools.partial(budgets.match, lengths=lengths)

  def decoder(layers, **changes):
    changes |= {'layers': layers, 'vocab_multiple': 128}
    stack = dataclasses.replace(size.decoder, **changes)
    return model_config.DecoderOnlyConfig(stack)

  def pair(layers):
    stacks = 2 * [decoder(layers).decoder]
    return model_config.encoder_decoder(*stacks, shared_table=True)

  layers = size.decoder.layers
  causal, prefix = decoder(layers), decoder(layers, role='prefix')
  half = match(pair(layers // 2), causal, 'parameters')
  whole = match(pair(layers), causal, 'flops')
  arms = {'causal': causal, 'prefix': prefix, 'all': causal}
  arms |= {'half': half, 'half_flops': half, 'whole': whole}
  if not is_large:
    return arms
  deep = match(decoder(2 * layers), whole, 'parameters')
  arms |= {'half_prefix': half, 'deep': deep, 'deep_flops': deep}
  arms['whole_prefix'] = match(pair(layers), prefix, 'flops')
  arms['published'] = match(pair(layers), causal, 'published')
  return arms | {spans: arms[arm] for spans, arm in SPANS.items()}


def get_config(arg=None):
  """Returns the configuration of an `arm` at a `size`."""
  args = config_lib.parse_arg(arg, **OPTIONS, arm='causal')
  shapes, arm = models(args['size']), args['arm']
  size, config = SIZES[args['size']], config_lib.defaults()
  data, train = config.data, config.train
  config_lib.set_model(config.model, shapes[arm])
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
    gemma2.spread(config, '2b_2b', 'prefixlm', TOPOLOGY, 1)
  return config
