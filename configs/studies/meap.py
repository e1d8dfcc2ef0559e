"""What are masked inputs worth in pretraining?

    python -m encdec_adapt.study --study=configs/studies/meap.py:size=cpu

Decoders predict the next token, plainly and with 15 % of what they read masked
(MEAP), and look for needles in texts that are shorter than their rows. They
start from random weights, at cpu from the base decoder: one from random weights
finds needles by chance alone. The attention of the model that was trained with
masks is compared on the same text as it is and with masks, and so is that of
the model that was not. `gpu` adds shares and spans.

Not controlled: at cpu masks are in the last .8M of 6.9M tokens; at gpu shares
and spans share the learning rate of MEAP. Left out: masked copies in tuning,
which MEAP makes for answers of more than 50 tokens, and questions on 20
documents. Both exceed the rows of these decoders. Accuracy on commonsense is
not measured. At cpu no model answers with a needle's code. Both choose the
right one of four for needles at the end of the text (.50 and .56 of the
questions), elsewhere as by chance (.19 to .33; chance: .25). Masks take
attention off in a model without masks in training, too: .13, where MEAP's has
.34, and make its other attention vary more, by .021, where MEAP's has .002. The
rate of MEAP is the smallest tried; its rates from 1e-4 to 1e-3 differ by .014.
`cpu` took 1.3 hours of stages, two at a time on two cores.
"""

from encdec_adapt.configs.studies import cells, shared
from encdec_adapt.lab import pages

CITED = 'MEAP (arXiv:2502.07490)'
# At gpu; the first is MEAP's own.
OPTIONS = ('', ':share=0.05', ':share=0.1', ':share=0.2', ':span=5', ':span=50')
# The paper's, of 1.1B parameters; 40B tokens. A microbatch is a row a chip.
POD = {'layers': 24, 'width': 2048, 'mlp_width': 5632, 'heads': 32}
POD = {f'model.decoder.{key}': x for key, x in (POD | {'kv_heads': 2}).items()}
POD |= {'data.decoder_length': 4096, 'train.batch_size': 256}
POD |= {'train.microbatches': 4, 'optimizer.learning_rate': 4e-4}


def get_study(arg=None):
  """Returns the page of a size (`shared.size`)."""
  size = shared.size(arg)
  read = [_pretrained(size, 'next_token', 'causal_lm')]
  for options in OPTIONS if size.name == 'gpu' else OPTIONS[:1]:
    read.append(_pretrained(size, _name(options), f'meap{options}'))
  prefixes, text = cells.prefixes(size, [arm.name for arm in read])
  # A needle's question and what is generated follow, of at most 96 tokens.
  length = POD['data.decoder_length'] if size.name == 'pod' else 2 * size.length
  needles = f'--retrieval_lengths={length - 96}', '--retrieval_tasks=needle'
  return shared.study(
    'meap',
    'MEAP: masks in pretraining',
    size,
    read,
    commands=(prefixes,),
    evaluations=(
      text,
      shared.measured('masks', 'next_token', read, **ATTENTION),
      pages.Evaluation(
        'needles',
        ('--retrieval=python', *needles, '--limit=100'),
        (NEEDLE,),
        models=tuple(arm.name for arm in read),
        seconds=60,
        floors={NEEDLE: 0.25},  # Of four needles.
      ),
    ),
    claims=CLAIMS + SWEEP * (size.name == 'gpu'),
    note=shared.note(__doc__),
  )


def _name(options):
  return f'meap{options}'.translate(str.maketrans(':=', '__'))


def _pretrained(size, name, objective):
  steps = size.steps(192, gpu=240, pod=40_000)
  changes, starts = {'data.objective': objective}, {}
  changes |= POD if size.name == 'pod' else {}
  if not size.large:
    changes['init.mode'], starts['init.encoder'] = 'checkpoint', 'base'
  config = size.config('tiny' if size.large else 'base')
  return pages.Arm(name, config, changes, starts, steps, 'rate_meap')


ATTENTION = {'arguments': ('--attention=128',)}
ATTENTION['metrics'] = 'attention/score_decay', 'attention/variance_increase'
NEEDLE = 'needle/choice'
MORE = {'direction': 'greater', 'smallest': 0.1}
FOUND = {**MORE, 'metric': NEEDLE, 'reason': 'the paper has .14'}
DECAY, VARIANCE = (
  {**MORE, 'metric': x, 'reason': 'a fifth of what the paper has (decay)'}
  for x in ATTENTION['metrics']
)
VARIANCE |= {
  'smallest': 0.05,
  'reason': 'two thirds of .078, in units of an even share',
}
PLAIN = 'next_token', 'meap'
# fmt: off
ROWS = (
  (PLAIN, 'Pretraining with masks finds needles more often.',
   f'{CITED}, needles, 32K', 'ROUGE-1 at 40B tokens: 65.9 to 80.2',
   {'primary': True, **FOUND}),
  (PLAIN, 'Pretraining with masks does not change the loss on plain text.',
   f'{shared.OURS}, on {CITED}', 'commonsense, points: +1.6',
   {'primary': True, 'direction': 'equal'}),
  (('meap',), 'Masks in what a model reads take attention off their positions.',
   f'{CITED}, attention analysis', '53.34 %', {'primary': True, **DECAY}),
  (('meap',), 'Masks in what a model reads make its other attention vary more.',
   f'{CITED}, attention analysis', '+7.80 %', VARIANCE),
  (PLAIN, 'Masks take more attention off in a model trained with masks.',
   shared.OURS, 'the paper has one model', DECAY),
)
# fmt: on
CLAIMS = shared.claims(*ROWS)
SWEEP = shared.claims(
  *(
    (
      (_name(x), 'meap'),
      f'15 % of single masks find needles more often than {x[1:]}.',
      f'{CITED}, ablations',
      'chosen; their numbers were not at hand',
      FOUND,
    )
    for x in OPTIONS[1:]
  ),
)
