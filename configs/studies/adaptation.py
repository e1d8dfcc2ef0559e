"""Is a pair that is adapted from a decoder better than its alternatives?

    python -m encdec_adapt.study --study=configs/studies/adaptation.py:size=cpu

Compares the pair adapted from a decoder with pairs from random weights (taught
by the decoder, untaught, and untaught at equal total FLOPs: C(source) +
C(adaptation) + C(teacher) = C(scratch)), with the decoder trained on (for as
many tokens, or FLOPs), with a wider decoder from random weights that has the
pair's parameters and total FLOPs, and with a pair of the smaller decoder;
larger sizes tune them, too. `cpu` adapts on a quarter of the tokens that the
source has read, inputs and targets alike.

Not controlled: a pair has twice the layers of its source, and learns from it as
a teacher, as decoders do not; the decoder trained on has all tokens of a row in
its loss, a pair half. The source has three times the updates of the wider
decoder, on fewer rows each: it leads that by .18 nats alone, and the pair from
random weights at equal total FLOPs by .34, so that most of the adapted pair's
lead on the wider decoder, .19, is its source's. The pair with the smaller
decoder has that as its teacher, which is .57 nats behind. The paper distills
all of the loss, `cpu` half. Untaught pairs share the rate of the taught one,
the unbalanced pair that of the adapted one, and the decoder at equal tokens
that of the one at equal FLOPs. In the paper, before tuning, pairs of the sizes
S and B are better from scratch than adapted; these are smaller. `cpu` took 6.8
hours of stages, two at a time on two cores.
"""

import dataclasses

from encdec_adapt.configs.studies import shared
from encdec_adapt.lab import budgets


def get_study(arg=None):
  """Returns the page of a size (`shared.size`)."""
  size = shared.size(arg)
  # 1.54M tokens at cpu, a quarter of the 6.14M that the source has read.
  steps = size.steps(375, gpu=240, pod=500_000)
  # Scratch at equal total FLOPs reads the text twice.
  fields = {'changes': {'data.passes': 3}, 'rate': 'rate_adapted'}
  adapted = shared.pair(size, 'adapted', steps, **fields)
  rate = 'rate_scratch_taught'
  scratch = shared.scratch(adapted, 'scratch', False, rate=rate)
  fields['rate'] = 'rate_continued_flops'
  continued = shared.decoder(size, 'continued', steps, **fields)
  flops, total = _budgets(size, adapted)
  fields['rate'] = 'rate_adapted'
  arms = [
    adapted,
    scratch,
    shared.scratch(adapted, 'scratch_taught', rate=rate),
    dataclasses.replace(scratch, name='scratch_total', budget=total),
    continued,
    dataclasses.replace(continued, name='continued_flops', budget=flops),
    _wide(continued, scratch, total),
    shared.pair(size, 'unbalanced', steps, size.unbalanced, **fields),
  ]
  tuned = [_tuned(size, arm) for arm in arms] if size.large else []
  sources = tuple(dict.fromkeys(('base', *size.unbalanced)))
  evaluations = (
    shared.measured('text', 'adapted', arms, *sources),
    shared.measured('answers', 'adapted_tuned', tuned),
  )
  return shared.study(
    'adaptation',
    'Adapting a decoder into an encoder-decoder, and its alternatives',
    size,
    (*arms, *tuned),
    sources,
    seeds=size.seeds[:3],
    middles={'continued_flops': 1e-3, 'wide': 1e-3 if size.large else 3e-3},
    evaluations=evaluations[: 1 + size.large],
    # At pod the unbalanced pair has the larger encoder.
    claims=CLAIMS
    + ((SMALLER,) if size.name != 'pod' else ())
    + (TUNED_CLAIMS if size.large else REACHED * (size.name == 'cpu')),
    note=shared.note(__doc__),
  )


def _budgets(size, adapted):
  """Returns the FLOPs of adaptation, and those with its source, as budgets."""
  if size.name == 'smoke':
    return adapted.budget, adapted.budget
  if size.name == 'pod':  # The paper's: 6T more tokens, and 8T from scratch.
    return budgets.Tokens(3e12), budgets.Tokens(4e12)
  flops = shared.flops(size, adapted)
  total = flops + shared.source_flops(size)
  return budgets.FLOPs(flops), budgets.FLOPs(total)


def _tuned(size, arm):
  """Returns an arm after tuning, at the rate of its kind of model."""
  kind = 'continued' if 'model.kind' in arm.changes else 'adapted'
  return shared.tuned(size, arm, f'rate_{kind}_tuned')


def _wide(decoder, pair, budget):
  """Returns a decoder with the parameters of a pair, from random weights."""
  models = [shared.settings(arm).model for arm in (decoder, pair)]
  width = budgets.match(*models, 'parameters').decoder.mlp_width
  wide = shared.scratch(decoder, 'wide', budget=budget, rate='rate_wide')
  changes = {**wide.changes, 'model.decoder.mlp_width': width}
  return dataclasses.replace(wide, changes=changes)


PRIMARY = {'primary': True}
TABLE = f'{shared.T5GEMMA}, Table 4'
FIGURE = f'{shared.T5GEMMA}, Figure 2'
NEAR = '2B-2B passes Gemma 2 2B (2T tokens) near 196B, a tenth'
# fmt: off
CLAIMS = shared.claims(
  (('scratch_taught', 'adapted'),
   'Adapted has a lower loss than scratch that the same decoder teaches.',
   TABLE, 'points: +2.6 at 2B-2B; at S-S and B-B the other way, by 1.2',
   {**PRIMARY, 'paired': True}),
  (('scratch_total', 'adapted'),
   'Adapted has a lower loss than scratch at equal total FLOPs.',
   f'{shared.OURS}, on {TABLE}',
   'scratch had 8T tokens, the source 2T and adaptation 2T', {}),
  (('continued_flops', 'adapted'),
   'Adapted has a lower loss than its decoder after as many FLOPs more.',
   f'{shared.T5GEMMA}, section 5',
   'points: 49.7, Gemma 2 2B after 6T more tokens, 3 times the FLOPs, 48.6',
   PRIMARY),
  (('continued', 'adapted'),
   'Adapted has a lower loss than its decoder after as many tokens more.',
   shared.OURS, '-', {}),
  (('wide', 'adapted'),
   'Adapted has a lower loss than a decoder of its parameters, total FLOPs.',
   f'{shared.OURS}, on {TABLE}', '-', PRIMARY),
  (('scratch', 'scratch_taught'),
   'A teacher lowers the loss of a pair from scratch.',
   'Gemma 2 (arXiv:2408.00118), distillation against scratch',
   'points: 67.7 against 60.3 (decoder of 2B, 500B tokens)',
   {'paired': True}),
)
SMALLER = shared.claim(
  ('unbalanced', 'adapted'),
  'Adapted has a lower loss than the pair with the smaller decoder.',
  f'{shared.T5GEMMA}, Table 2', 'points: 9B-9B 63.1, 9B-2B 55.0',
)
REACHED = shared.claims(
  (('base', 'adapted'),
   "Adapted on a quarter of its source's tokens, a pair has a lower loss.",
   FIGURE, NEAR, PRIMARY),
)
TUNED_CLAIMS = shared.claims(
  (('scratch_total_tuned', 'adapted_tuned'),
   'After tuning, adapted has a lower loss than scratch_total.',
   f'{shared.OURS}, on {TABLE}',
   'points: +2.5 at 2B-2B; at S-S the other way, by .1', {}),
  (('wide_tuned', 'adapted_tuned'),
   'After tuning, adapted has a lower loss than a wider decoder.',
   f'{shared.OURS}, on {TABLE}', '-', {}),
)
# fmt: on
