"""Are passages that are read one by one better than one long input?

    python -m encdec_adapt.study --study=configs/studies/passages.py:size=cpu

Tunes the pair adapted from the decoder on a small version of the questions on
documents of `--retrieval`, which stand for MEAP's (arXiv:2502.07490; 10 and 20
documents with text around the fact): six documents, each one fact (source
`documents`). The encoder reads them as passages, one by one at positions from 0
with the question in front of each (Fusion-in-Decoder, arXiv:2007.01282;
objective `passages`), or as one input with the question once behind them
(one_input). A model that copies a random code is right in one of six questions,
which is the floor.

Not controlled: passages have 212 tokens with their questions, the one input
128, and the pair was adapted on 128 (its decoder on 256); both read as many
questions, not tokens. Passages bring the question next to each fact. Local
layers see 63 tokens to each side: a whole passage, but not both ends of the one
input. At cpu the pair that reads one input does not find the code yet when
training ends, so that the effect is of how soon each learns, not of what either
reaches.

The page was designed after a first run, in which the one input had the
question in front of each document, too: after 300 steps it answered .218 of the
questions, the passages .640, and the claim was on the loss. On look-ups among
four passages, after 110 steps, one input was ahead by .04 nats (+.02 to +.07).
Ten documents as passages with their questions are longer than 256 tokens.
`cpu` took 1.2 hours of stages, two at a time on two cores, after `tuning`.
"""

import dataclasses

from encdec_adapt.configs import documents
from encdec_adapt.configs.studies import shared
from encdec_adapt.lab import pages

_ROWS = {
  'data.source': 'documents:passages',
  'data.seqio_modules': ('encdec_adapt.configs.documents',),
  # A passage has at most 39 tokens of the shipped vocabulary; its end is cut.
  'data.objective': 'passages:length=40',
  'data.encoder_length': 240,
  'data.decoder_length': 16,
}
# Of other vocabularies, which may cut codes into more tokens.
_LARGE = {'data.objective': 'passages:length=64', 'data.encoder_length': 384}
_LARGE |= {'data.decoder_length': 32}
_ONE_INPUT = {
  'data.source': 'documents',
  'data.objective': 'pairs',
  'data.encoder_length': 144,
}
_MATCH = 'held_out/exact_match'


def get_study(arg=None):
  """Returns the page of a size (`shared.size`)."""
  size = shared.size(arg)
  steps = size.steps(128, pod=480_000)
  adapted = shared.pair(size, 'adapted', steps, rate='rate_adapted')
  updates = size.steps(450, pod=450)
  rows = _ROWS | (_LARGE if size.large else {})
  passages = dataclasses.replace(
    shared.tuned(size, adapted, 'rate_passages', updates, **rows),
    name='passages',
  )
  whole = _ONE_INPUT | ({'data.encoder_length': 256} if size.large else {})
  one_input = dataclasses.replace(
    passages, name='one_input', changes={**passages.changes, **whole}
  )
  arms = passages, one_input
  return shared.study(
    'passages',
    'Passages one by one, or as one input',
    size,
    (adapted, *arms),
    # The best of three of the run with 300 steps.
    middles={x.name: 1e-3 for x in arms},
    evaluations=(
      shared.measured(
        'documents',
        pages.EACH_MODEL,
        arms,
        metrics=(_MATCH, pages.LOSS),
        floors={_MATCH: 1 / documents.DOCUMENTS},
      ),
    ),
    claims=CLAIMS,
    note=shared.note(__doc__),
  )


_SOURCE = f'{shared.OURS}, on Fusion-in-Decoder (arXiv:2007.01282)'
_NUMBERS = 'the paper has no such comparison'
CLAIMS = shared.claims(
  (
    ('one_input', 'passages'),
    'More answers are right from passages read one by one than as one input.',
    _SOURCE,
    _NUMBERS,
    {
      'metric': _MATCH,
      'direction': 'greater',
      'smallest': 0.1,
      'reason': 'a tenth of the questions',
      'primary': True,
    },
  ),
  (
    ('one_input', 'passages'),
    'Passages that are read one by one have a lower loss than as one input.',
    _SOURCE,
    _NUMBERS,
    {},
  ),
  **shared.TUNED,
)
