"""Does the score after pretraining predict the score after tuning?

    python -m encdec_adapt.study --study=configs/studies/correlation.py:size=cpu

Trains nothing that the pages `objectives`, `tuning` and `adaptation` have
trained: it reads their models, or trains those that are not there yet. The
report's scatter has one point for each tuned model, the mean over seeds and
tunings; at `cpu` no model of `adaptation` is tuned. Spearman's
correlation (Encoder-Decoder Gemma, arXiv:2504.06225, Figure 6: across sizes .97
and .89, within a size .42 and .05) only describes these models: across sizes it
needs arms of four sizes, within one six arms of it. No claim is made of it.

At cpu Spearman's correlation of the loss on text before tuning with that on
look-ups after it is .70 over the five tuned models of `objectives`, which start
from one decoder and share a rate in tuning; two of them are .0002 apart after
it, and in the other order it is .60. On `tuning` the losses on look-ups before
and after have .50 over three models: the adapted pair and its decoder are .04
nats apart before, and 1.7 after it (means over their tunings).
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
