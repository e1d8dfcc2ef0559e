"""What does inference cost, for which quality?

    python -m encdec_adapt.study --study=configs/studies/efficiency.py:size=cpu

Measures FLOPs (as computed, and as the paper counts them), latency and memory
of requests of as many tokens as a row, for the models of `adaptation` and their
decoders, one of each shape, and shows them against held-out loss. It trains
nothing that this page has trained. Pairs of other pages have the shape of
`adapted`, and cost as much.

Latency is of this machine, at batch 1, and shared by all seeds of an arm: its
claims are over one seed of each and have no verdict. Run it on an idle machine
with `--jobs=1`. FLOPs are counted and have no error; the paper's count omits
cross-attention, so that a pair costs less by construction.
"""

from encdec_adapt.configs.studies import adaptation, combined, shared
from encdec_adapt.lab import pages


def get_study(arg=None):
  """Returns the page of a size (`shared.size`)."""
  size, page = shared.size(arg), adaptation.get_study(arg)
  # The others have the shape of `adapted` or of `base`.
  models = tuple(
    f'{page.name}.{model}'
    for model in page.evaluations[0].models
    if not model.startswith(('scratch', 'continued'))
  )
  cost = pages.Evaluation(
    'cost',
    (f'--cost={size.length},{size.length}',),
    ('cost/published_flops', 'cost/prefill_flops', 'cost/decode_ms'),
    models=models,
    all_seeds=False,
    seconds=30,
  )
  return combined.study(
    'efficiency',
    'Quality against FLOPs and latency',
    size,
    [page],
    evaluations=(cost,),
    claims=CLAIMS,
    note=shared.note(__doc__),
  )


CLAIMS = (
  shared.claim(
    ('adaptation.base', 'adaptation.adapted'),
    'A pair answers at fewer FLOPs, as the paper counts, than its decoder.',
    f'{shared.T5GEMMA}, Figure 3',
    '1e14: .4642 (2B-2B) against .4911',
    metric='cost/published_flops',
    smallest=1.0,
    reason='a count has no error',
  ),
  shared.claim(
    ('adaptation.base', 'adaptation.adapted'),
    'A pair answers as fast as its decoder.',
    f'{shared.T5GEMMA}, Figure 4',
    'ms a query: 805 (2B-2B) against 915, 2727 (9B-9B) against 2578',
    'equal',
    metric='cost/decode_ms',
    smallest=0.1,
    reason='a tenth of a millisecond a token is the spread of repeats here',
  ),
)
