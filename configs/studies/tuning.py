"""Do pairs gain more by tuning than decoders?

    python -m encdec_adapt.study --study=configs/studies/tuning.py:size=cpu

Tunes on look-ups in a table (configs/lookups.py): the decoder, the same as a
prefix decoder, which reads the inputs in both directions, the pair adapted from
it, and the pair from scratch with the decoder as teacher; the adapted pair also
without dropout, and on a mixture with prompts about packages of Python's text.
Gains are of the loss of held-out answers, before and after. The floor is the
loss with other inputs. Tuned models are also measured without the table and
with the row that is asked for alone, on all held-out questions, including
those whose table is too long.

Not controlled: a pair has had adaptation beyond the decoder's training, and has
twice its layers (see `adaptation` for both). At cpu the pair from scratch reads
as many rows as the adapted one, with 224 inputs and 32 targets, so that its
encoder has read inputs as long as a table: a quarter of the targets, and fewer
positions of the decoder than answers have. The pairs without dropout and on the
mixture share the rate of the adapted one. No claim is on the mixture.

At cpu no model of a primary claim answers a question word for word: losses tell
how well it copies, and hardly which row it copies. The tuned pair from scratch
does not use its inputs (4.60, with other inputs the same): that claim compares
a pair that copies with one that does not. After 110 steps the prefix decoder is
between no table (3.40) and the asked row alone (2.10), at 2.85; its source,
which has always read causally, is at 2.07: the claim is on how soon it gets
used to another mask. All tuned models but one have dropout, which costs the
pair .57; what it costs decoders is not measured. `cpu` took 2.2 hours of
stages, one at a time on two cores.
"""

import dataclasses

from encdec_adapt.configs.studies import shared
from encdec_adapt.lab import pages


def get_study(arg=None):
  """Returns the page of a size (`shared.size`)."""
  size = shared.size(arg)
  steps = size.steps(128, pod=480_000)
  adapted = shared.pair(size, 'adapted', steps, rate='rate_adapted')
  scratch = shared.scratch(adapted, 'scratch', rate='rate_scratch')
  pairs = adapted, shared.late(size, scratch, steps)
  decoder = pages.Arm('base', size.config())
  # Dropout as in T0's tuning (Wang et al., section 2.3).
  dropout = {'train.dropout': 0.1}
  rate = 'rate_adapted_tuned'
  base, *tuned = (
    shared.tuned(size, arm, rate, **dropout) for arm in (decoder, *pairs)
  )
  changes = {**base.changes, 'model.kind': 'prefix_decoder'}
  prefix = dataclasses.replace(base, name='prefix_tuned', changes=changes)
  dry = dataclasses.replace(
    shared.tuned(size, adapted, rate), name='adapted_tuned_dry'
  )
  prompted = dataclasses.replace(
    shared.prompted(tuned[0]), name='adapted_prompted'
  )
  arms = (*pairs, base, prefix, *tuned, dry)
  commands, partial = shared.partial_tables(base, (base, prefix, *tuned))
  return shared.study(
    'tuning',
    'Tuning on answers',
    size,
    (*arms, prompted),
    commands=commands,
    evaluations=(
      shared.measured('answers', 'adapted_tuned', arms, 'base'),
      shared.measured('prompted', 'adapted_prompted', [prompted]),
      *partial,
    ),
    # Those of the stored runs.
    middles={x.name: 1e-3 for x in (base, prefix, *tuned)},
    claims=CLAIMS,
    note=shared.note(__doc__),
  )


CLAIMS = shared.claims(
  (
    ('base_tuned', 'adapted_tuned', 'base', 'adapted'),
    'A pair gains more by tuning on its decoder than it leads before.',
    f'{shared.T5GEMMA}, Table 2',
    'points: +7.1, +4.9 after RLHF, +1.8, +1.4 before (2B-2B, 9B-9B)',
    {'primary': True},
  ),
  (
    ('base_tuned', 'adapted_tuned'),
    'After tuning, the adapted pair has a lower loss than its decoder.',
    f'{shared.T5GEMMA}, Table 2',
    'points after RLHF: 46.1 against 39.0 (2B-2B)',
    {'primary': True, 'paired': True},
  ),
  (
    ('scratch_tuned', 'adapted_tuned'),
    'After tuning, the adapted pair has a lower loss than one from scratch.',
    f'{shared.T5GEMMA}, Table 4',
    'points: 46.4 against 43.9 (2B-2B); at S-S the other way, by .1',
    {'primary': True, 'paired': True},
  ),
  (
    ('base_tuned', 'prefix_tuned'),
    'A decoder is better if it reads inputs in both directions in tuning.',
    f'{shared.WANG}, Table 8; RedLLM (arXiv:2510.26622)',
    'EAI 52.3 against 51.3, T0 52.0 against 52.1; "improves"',
    {'primary': True, 'paired': True},
  ),
  (
    ('adapted_tuned_dry', 'adapted_tuned'),
    'Dropout in tuning lowers the loss of the adapted pair.',
    f'{shared.WANG}, section 2.3',
    '"helps", no numbers',
    {'paired': True},
  ),
  **shared.TUNED,
)
