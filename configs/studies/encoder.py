"""Should the encoder read in both directions, and with more key/value heads?

    python -m encdec_adapt.study --study=configs/studies/encoder.py:size=cpu

Adapts a pair with a bidirectional encoder, a causal one, or a bidirectional one
with a key/value head for each query head (repeated from the source), for two
lengths of training. A source is causal, so that a causal encoder may lead after
few steps. The longer runs are then tuned on look-ups. Every model has a
learning rate of its own, at each length.

Not controlled: the encoder with more key/value heads has more parameters (the
shapes of gpu have as many already, so that it is left out there), and begins as
the same function as the others. At cpu, the longer runs are a twelfth of the
source's training: pairs are .1 nats behind it on text. With other inputs they
lose .18 (after the shorter runs .06 and .08), the source .32, so that claims
before tuning are on encoders that are used half as much. `cpu` took 1.9 hours
of stages, two at a time on two cores.
"""

import dataclasses

from encdec_adapt.configs.studies import shared

PAPER = f'{shared.T5GEMMA}, section 5'


def get_study(arg=None):
  """Returns the page of a size (`shared.size`)."""
  size = shared.size(arg)
  stack = shared.stack(size, 'base')
  encoders = {'bidirectional': {}, 'causal': {'model.causal_encoder': True}}
  if stack.kv_heads < stack.heads:
    encoders['heads'] = {'model.encoder.kv_heads': stack.heads}
  # 2T tokens at pod, in batches of 4.2M; at cpu as in `tuning`.
  steps = size.steps(128, gpu=240, pod=480_000)
  arms = [
    shared.pair(size, name, steps, changes=changes, rate=f'rate_{name}')
    for name, changes in encoders.items()
  ]
  budget = size.tokens(max(1, steps // 5))
  early = [
    dataclasses.replace(arm, name=f'{arm.name}_early', budget=budget)
    for arm in arms[:2]
  ]
  tuned = [shared.tuned(size, arm, f'rate_{arm.name}_tuned') for arm in arms]
  commands, partial = shared.partial_tables(tuned[0], tuned)
  return shared.study(
    'encoder',
    'Attention of the encoder',
    size,
    (*early, *arms, *tuned),
    commands=commands,
    evaluations=(
      shared.measured('text', 'bidirectional', (*early, *arms), 'base'),
      shared.measured('answers', 'bidirectional_tuned', tuned),
      *partial,
    ),
    claims=CLAIMS + HEADS_CLAIMS * ('heads' in encoders),
    note=shared.note(__doc__),
  )


CLAIMS = shared.claims(
  (
    ('causal', 'bidirectional'),
    'A bidirectional encoder has a lower loss than a causal one.',
    PAPER,
    'points: +4.1 at 2B-2B',
    {'primary': True, 'paired': True},
  ),
  (
    ('causal_early', 'bidirectional_early', 'causal', 'bidirectional'),
    'A bidirectional encoder gains on a causal one by longer training.',
    shared.OURS,
    'the paper has one length',
    {'direction': 'greater', 'primary': True},
  ),
  (
    ('causal_early', 'bidirectional_early'),
    'A bidirectional encoder has a lower loss after a fifth of the steps.',
    shared.OURS,
    'the paper has one length',
    {'paired': True},
  ),
  (
    ('causal_tuned', 'bidirectional_tuned'),
    'After tuning, a bidirectional encoder has a lower loss than a causal one.',
    PAPER,
    'points: +4.7 at 2B-2B',
    {**shared.TUNED, 'primary': True, 'paired': True},
  ),
)
HEADS_CLAIMS = shared.claims(
  (
    ('bidirectional', 'heads'),
    'More key/value heads in the encoder do not matter before tuning.',
    PAPER,
    'points: +.5 at 2B-2B',
    {'direction': 'equal'},
  ),
  (
    ('bidirectional_tuned', 'heads_tuned'),
    'After tuning, more key/value heads in the encoder are worse.',
    PAPER,
    'points: -2.9 at 2B-2B',
    {'direction': 'greater', **shared.TUNED},
  ),
  primary=True,
  paired=True,
)
