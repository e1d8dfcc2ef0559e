"""Cells of Wang et al. (arXiv:2204.05832): arms of `wang` and `conversion`."""

import dataclasses

from encdec_adapt.configs.studies import shared
from encdec_adapt.lab import pages

KINDS = {'cd': 'decoder_only', 'nd': 'prefix_decoder', 'ed': ''}
CELLS = 'cd_flm', 'nd_plm', 'ed_plm', 'cd_mlm', 'nd_mlm', 'ed_mlm'
# Arms whose learning rate others of their architecture share.
FIRST = {'cd': 'cd_flm', 'nd': 'nd_mlm', 'ed': 'ed_mlm'}
# The block of T5 1.1, of which models have as many parameters but for norms.
T5_BLOCK = {'positions.kind': 'relative', 'pattern': ('global',)}
T5_BLOCK |= {'attention_softcap': 0.0, 'final_softcap': 0.0, 'query_scale': 1.0}
T5_BLOCK |= {'post_norms': False, 'scale_embeddings': False}
T5_BLOCK['norm_gain'] = 'direct'


def steps(size):
  """Returns the steps of a cell; 168B tokens at pod."""
  return size.steps(384, gpu=240, pod=131_072)


def shape(size):
  """Returns tokens of a row, rows of a step, and tokens of a row's spans."""
  if size.name == 'pod':
    return 626, 2048, 114
  # As many spans in proportion.
  return 2 * size.length, size.batch, round(size.length * 228 / 5008) * 8


def cell(size, name):
  """Returns a cell."""
  kind, objective = name.split('_')
  row, batch, spans = shape(size)
  text, *numbers = {
    'flm': ('full_lm', 0, row, batch),
    # Two windows of as many tokens fill inputs and targets.
    'plm': ('prefix_lm_uniform:concatenate', row, row, batch // 2),
    'mlm': ('span_corruption', row - spans, spans, batch),
  }[objective]
  keys = 'data.encoder_length', 'data.decoder_length', 'train.batch_size'
  changes = {'data.objective': text}
  changes |= dict(zip(keys, numbers, strict=True))
  if size.name == 'pod':
    changes |= {'optimizer.kind': 'adafactor', 'loss.z_loss': 1e-4}
    changes['optimizer.learning_rate'] = 0.01
  if KINDS[kind]:
    changes['model.kind'] = KINDS[kind]
  return pages.Arm(
    name,
    size.config('tiny', '' if KINDS[kind] else 'tiny'),
    changes,
    budget=steps(size),
    rate=f'rate_{FIRST[kind]}',
  )


def prefixes(size, models):
  """Returns the command and the evaluation of models on held-out prefixes.

  A row is as long as the windows that prefix cells are trained on.
  """
  keys = 'data.encoder_length', 'data.decoder_length'
  changes = dict.fromkeys(keys, shape(size)[0] // 2)
  command = shared.records('prefixes', size.config('tiny', 'tiny'), changes)
  return command, pages.Evaluation(
    'text', ('--records={prefixes}/eval',), models=tuple(models)
  )


def t5_cell(size, arm):
  """Returns a pair with T5's block, of the table of one and a head."""
  block = {
    f'model.{side}.{key}': value
    for side in ('encoder', 'decoder')
    for key, value in T5_BLOCK.items()
  }
  block |= {'model.shared_table': True, 'model.head.tied': False}
  if size.name == 'pod':  # Other kernels take no bias.
    block['compute.attention'] = 'chunked'
  changes = {**arm.changes, **block}
  return dataclasses.replace(
    arm, name='t5_mlm', changes=changes, rate='rate_t5_mlm'
  )


def tuned(size, arm, name='', dropout=0.1):
  """Returns a cell after tuning on the prompted mixture."""
  rate = f'rate_{FIRST[arm.name[:2]]}_tuned'
  arm = shared.tuned(size, arm, rate, **{'train.dropout': dropout})
  return shared.prompted(dataclasses.replace(arm, name=name or arm.name))
