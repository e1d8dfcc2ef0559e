"""Are passages that are read one by one better than one long input?

    python -m encdec_adapt.study --study=configs/studies/passages.py:size=cpu

Tunes the pair adapted from the decoder on questions on documents, as MEAP's
(arXiv:2502.07490): each of six has the code of a thing, and one is asked for
(source `documents`). Each is a passage (Fusion-in-Decoder, arXiv:2007.01282;
objective `passages`): the encoder reads the passages one by one, at positions
from 0, or all of them as one input (option `joined`). Both read the same
tokens, the question in front of each passage. MEAP asks on 20 documents with
text around their facts; as one input these are longer than the 256 tokens that
the decoder was trained on.

Not controlled: an input of one piece needs the question only once, and then has
fewer tokens. Passages are shorter than the 128 tokens that the pair was adapted
on, the whole input is longer; the decoder that it comes from has read 256. At
cpu both are still learning when training ends. `cpu` took 1.1 hours of stages,
two at a time on two cores, after `tuning`.
"""

import dataclasses

from encdec_adapt.configs.studies import shared

_ROWS = {
  'data.source': 'documents',
  'data.objective': 'passages:length=40',  # The longest has 39 tokens.
  'data.encoder_length': 240,
  'data.decoder_length': 16,
}
_METRICS = 'held_out/loss', 'held_out/exact_match'


def get_study(arg=None):
  """Returns the page of a size (`shared.size`)."""
  size = shared.size(arg)
  steps = size.steps(128, pod=480_000)
  adapted = shared.pair(size, 'adapted', steps, rate='rate_adapted')
  # Both learn to find the document after about 60 to 120 steps at cpu.
  updates = size.steps(300, pod=300)
  passages = dataclasses.replace(
    shared.tuned(size, adapted, 'rate_passages', updates, **_ROWS),
    name='passages',
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
