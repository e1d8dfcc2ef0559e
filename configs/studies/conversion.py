"""How cheaply does a model become another kind of model?

    python -m encdec_adapt.study --study=configs/studies/conversion.py:size=cpu

Converts cells of configs/studies/wang.py, where that study has run its own: LM
adaptation (lm_a: a prefix decoder by span corruption into a causal decoder by
full modelling), non-causal adaptation (nc_a: the other way round), a pair's
decoder into a causal decoder (ed_to_cd), and a causal decoder trained on by
UL2R, or as it was; optimizer state and step count are carried, but in
`.._fresh`. A causal decoder is also tuned as a prefix decoder.

`ul2r` and `continued` are measured on held-out prefixes.

Not controlled: conversions have as many steps as their sources (the paper's 62
and 30 %); UL2R's paper has a cosine decay. `continued` reads the rows of its
source again, `ul2r` others of the text. `.._fresh` has the rate of a random
start. `cpu` takes an hour on two cores.
"""

import dataclasses

from encdec_adapt.configs.studies import cells, shared

SOURCES = 'cd_flm', 'nd_plm', 'nd_mlm', 'cd_mlm', 'ed_mlm'
# Arm -> the cell whose objective and kind it takes, and its source.
CONVERSIONS = {
  'lm_a': ('cd_flm', 'nd_mlm'),
  'nc_a': ('nd_mlm', 'cd_flm'),
  'nc_a_fresh': ('nd_mlm', 'cd_flm'),
  'ed_to_cd': ('cd_flm', 'ed_mlm'),
  'continued': ('cd_flm', 'cd_flm'),
  'ul2r': ('nd_plm', 'cd_flm'),
  'lm_a_fresh': ('cd_flm', 'nd_mlm'),
}


def get_study(arg=None):
  """Returns the page of a size (`shared.size`)."""
  size = shared.size(arg)
  sources = {name: cells.cell(size, name) for name in SOURCES}
  arms = sources | {name: _convert(size, name) for name in CONVERSIONS}
  if not size.large:
    del arms['lm_a_fresh']
  causal = cells.tuned(size, sources['cd_flm'])
  prefix = dataclasses.replace(
    causal,
    name='as_nd_tuned',
    changes={**causal.changes, 'model.kind': 'prefix_decoder'},
    rate='rate_as_nd_tuned',
  )

  def measured(name, records, names):
    models = [arms[x] for x in names.split() if x in arms]
    return shared.measured(name, records, models)

  return shared.study(
    'conversion',
    'From one architecture and objective to another',
    size,
    (*arms.values(), causal, prefix),
    (),
    evaluations=(
      measured('causal', 'cd_flm', 'cd_flm lm_a lm_a_fresh ed_to_cd'),
      measured('spans', 'nd_mlm', 'nd_mlm cd_mlm nc_a nc_a_fresh'),
      measured('text', 'nd_plm', 'nd_plm ul2r continued'),
      shared.measured('answers', 'as_nd_tuned', (causal, prefix)),
    ),
    claims=CLAIMS,
    note=shared.note(__doc__),
  )


def _convert(size, name):
  like, source = CONVERSIONS[name]
  arm = cells.cell(size, like)
  changes = {'init.mode': 'checkpoint', 'init.optimizer': 'source'}
  if name.endswith('_fresh'):
    del changes['init.optimizer']
  rate = f'rate_{cells.FIRST[source[:2]]}'
  if name == 'ed_to_cd':
    changes, rate = {'init.mode': 'adapt'}, 'rate_ed_to_cd'
  if name == 'ul2r':
    row, batch, _ = cells.shape(size)
    keys = 'data.encoder_length', 'data.decoder_length'
    changes |= dict.fromkeys(keys, row // 2) | {'train.batch_size': batch}
    changes['data.objective'] = 'ul2r'
  changes = {**arm.changes, **changes, 'evaluation.loss': 0.05}
  return dataclasses.replace(
    arm,
    name=name,
    changes=changes,
    starts={'init.encoder': source},
    rate=rate,
  )


CLAIMS = shared.claims(
  (
    ('cd_flm', 'lm_a'),
    'LM adaptation reaches the loss of full modelling from scratch sooner.',
    'Figure 5',
    '1.6 times fewer tokens (105B against 168B)',
    {'primary': True, **shared.FEWER},
  ),
  (
    ('nd_mlm', 'nc_a'),
    'Non-causal adaptation reaches the loss of span corruption sooner.',
    'Figure 6',
    '3.3 times fewer tokens (51B against 168B)',
    {'primary': True, **shared.FEWER},
  ),
  (
    ('cd_mlm', 'nc_a'),
    'Non-causal adaptation reaches the loss of cd_mlm from scratch sooner.',
    'Figure 6',
    '9.1 times fewer tokens',
    {'primary': True, **shared.FEWER},
  ),
  (
    ('cd_flm', 'ed_to_cd'),
    'The decoder of a pair, trained on, is worse than from scratch.',
    'appendix E.4',
    'worse; no numbers',
    {'primary': True, 'direction': 'greater'},
  ),
  (
    ('continued', 'ul2r'),
    'UL2R gives a decoder a lower loss than training it on as it was.',
    'but U-PaLM (arXiv:2210.11399), Table 1',
    'BBES 67.7 against 64.3; half of the tokens',
    {'primary': True},
  ),
  (
    ('nc_a_fresh', 'nc_a'),
    'A carried optimizer state is better than a fresh one.',
    'section 2.3 carries it; no comparison',
    'no numbers',
    {'paired': True},
  ),
  (
    ('cd_flm_tuned', 'as_nd_tuned'),
    'Tuning a causal decoder as a prefix decoder is as good.',
    'Table 8',
    'EAI / T0: 52.3 / 52.0 against 51.3 / 52.1',
    {'direction': 'equal', **shared.TUNED},
  ),
  cited=f'{shared.WANG}, ',
)
