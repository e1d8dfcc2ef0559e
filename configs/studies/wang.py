"""Which architecture and objective is best before and after prompted tuning?

    python -m encdec_adapt.study --study=configs/studies/wang.py:size=cpu

Trains six cells from random weights: causal decoders (cd), prefix decoders (nd)
and pairs (ed) by full language modelling (flm), prefix language modelling of
two windows in a row (plm) and span corruption (mlm), on equally many tokens.
Then tunes each on look-ups and prompts about packages of Python's text
(packages.yaml), with dropout, and one without. All are measured on the same
held-out prefixes, on held-out answers, and by which of four texts is likeliest
to follow (`continuation`, unseen in tuning; needs `pip install -e .[eval]`).

The seventh, t5_mlm, is ed_mlm with the block of T5 1.1 and as many key/value
heads; both are measured on held-out spans.

Not controlled: pairs have twice the parameters at equal FLOPs of a token, as in
the paper; all, a half or a sixth of the tokens are in the loss. `pod` has the
paper's shapes, the six with rotary positions. `cpu` takes an hour on two cores.
"""

import dataclasses

from encdec_adapt import configs
from encdec_adapt.configs.studies import shared
from encdec_adapt.evaluation.studies import pages

KINDS = {'cd': 'decoder_only', 'nd': 'prefix_decoder', 'ed': ''}
CELLS = 'cd_flm', 'nd_plm', 'ed_plm', 'cd_mlm', 'nd_mlm', 'ed_mlm'
# Arms with the learning rate of their architecture.
FIRST = {'cd': 'cd_flm', 'nd': 'nd_mlm', 'ed': 'ed_mlm'}
# The block of T5 1.1, of which models have as many parameters but for norms.
T5_BLOCK = {
  'positions': 'relative:32,128',
  'query_scale': 1.0,
  'pattern': ('global',),
  'attention_softcap': 0.0,
  'final_softcap': 0.0,
  'norm_gain': 'direct',
  'post_norms': False,
  'scale_embeddings': False,
}
# Tasks of documents that the decoders' training held out.
HELD_OUT = f'--source=python:{configs.path("decoders/held_out.txt")}'
TASKS = '--output={tasks}', HELD_OUT
TASKS = pages.Command('tasks', 'configs.python_tasks', TASKS)
RANK = '--task_folder={tasks}', '--tasks=continuation'


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
  changes = {'data.objective': text, **shared.rsqrt(steps(size))}
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


def t5_cell(size, arm):
  """Returns a pair with T5's block, of the table of one and a head."""
  block = {
    f'model.{side}.{key}': value
    for side in ('encoder', 'decoder')
    for key, value in T5_BLOCK.items()
  }
  block |= {'model.shared_table': True, 'model.decoder.tied_head': False}
  if size.name == 'pod':  # Other kernels take no bias.
    block['compute.attention'] = 'chunked'
  changes = {**arm.changes, **block}
  return dataclasses.replace(
    arm, name='t5_mlm', changes=changes, rate='rate_t5_mlm'
  )


def get_study(arg=None):
  """Returns the page of a size (`shared.size`)."""
  size = shared.size(arg)
  cells = [cell(size, name) for name in CELLS]
  t5 = t5_cell(size, cells[-1])
  answering = [tuned(size, arm) for arm in cells]
  answering.append(tuned(size, cells[0], 'cd_flm_tuned_dry', 0.0))
  middles = dict.fromkeys(FIRST.values(), 3e-3)
  middles |= {f'{name}_tuned': 1e-3 for name in FIRST.values()}
  middles['t5_mlm'] = 3e-3
  return shared.study(
    'wang',
    'Architectures and objectives, before and after prompted tuning',
    size,
    (*cells, *answering, t5),
    (),
    (TASKS,),
    rates=shared.rates(size, middles),
    evaluations=(
      shared.measured('text', 'ed_plm', cells),
      shared.measured('answers', 'ed_plm_tuned', answering),
      pages.Evaluation('rank', RANK, ('continuation/acc',)),
      shared.measured('spans', 'ed_mlm', [cells[-1], t5]),
    ),
    claims=CLAIMS,
  )


def tuned(size, arm, name='', dropout=0.1):
  """Returns a cell after tuning on the prompted mixture."""
  rate = f'rate_{FIRST[arm.name[:2]]}_tuned'
  arm = shared.tuned(size, arm, rate, **{'train.dropout': dropout})
  return shared.prompted(dataclasses.replace(arm, name=name or arm.name))


RANKED = {'metric': 'continuation/acc', 'direction': 'greater'}
RANKED |= {'smallest': 0.05, 'reason': 'ten of 200 questions'}
CLAIMS = tuple(
  shared.claim(contrast, text, f'{shared.WANG}, Table 8', paper, **fields)
  for contrast, text, paper, fields in (
    (
      ('ed_plm', 'cd_flm'),
      'Before tuning, a causal decoder by full modelling below a pair.',
      'EAI / T0: 44.2 / 42.4 against 39.9 / 41.7',
      {'primary': True},
    ),
    (
      ('nd_plm', 'cd_flm'),
      'Before tuning, that decoder below a prefix decoder by prefixes.',
      'EAI / T0: 44.2 / 42.4 against 43.5 / 41.8',
      {'primary': True},
    ),
    (
      ('nd_plm', 'nd_mlm'),
      'Before tuning, span corruption is worse than prefixes.',
      'EAI at 84B: 37.7 against 42.2',
      {'primary': True, 'direction': 'greater'},
    ),
    (
      ('cd_flm_tuned', 'ed_mlm_tuned'),
      'After tuning, a pair by span corruption below that decoder.',
      'EAI / T0: 51.3 / 60.6 against 50.4 / 51.4',
      {'primary': True, **shared.TUNED},
    ),
    (
      ('cd_flm_tuned', 'nd_mlm_tuned'),
      'After tuning, a prefix decoder by span corruption below it too.',
      'EAI / T0: 51.0 / 55.2 against 50.4 / 51.4',
      {'primary': True, **shared.TUNED},
    ),
    (
      ('cd_flm_tuned_dry', 'cd_flm_tuned'),
      'Dropout helps in tuning.',
      'section 2.3: "helps", no numbers',
      shared.TUNED,
    ),
    (
      ('cd_flm_tuned', 'ed_mlm_tuned'),
      'After tuning, that pair ranks texts better than that decoder.',
      'T0: 60.6 against 51.4',
      RANKED,
    ),
    (
      ('ed_mlm', 't5_mlm'),
      "A pair with T5's block is as good as one with Gemma 2's.",
      'none: the paper has the first alone',
      {'direction': 'equal', 'paired': True},
    ),
  )
)
