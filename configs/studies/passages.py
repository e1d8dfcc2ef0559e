"""Are passages that are read one by one better than one long input?

    python -m encdec_adapt.study --study=configs/studies/passages.py:size=cpu

Tunes the pair adapted from the decoder on the questions of `tuning`, with rows
of 60 to 80 characters and each of the four rows of a table as a passage
(Fusion-in-Decoder, arXiv:2007.01282; objective `passages`): its encoder reads
the passages one by one, at positions from 0, or all of them as one input
(option `joined`). Both read the same tokens, the question in front of each
passage. Questions on 20 documents, as in MEAP, are longer than the rows of
these models (see `meap`).

Not controlled: an input of one piece needs the question only once, and then has
fewer tokens. Passages are shorter than the 128 tokens that the pair was adapted
on, the whole input is longer; the decoder that it comes from has read 256.
`cpu` took 49 minutes beside other work, after `tuning`, whose adapted pairs it
reads.
"""

import dataclasses

from encdec_adapt.configs.studies import shared

_LENGTH = 64  # Tokens of a passage; four of them are an input.
_ROWS = {
  'data.source': 'lookups:length=shorter,table=rows',
  'data.objective': f'passages:length={_LENGTH}',
  'data.encoder_length': 4 * _LENGTH,
}
_METRICS = 'held_out/loss', 'held_out/exact_match'


def get_study(arg=None):
  """Returns the page of a size (`shared.size`)."""
  size = shared.size(arg)
  steps = size.steps(128, pod=480_000)
  adapted = shared.pair(size, 'adapted', steps, rate='rate_adapted')
  passages = dataclasses.replace(
    shared.tuned(size, adapted, 'rate_passages', **_ROWS), name='passages'
  )
  changes = {'data.objective': f'{_ROWS["data.objective"]},joined'}
  joined = dataclasses.replace(
    passages, name='joined', changes={**passages.changes, **changes}
  )
  arms = passages, joined
  return shared.study(
    'passages',
    'Passages one by one, or as one input',
    size,
    (adapted, *arms),
    # Those of the stored runs.
    middles={x.name: 1e-3 for x in arms},
    evaluations=(
      shared.measured('answers', 'passages', arms, metrics=_METRICS),
    ),
    claims=CLAIMS,
    note=shared.note(__doc__),
  )


CLAIMS = shared.claims(
  (
    ('joined', 'passages'),
    'Passages that are read one by one have a lower loss than as one input.',
    f'{shared.OURS}, on Fusion-in-Decoder (arXiv:2007.01282)',
    'the paper has no such comparison',
    {'primary': True},
  ),
  **shared.TUNED,
)
