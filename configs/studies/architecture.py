"""Architecture and objective from random weights, each question alone.

    python -m encdec_adapt.study --study=configs/studies/architecture.py

Arms read equal rows of S inputs and S targets, with one vocabulary, width and
table, so that counts with and without embeddings agree. `causal` and `prefix`
are decoders of L layers with the loss on targets, `all` is `causal` with the
loss on all tokens. Pairs of L/2 + L/2 layers have the parameters of `causal`:
`half` takes as many tokens, `half_flops` as many FLOPs. `whole`, a pair of
L + L layers, has rows of as many FLOPs as `causal`. `gpu` and `pod` add pairs
that match `prefix` (`half_prefix`, `whole_prefix`), a pair of equal FLOPs in
the paper's counting (`published`), decoders of 2 L layers with the parameters
of `whole`, for as many tokens (`deep`) and FLOPs (`deep_flops`), and span
corruption at equal FLOPs (`spans_..`). All matches are within 1 %.

Not controlled: `all` costs 11 % more FLOPs than `causal` and `half_flops`, as
it computes logits of all positions; `half_flops` reads 1.7 times the rows of
the others; feed-forward widths differ so that parameters or FLOPs agree.

`size=cpu` takes an hour on two quiet cores, `gpu` three on an H100; `pod`, of
64 of them, needs a `text` and its vocabulary.
"""

from encdec_adapt import configs
from encdec_adapt.configs.studies import matched, shared
from encdec_adapt.lab import budgets, pages
from encdec_adapt.models import forward_flops

# Arms of equal FLOPs as others (all else: tokens), and with others' rates.
FLOPS = matched.SPANS | {'half_flops': 'causal', 'half_prefix': 'prefix'}
FLOPS |= {'deep_flops': 'whole'}
RATES = matched.SPANS | {'half_prefix': 'half', 'deep_flops': 'deep'}
RATES |= {'whole_prefix': 'whole', 'published': 'whole'}
_REASON = 'a seventh of what the loss on all tokens gained in a first run'
_NONE = shared.OURS, 'no paper makes the comparison'
_ALL = 'its causal decoder has the loss on all tokens alone'
_REDLLM = 'RedLLM (arXiv:2510.26622)'
_TABLE = f'{shared.WANG}, Table 8'
_OURS = f'{shared.OURS}, on {_TABLE}'
# Contrast, direction, sentence, and source with the numbers of the paper.
PRIMARY = (
  (
    ('causal half', 'greater'),
    'With equal parameters and tokens a pair is behind a causal decoder.',
    _NONE,
  ),
  (
    ('causal half_flops', 'no better'),
    'With equal parameters and FLOPs a pair is no better than the decoder.',
    (f'{shared.OURS}, on {_REDLLM}', _ALL),
  ),
  (
    ('causal whole', 'greater'),
    'With equal FLOPs of a row a pair is behind a causal decoder.',
    (_OURS, f'{_ALL}; EAI: 44.2 (CD:FLM), 39.9 (ED:PLM)'),
  ),
  (
    ('causal prefix', 'no better'),
    'A prefix decoder is no better than a causal decoder.',
    (_OURS, f'{_ALL}; EAI: 44.2 (CD:FLM), 43.5 (ND:PLM)'),
  ),
  (
    ('half_flops all', 'less'),
    'The loss on all tokens is worth more to a decoder than becoming a pair.',
    (
      _REDLLM,
      'decoders nearly dominate at equal FLOPs; here `all` has 11 % more',
    ),
  ),
)
# Without verdicts; the last two at gpu and pod.
OTHERS = (
  (
    ('causal all', 'less'),
    'The loss on all tokens is better for a causal decoder than on targets.',
    (f'{shared.OURS}, on {shared.WANG}', 'leaves the latter out'),
  ),
  (
    ('deep whole', 'greater'),
    'With equal parameters and tokens a pair is behind a deeper decoder.',
    _NONE,
  ),
  (
    ('deep_flops whole', 'greater'),
    'With equal parameters and FLOPs a pair is behind a deeper decoder.',
    _NONE,
  ),
)


def get_study(arg=None):
  """Returns the page of a size (`shared.size`)."""
  study_size = shared.size(arg)
  name = study_size.name
  shapes, size = matched.models(study_size), matched.SIZES[name]
  tokens, tuned = size.tokens * study_size.factor, len(size.rates) > 1
  rows = tokens / size.length

  def budget(arm):
    if arm not in FLOPS:
      return budgets.Tokens(tokens)
    like, length = shapes[FLOPS[arm]], size.length
    row = forward_flops.forward(like, length, length, 2 * length)
    return budgets.FLOPs(forward_flops.TRAINING * row * rows)

  arms, rates = [], []
  for arm in shapes:
    rate = f'rate_{RATES.get(arm, arm)}' * tuned
    config = f'{configs.path("studies/matched.py")}:{study_size.arguments}'
    config += f',arm={arm}'
    arms.append(pages.Arm(arm, config, budget=budget(arm), rate=rate))
    if tuned and arm not in RATES:
      rates.append(pages.Rate(rate, arm, size.rates))
  spans = [pages.Evaluation('hidden', records='spans_causal')]
  spans *= 'spans_causal' in shapes
  # Rows of text are longer than those that span corruption is trained on.
  texts = [arm for arm in arms if arm.name not in matched.SPANS]
  claims = [_claim(*row, primary=True, paired=True) for row in PRIMARY]
  claims += [_claim(*row) for row in OTHERS[: 3 if spans else 1]]
  return pages.Study(
    'architecture',
    'Architecture and objective from random weights',
    name,
    tuple(arms),
    tuple(range(size.seeds)),
    tuple(claims),
    (shared.measured('text', 'causal', texts), *spans),
    rates=tuple(rates),
    platform='gpu' if name == 'gpu' else '',
    topology=study_size.topology if name == 'pod' else '',
    note=shared.note(__doc__),
  )


def _claim(contrast, sentence, paper, **fields):
  names, direction = contrast
  fields['reason'] = _REASON
  return shared.claim(
    tuple(names.split()), sentence, *paper, direction, **fields
  )
