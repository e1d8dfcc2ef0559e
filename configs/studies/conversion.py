"""How cheaply does a model become another kind of model?

    python -m encdec_adapt.study --study=configs/studies/conversion.py:size=cpu

Converts cells of Wang et al. (as in configs/studies/wang.py): LM adaptation
(lm_a: a prefix decoder by span corruption into a causal decoder by full
modelling, for 1.6 times fewer tokens than its target from scratch), non-causal
adaptation (nc_a: the other way round, for 3.3 times fewer tokens; nc_a_ninth
for 9.1), a pair's decoder into a causal decoder (ed_to_cd), and a causal
decoder trained on by UL2R, or as it was. Optimizer state and step count are
carried, but in nc_a_fresh and ed_to_cd; that needs a schedule that goes on at
its source's step. So all arms here, and on no other page, have T5's (rsqrt), as
in the paper, without a last decay: it falls to a third of its peak or less, in
nc_a_fresh to .57 of it.

Models by span corruption are measured on its rows, others on held-out prefixes.

Not controlled: ed_to_cd, `ul2r` and `continued` have as many steps as their
sources; `ul2r` reads .6 and is trained on .23 of the tokens of `continued`, and
its paper has a cosine decay. `continued` reads the rows of its source again,
`ul2r` others of the text; both share the rate of nc_a. UL2R's paper has tasks,
so that its loss on prefixes has no verdict. At cpu sources have read 1.6M
tokens, a hundred thousandth of the paper's, and adaptation has little to reuse.
The smallest difference is that of adapted pairs; a quarter more tokens give
models from random weights .1 nats, and LM adaptation is .08 behind. With .1 as
the smallest difference, as in `wang`, its claim would be reproduced. `cpu` took
4.1 hours of stages, two at a time on two cores.
"""

import dataclasses

from encdec_adapt.configs.studies import cells, shared

SOURCES = 'cd_flm', 'nd_mlm', 'cd_mlm', 'ed_mlm'
# Arm -> the cell whose objective and kind it takes, its source, and the tokens
# of the cell over its own.
CONVERSIONS = {
  'lm_a': ('cd_flm', 'nd_mlm', 1.6),
  'nc_a': ('nd_mlm', 'cd_flm', 3.3),
  'nc_a_ninth': ('nd_mlm', 'cd_flm', 9.1),
  'nc_a_fresh': ('nd_mlm', 'cd_flm', 3.3),
  'ed_to_cd': ('cd_flm', 'ed_mlm', 1.0),
  'continued': ('cd_flm', 'cd_flm', 1.0),
  'ul2r': ('nd_plm', 'cd_flm', 1.0),
}


def get_study(arg=None):
  """Returns the page of a size (`shared.size`)."""
  size = shared.size(arg)
  sources = {name: _cell(size, name) for name in SOURCES}
  arms = sources | {name: _convert(size, name) for name in CONVERSIONS}
  text = 'cd_flm', 'lm_a', 'ed_to_cd', 'ul2r', 'continued'
  prefixes, text = cells.prefixes(size, text)

  def measured(name, records, names):
    return shared.measured(name, records, [arms[x] for x in names.split()])

  return shared.study(
    'conversion',
    'From one architecture and objective to another',
    size,
    arms.values(),
    (),
    (prefixes,),
    evaluations=(
      measured('spans', 'nd_mlm', 'nd_mlm cd_mlm nc_a nc_a_ninth nc_a_fresh'),
      text,
    ),
    # The best from random weights in `adaptation`; carried arms go on at a
    # third of their peak.
    middles=dict.fromkeys(
      arms if size.name == 'cpu' else (), shared.RANDOM_RATE
    ),
    claims=CLAIMS,
    note=shared.note(__doc__),
  )


def _cell(size, name):
  """Returns a cell with T5's schedule."""
  arm, steps = cells.cell(size, name), cells.steps(size)
  changes = {'optimizer.schedule': 'rsqrt'}
  changes['optimizer.rsqrt_steps'] = max(steps // 10, 1)
  return dataclasses.replace(arm, changes=arm.changes | changes)


def _convert(size, name):
  like, source, share = CONVERSIONS[name]
  arm = _cell(size, like)
  changes = {'init.mode': 'checkpoint', 'init.optimizer': 'source'}
  if name.endswith('_fresh'):
    del changes['init.optimizer']
  if name == 'ed_to_cd':
    changes = {'init.mode': 'adapt'}
  if name == 'ul2r':
    row, batch, _ = cells.shape(size)
    keys = 'data.encoder_length', 'data.decoder_length'
    changes |= dict.fromkeys(keys, row // 2) | {'train.batch_size': batch}
    changes['data.objective'] = 'ul2r'
  return dataclasses.replace(
    arm,
    name=name,
    changes=arm.changes | changes,
    starts={'init.encoder': source},
    budget=max(1, round(cells.steps(size) / share)),
    rate=f'rate_{name}' if name == 'nc_a_fresh' else 'rate_nc_a',
  )


# A target from scratch may lead by no more than the smallest difference.
REACHED = {'primary': True, 'direction': 'no better'}
CLAIMS = shared.claims(
  (
    ('lm_a', 'cd_flm'),
    'From scratch is no better than LM adaptation on 1.6 times fewer tokens.',
    f'{shared.WANG}, Figure 5',
    '105B against 168B tokens; here .1 nats are worth a quarter more tokens',
    REACHED,
  ),
  (
    ('nc_a', 'nd_mlm'),
    'From scratch is no better than non-causal adaptation on 3.3 times fewer.',
    f'{shared.WANG}, Figure 6',
    '3.3 times fewer tokens (51B against 168B)',
    REACHED,
  ),
  (
    ('nc_a_ninth', 'cd_mlm'),
    'cd_mlm is no better than non-causal adaptation on 9.1 times fewer tokens.',
    f'{shared.WANG}, Figure 6',
    '9.1 times fewer tokens',
    REACHED,
  ),
  (
    ('cd_flm', 'ed_to_cd'),
    'The decoder of a pair, trained on, is worse than from scratch.',
    f'{shared.WANG}, appendix E.4',
    'worse; no numbers',
    {'primary': True, 'direction': 'greater'},
  ),
  (
    ('continued', 'ul2r'),
    'UL2R gives a decoder a lower loss than training it on as it was.',
    f'{shared.OURS}, on U-PaLM (arXiv:2210.11399), Table 1',
    'BBES 67.7, PaLM 64.3; as good as PaLM at half of the FLOPs',
    {},
  ),
  (
    ('nc_a_fresh', 'nc_a'),
    'A carried optimizer state is better than a fresh one.',
    f'{shared.OURS}, on {shared.WANG}, section 2.3',
    'carries it; no comparison',
    {'paired': True},
  ),
)
