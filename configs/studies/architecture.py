"""Architecture and objective from random weights, each question alone.

    python -m encdec_adapt.study --study=configs/studies/architecture.py

Arms read equal rows of S inputs and S targets, with one vocabulary, width and
table, so that counts with and without embeddings agree: `causal` and `prefix`
decoders of L layers with the loss on targets; `all`, causal with the loss on
all tokens; pairs of L/2 + L/2 layers with the parameters of `causal`, for as
many tokens (`half`) and FLOPs (`half_flops`); of L + L layers with rows of as
many FLOPs (`whole`). `gpu` and `pod` add pairs that match `prefix`, a pair of
equal FLOPs as published, decoders of 2 L layers with the parameters of `whole`,
for as many tokens (`deep`) and FLOPs, and span corruption at equal FLOPs. All
matches are within 1 %. `size=cpu` takes an hour on two quiet cores, `gpu` three
on an H100; `pod`, of 64 of them, needs a `text` and its vocabulary.
"""

from encdec_adapt import configs
from encdec_adapt.configs.studies import matched, shared
from encdec_adapt.evaluation.studies import budgets, pages
from encdec_adapt.models import forward_flops

# Arms of equal FLOPs as others (all else: tokens), and with others' rates.
FLOPS = matched.SPANS | {'half_flops': 'causal', 'half_prefix': 'prefix'}
FLOPS |= {'deep_flops': 'whole'}
RATES = matched.SPANS | {'half_flops': 'half', 'half_prefix': 'half'}
RATES |= {'all': 'causal', 'deep_flops': 'deep'}
RATES |= {'whole_prefix': 'whole', 'published': 'whole'}
_REASON = 'a seventh of what the loss on all tokens gained in a first run'
_NONE = 'a comparison that no paper makes', ''
_REDLLM = 'arXiv 2510.26622', 'decoders (loss on all tokens) nearly dominate'
_WANG = 'arXiv 2204.05832, table 8', 'ED:PLM 39.9, ND:PLM 43.5, CD:FLM 44.2'
# Sentence: contrast, direction, and source with the numbers of the paper.
CLAIMS = {
  'With equal parameters and tokens a pair is behind a causal decoder.': (
    *('causal half', 'greater', _NONE),
  ),
  'With equal parameters and FLOPs a pair is no better than the decoder.': (
    *('causal half_flops', 'no better', _REDLLM),
  ),
  'With equal FLOPs of a row a pair is behind a causal decoder.': (
    *('causal whole', 'greater', _WANG),
  ),
  'A prefix decoder is no better than a causal decoder.': (
    *('causal prefix', 'no better', _WANG),
  ),
  'The loss on all tokens is worth more to a decoder than becoming a pair.': (
    *('half_flops all', 'less', _NONE),
  ),
}


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
      steps = round(rows / size.batch / 2)
      rates.append(pages.Rate(rate, arm, size.rates, steps))
  spans = [pages.Evaluation('spans', (), (), 'spans_causal')]
  spans *= 'spans_causal' in shapes
  fields = dict(reason=_REASON, primary=True, paired=True)
  return pages.Study(
    'architecture',
    'Architecture and objective from random weights',
    name,
    tuple(arms),
    tuple(range(size.seeds)),
    tuple(
      shared.claim(tuple(names.split()), sentence, *paper, direction, **fields)
      for sentence, (names, direction, paper) in CLAIMS.items()
    ),
    (pages.Evaluation('text', records='causal'), *spans),
    rates=tuple(rates),
    platform='gpu' if name == 'gpu' else '',
    topology=study_size.topology if name == 'pod' else '',
  )
