"""Does tuning of low rank reach full tuning?

    python -m encdec_adapt.study --study=configs/studies/lora.py:size=cpu

Tunes the decoder, and the pair adapted from it, on look-ups in a table
(configs/lookups.py) and on the rest of functions (configs/functions.py): all
parameters, or adapters of rank 2, 8 and 32 on all projections, with alpha 32.
Each has the best of at least three learning rates at a factor of 3, around ten
times as high for adapters ("LoRA Without Regret", Thinking Machines, 2025).
Three seeds: intervals, and no verdicts.

Not controlled: the pair's cross-attention is a copy, so that it can be adapted
at all; a fresh one would train whole (`full=cross_attention`).
"""

import dataclasses

from encdec_adapt import configs
from encdec_adapt.configs.studies import shared
from encdec_adapt.lab import pages

_SOURCES = {
  'lookups': {},
  # Characters of a beginning and its rest are at most 150 and 120.
  'functions': {
    'data.source': f'functions:{configs.path("decoders/held_out.txt")}',
    'data.seqio_modules': ('encdec_adapt.configs.functions',),
    'data.encoder_length': 64,
    'data.decoder_length': 64,
  },
}
_RANKS = 2, 8, 32


def get_study(arg=None):
  """Returns the page of a size (`shared.size`)."""
  size = shared.size(arg)
  steps = size.steps(128, pod=480_000)
  adapted = shared.pair(size, 'adapted', steps, rate='rate_adapted')
  base = pages.Arm('base', size.config())
  arms, evaluations = [], []
  for task, changes in _SOURCES.items():
    tuned = [
      _tuned(size, arm, task, rank, changes)
      for arm in (base, adapted)
      for rank in (0, *_RANKS)
    ]
    arms += tuned
    records = f'adapted_{task}'
    evaluations.append(shared.measured(task, records, tuned, 'base', 'adapted'))
  return shared.study(
    'lora',
    'Tuning of low rank',
    size,
    (adapted, *arms),
    seeds=size.seeds[:3],
    middles={x.name: 1e-2 for x in arms if '_rank' in x.name},
    evaluations=tuple(evaluations),
    claims=CLAIMS,
    note=shared.note(__doc__),
  )


def _tuned(size, arm, task, rank, changes):
  """Returns an arm after tuning on a task, with adapters above rank 0."""
  name = f'{arm.name}_{task}' + (f'_rank{rank}' if rank else '')
  if rank:
    changes = {'train.lora.rank': rank, 'train.lora.alpha': 32.0, **changes}
  tuned = shared.tuned(size, arm, f'rate_{name}', **changes)
  return dataclasses.replace(tuned, name=name, seeds=None)


CLAIMS = tuple(
  shared.claim(
    (f'{model}_{task}_rank{rank}', f'{model}_{task}'),
    f'Full tuning is no better than rank {rank}: {model}, {task}.',
    'LoRA (arXiv:2106.09685), Table 2, 6',
    '"on par or better" at rank 8 (GLUE), 4 (E2E)',
    'no better',
    **shared.TUNED,
    paired=True,
  )
  for task in _SOURCES
  for model in ('base', 'adapted')
  for rank in _RANKS
)
