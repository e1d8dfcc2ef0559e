"""What do T5Gemma 2's savings of parameters cost?

    python -m encdec_adapt.study --study=configs/studies/t5gemma2.py:size=cpu

Adapts a pair with a table for each stack and cross-attention in every layer; a
pair with one table; a pair with merged attention, which reads its own and the
encoder's keys at once; and a pair with cross-attention in global layers only.

Not controlled: parameters, which are what is saved, and how soon each adapts:
at cpu pairs train on a twelfth of their source's tokens, and are still .1 nats
behind it on text. Cross-attention in global layers only is behind by little
more than the smallest difference, and its pair uses its inputs least (with
other inputs .10 nats more, of the others .18 to .20). The paper takes Gemma 2
2B and 400B tokens, as `pod` does, and measures points of tasks. `cpu` took an
hour of stages, two at a time on two cores, with those of `separate` from
`encoder`.
"""

from encdec_adapt.configs.studies import shared

PAPER = 'T5Gemma 2 (arXiv:2512.14856), Table 1'
ARMS = {
  'separate': {},
  'shared_table': {'model.shared_table': True},
  'merged': {'model.cross_merged': True},
  'global_layers': {'model.cross_layers': 'global'},
}


def get_study(arg=None):
  """Returns the page of a size (`shared.size`)."""
  size = shared.size(arg)
  steps = size.steps(128, pod=95_000)
  arms = [
    shared.pair(size, name, steps, changes=changes, rate=f'rate_{name}')
    for name, changes in ARMS.items()
  ]
  return shared.study(
    't5gemma2',
    'Shared tables and cheaper cross-attention',
    size,
    arms,
    evaluations=(shared.measured('text', 'separate', arms, 'base'),),
    claims=CLAIMS,
    note=shared.note(__doc__),
  )


CLAIMS = shared.claims(
  (
    ('separate', 'shared_table'),
    'One table is as good as two.',
    PAPER,
    'points: -.1 (47.7 against 47.8)',
    {'direction': 'equal'},
  ),
  (
    ('separate', 'merged'),
    'Merged attention is as good as separate cross-attention.',
    PAPER,
    'points: -.3 (47.5 against 47.8)',
    {'direction': 'equal'},
  ),
  (
    ('separate', 'global_layers'),
    'Cross-attention in global layers only is worse.',
    PAPER,
    'points: -1.3 (46.5 against 47.8)',
    {'direction': 'greater'},
  ),
  (
    ('merged', 'global_layers'),
    'Cross-attention in global layers only is worse than merged attention.',
    PAPER,
    'points: -1.0 (46.5 against 47.5)',
    {'direction': 'greater'},
  ),
  primary=True,
  paired=True,
)
