"""Does the score after pretraining predict the score after tuning?

    python -m encdec_adapt.study --study=configs/studies/correlation.py:size=cpu

Trains nothing that the pages `objectives`, `tuning` and `adaptation` have
trained: it reads their models, or trains those that are not there yet. The
report's scatter has one point for each tuned model, the mean over seeds and
tunings; at `cpu` no model of `adaptation` is tuned. Spearman's
correlation (Encoder-Decoder Gemma, arXiv:2504.06225, Figure 6: across sizes .97
and .89, within a size .42 and .05) only describes these models: across sizes it
needs arms of four sizes, within one six arms of it. No claim is made of it.

At cpu the loss on text before and that on look-ups after tuning have .70 over
the five tuned models of `objectives`, which share a decoder and a rate in
tuning. On `tuning` the losses on look-ups before and after it have .50 over
three: the adapted pair and its decoder begin within .04 nats of each other, and
end 2.2 nats apart.
"""

from encdec_adapt.configs.studies import (
  adaptation,
  combined,
  objectives,
  shared,
  tuning,
)

PAGES = objectives, tuning, adaptation


def get_study(arg=None):
  """Returns the page of a size (`shared.size`)."""
  size = shared.size(arg)
  return combined.study(
    'correlation',
    'Scores before and after tuning',
    size,
    [page.get_study(arg) for page in PAGES],
    note=shared.note(__doc__),
  )
