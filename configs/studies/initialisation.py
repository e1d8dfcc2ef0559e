"""What does the initialisation of cross-attention matter?

    python -m encdec_adapt.study \
      --study=configs/studies/initialisation.py:size=cpu

Adapts a balanced pair with cross-attention copied from self-attention, drawn
fresh, and drawn fresh behind a closed gain; and an unbalanced pair, whose
cross-attention has to be drawn, with 0, 1, 5 and 25 % of the steps for
cross-attention alone (at cpu 0, 1, 6 and 32 steps, too few for verdicts). The
paper's K = 1000 and 5000 are .5 and 2.6 % of its steps.

All pairs have the same decoder and teacher; the unbalanced pair a larger
encoder, as in the paper.

Not controlled: the unbalanced pair has more parameters; the pair behind a
closed gain shares the rate of copied, at cpu unbalanced pairs that of warmup_1;
fresh cross-attention of a balanced pair has no steps of its own. The paper's K
was tried with UL2 and without a teacher; here all arms have PrefixLM and a
teacher. At cpu fresh cross-attention is hardly used yet: with other inputs its
pairs lose about .01 nats more, the pair with copied cross-attention .045. With
fresh cross-attention the balanced and the unbalanced pair are level. A closed
gain leads by as much as copied weights without using inputs, so that the lead
need not come from the copied weights. All are .06 to .07 nats behind the small
decoder. `cpu` took 1.6 hours of stages, two at a time on two cores.
"""

from encdec_adapt.configs.studies import shared

# Cross-attention's share of the steps before the rest trains.
SHARES = {
  'warmup_0': 0.0,
  'warmup_1': 0.01,
  'warmup_5': 0.05,
  'warmup_25': 0.25,
}


def get_study(arg=None):
  """Returns the page of a size (`shared.size`)."""
  size = shared.size(arg)
  # 800B tokens at pod, in batches of 4.2M.
  steps = size.steps(128, pod=190_000)
  # Balanced pairs have the decoder, and teacher, of unbalanced ones.
  sides = 2 * size.unbalanced[1:]
  fresh = {'init.cross_attention': 'fresh'}
  arms = [
    shared.pair(size, name, steps, sides, changes=changes, rate='rate_copied')
    for name, changes in (
      ('copied', {}),
      ('fresh', fresh),
      ('fresh_closed', fresh | {'init.post_norm_gain': 'zero'}),
    )
  ]
  arms += [
    shared.pair(
      size,
      name,
      steps,
      size.unbalanced,
      changes={
        'train.steps': steps,
        'train.cross_attention_warmup': round(share * steps),
      },
      rate='rate_warmup_1',
    )
    for name, share in SHARES.items()
  ]
  return shared.study(
    'initialisation',
    'Cross-attention at the start of adaptation',
    size,
    arms,
    size.unbalanced,
    evaluations=(shared.measured('text', 'copied', arms, sides[0]),),
    claims=CLAIMS + shared.claims(*WARMUPS, paired=True, primary=size.large),
    note=shared.note(__doc__),
  )


CLAIMS = shared.claims(
  (
    ('warmup_1', 'copied'),
    'Early in adaptation, a balanced pair leads one with a larger encoder.',
    f'{shared.T5GEMMA}, Figure 2',
    'points after 42B tokens: 46.6 (2B-2B), 41.5 (9B-2B); 9B-2B leads later',
    {'primary': True, 'paired': True},
  ),
  (
    ('fresh', 'copied'),
    'Copied cross-attention gives a lower loss than fresh cross-attention.',
    f'{shared.OURS}, on {shared.T5GEMMA}, section 3',
    'copies; no comparison',
    {'primary': True, 'paired': True},
  ),
  (
    ('fresh', 'fresh_closed'),
    'Fresh cross-attention is no better behind a closed gain.',
    shared.OURS,
    'no paper states the gain',
    {'direction': 'no better'},
  ),
)
WARMUPS = (
  (
    ('warmup_0', 'warmup_1'),
    'A short warm-up of cross-attention is better than none.',
    f'{shared.T5GEMMA}, section 5',
    'points: K = 1000 62.5, none 61.8',
    {},
  ),
  (
    ('warmup_5', 'warmup_1'),
    'A short warm-up of cross-attention is better than one 5 times as long.',
    f'{shared.T5GEMMA}, section 5',
    'points: K = 1000 62.5, K = 5000 60.2',
    {},
  ),
  (
    ('warmup_25', 'warmup_1'),
    'A short warm-up of cross-attention is better than a quarter of the steps.',
    f'{shared.OURS}, on {shared.T5GEMMA}, section 5',
    'points: K = 1000 62.5, K = 5000, 2.6 % of the steps, 60.2',
    {'primary': False},
  ),
)
