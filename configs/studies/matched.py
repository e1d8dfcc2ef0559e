"""Models that are matched in parameters or FLOPs: arms of `architecture`.

    python -m encdec_adapt.train --workdir=runs/half \
      --config=configs/studies/matched.py:size=cpu,arm=half

trains an arm from random weights. All matches are within 1 %.
"""

import dataclasses
import functools

from encdec_adapt import config as config_lib
from encdec_adapt.configs import quickstart
from encdec_adapt.configs.studies import shared
from encdec_adapt.lab import budgets
from encdec_adapt.models import model_config
from encdec_adapt.objectives import framing

# Arms with span corruption, and those with the same models.
SPANS = {f'spans_{name}': name for name in ('causal', 'prefix', 'half')}


@dataclasses.dataclass(frozen=True)
class Size:
  """Rows and budgets of a size.

  Attributes:
    length: tokens S of the inputs of a row, and of its targets.
    batch: rows of a step.
    tokens: target tokens of an arm; at gpu for 4M tokens of text.
    seeds: number of seeds.
    rates: learning rates to choose from.
    eval_rows: held-out rows.
  """

  length: int
  batch: int
  tokens: float
  seeds: int = 5
  rates: tuple[float, ...] = (1e-3, 3e-3, 9e-3)
  eval_rows: int = 512


SIZES = {
  'smoke': Size(32, 4, 12_800, 1, (3e-3,), 16),
  'cpu': Size(128, 8, 4e5),
  # At equal FLOPs a pair reads Python's text about 3.5 times.
  'gpu': Size(512, 32, 3.6e6),
  'pod': Size(4096, 512, 84e9, 1, (3e-4,)),
}


@functools.cache
def models(size):
  """Returns the model of every arm of a size (`shared.Size`)."""
  base = quickstart.stack(2, 32)
  if size.name != 'smoke':
    base = shared.stack(size, 'base')
  lengths = framing.Lengths(*2 * [SIZES[size.name].length])
  match = functools.partial(budgets.match, lengths=lengths)

  def decoder(layers, **changes):
    changes |= {'layers': layers, 'vocab_multiple': 128}
    return model_config.DecoderOnlyConfig(dataclasses.replace(base, **changes))

  def pair(layers):
    stacks = 2 * [decoder(layers).decoder]
    return model_config.encoder_decoder(*stacks, shared_table=True)

  layers = base.layers
  causal, prefix = decoder(layers), decoder(layers, role='prefix')
  half = match(pair(layers // 2), causal, 'parameters')
  whole = match(pair(layers), causal, 'flops')
  arms = {'causal': causal, 'prefix': prefix, 'all': causal}
  arms |= {'half': half, 'half_flops': half, 'whole': whole}
  if not size.large:
    return arms
  deep = match(decoder(2 * layers), whole, 'parameters')
  arms |= {'half_prefix': half, 'deep': deep, 'deep_flops': deep}
  arms['whole_prefix'] = match(pair(layers), prefix, 'flops')
  arms['published'] = match(pair(layers), causal, 'published')
  return arms | {spans: arms[arm] for spans, arm in SPANS.items()}


def get_config(arg=None):
  """Returns the configuration of an `arm` at a `size`."""
  study_size, (arm,) = shared.parse(arg, arm='causal')
  shapes, size = models(study_size), SIZES[study_size.name]
  config = config_lib.defaults()
  data, train = config.data, config.train
  config_lib.set_model(config.model, shapes[arm])
  config.loss.on_inputs = arm == 'all'
  # Spans of 512 inputs are targets of 114 tokens.
  data.objective = 'span_corruption' if arm in SPANS else 'prefix_lm'
  data.encoder_length = data.decoder_length = size.length
  data.decoder_length //= 4 if arm in SPANS else 1
  shared.set_source(data, study_size)
  data.repeat, data.eval_rows = True, size.eval_rows
  data.development_rows = 0 if study_size.name == 'smoke' else 64
  train.batch_size, config.evaluation.loss = size.batch, 0.2
  config.checkpoint.every = 0.2 if study_size.name == 'gpu' else 0.5
  config.optimizer.learning_rate = size.rates[len(size.rates) // 2]
  if study_size.name == 'pod':
    shared.spread(config, study_size, '2b_2b')
  return config
