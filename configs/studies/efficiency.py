"""What does inference cost, for which quality?

    python -m encdec_adapt.study --study=configs/studies/efficiency.py:size=cpu

Measures latency, memory and FLOPs (as computed, and as the paper counts them)
of models of `adaptation`, for requests of as many tokens as a row, and plots
held-out loss against them. It reads models that `adaptation` has trained. Left
out are models of a shape that is measured already: pairs from random weights
(that of `adapted`) and the decoder trained on for equal tokens (that of
`continued_flops`, which has a lower loss); and the imported decoders, which are
evaluated in bfloat16 where the processor has it (trained models in float32).

Costs do not depend on weights, so that one seed of each arm is measured, and no
claim has a verdict. Latency is of this machine, at batch 1: run the page on an
idle one with `--jobs=1`. The paper's count, as found from its numbers, omits
cross-attention and has logits of the prompt, so that a balanced pair costs less
than its decoder by construction.

At cpu a request of `adapted` takes 6.67e8 FLOPs by the paper's count, of
`continued_flops` 6.86e8; as computed 6.98e8 and 5.56e8, a quarter more. A token
of the answer takes .53 and .41 ms, the input 10.4 and 6.5 ms, so that a request
takes 78 and 59 ms. Their losses are 2.72 and 2.62.
"""

from encdec_adapt.configs.studies import adaptation, combined, shared
from encdec_adapt.lab import pages

LEFT_OUT = 'scratch', 'scratch_taught', 'scratch_total', 'continued'
LEFT_OUT += 'base', 'small'


def get_study(arg=None):
  """Returns the page of a size (`shared.size`)."""
  size, page = shared.size(arg), adaptation.get_study(arg)
  models = tuple(
    f'{page.name}.{model}'
    for model in page.evaluations[0].models
    if model not in LEFT_OUT
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
    ('adaptation.continued_flops', 'adaptation.adapted'),
    'A pair answers at fewer FLOPs, as the paper counts, than its decoder.',
    f'{shared.T5GEMMA}, Figure 3',
    '1e14: .4642 (2B-2B) against .4911',
    metric='cost/published_flops',
    smallest=1.0,
    reason='a count has no error',
  ),
  shared.claim(
    ('adaptation.continued_flops', 'adaptation.adapted'),
    'A pair answers as fast as its decoder.',
    f'{shared.T5GEMMA}, Figure 4',
    'ms a query: 805 (2B-2B) against 915, 2727 (9B-9B) against 2578',
    'equal',
    metric='cost/decode_ms',
    smallest=0.1,
    reason='a fifth of the time of a token',
  ),
)
