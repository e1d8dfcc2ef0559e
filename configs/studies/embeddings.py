"""Whose states make the best embeddings, before and after contrastive tuning?

    python -m encdec_adapt.study \
      --study=configs/studies/embeddings.py:size=cpu

Signatures of Python's library are queries, the first paragraphs of their
documentation texts to find; modules that the decoders have not seen are
searched (configs/signatures.py). Three models of one decoder are compared: the
pair adapted from it, of which the encoder embeds, an encoder that was trained
by masking for as many steps, and the decoder itself; each as it is, by the mean
of its states, and after contrastive tuning, of which 64, 32 and 16 leading
numbers are vectors too (Matryoshka). With `baseline=FOLDER` an embedding model
on disk, such as all-MiniLM-L6-v2, searches the same texts.

Not controlled: pair and encoder have had training beyond the decoder's; the
pair's encoder has had a decoder's gradients, the other's loss is on 15 % of
the tokens; no learning rate is chosen. `cpu` takes ten minutes on two cores,
with three seeds: intervals, and no verdicts. A baseline has had other text and
steps, and may have seen these modules.
"""

from collections.abc import Mapping
from typing import Any

from encdec_adapt.configs.studies import shared
from encdec_adapt.lab import pages

SIGNATURES = pages.Command(
  'signatures', 'configs.signatures', ('--output={signatures}',)
)
RECALL = 'search/recall@10'
PARTS = 64, 32, 16


def get_study(arg=None):
  """Returns the page of a size (`shared.size`)."""
  size, (baseline,) = shared.parse(arg, baseline='')
  commands, baselines = (SIGNATURES,), ()
  if baseline:  # Exported, for a copy that the study keeps.
    flags = 'export', f'--checkpoint={baseline}', '--output={baseline}'
    commands += (pages.Command('baseline', 'convert', flags, seconds=20),)
    baselines = ('baseline',)
  steps = size.steps(96, gpu=240, pod=24_000)
  pair = shared.pair(size, 'pair', steps, changes=_rate(3e-3))
  masked = pages.Arm(
    'masked',
    size.config(),
    {
      'model.kind': 'encoder_only',
      'init.mode': 'checkpoint',
      'data.objective': 'bert',
      'data.encoder_length': 2 * size.length,
      'data.decoder_length': 0,
      **_rate(3e-3),
    },
    {'init.encoder': 'base'},
    steps,
  )
  models = {'pair': pair, 'masked': masked, 'causal': None}
  tuned = tuple(_embedder(size, name) for name in models)
  frozen = pair, masked
  return shared.study(
    'embeddings',
    'Embeddings of encoders and decoders',
    size,
    (*frozen, *tuned),
    commands=commands,
    seeds=size.seeds[:3],
    evaluations=(
      pages.Evaluation(
        'search',
        ('--embeddings={signatures}/search',),
        (RECALL,),
        models=('base', *(x.name for x in (*frozen, *tuned)), *baselines),
      ),
    ),
    claims=CLAIMS,
    note=shared.note(__doc__),
  )


def _rate(rate: float) -> Mapping[str, Any]:
  return {'optimizer.learning_rate': rate}


def _embedder(size, name):
  causal = name == 'causal'
  return pages.Arm(
    f'{name}_tuned',
    size.config(),
    {
      'model.kind': 'decoder_only' if causal else 'encoder_only',
      'model.head.kind': 'embedding',
      'model.head.dimensions': tuple(PARTS),
      'init.mode': 'adapt',
      'loss.kind': 'infonce',
      'data.objective': 'embed:too_long=truncate,texts=16',
      'data.encoder_length': 256,
      'data.decoder_length': 0,
      'data.eval_fraction': 0.05,
      'data.eval_rows': 128,
      'data.development_rows': 0,
      'train.batch_size': 16,
      **_rate(1e-3),
    },
    {
      'init.encoder': 'base' if causal else name,
      'data.source': 'embed:{signatures}/train.jsonl#signature,documentation',
    },
    size.steps(60, gpu=200, pod=2000),
  )


CLAIMS = shared.claims(
  (
    ('causal_tuned', 'pair_tuned'),
    "A pair's encoder embeds better than its decoder after tuning.",
    'EmbeddingGemma (arXiv:2509.20354), ablation of the initialisation',
    '"better"; its numbers were not at hand',
    {'paired': True},
  ),
  (
    ('masked_tuned', 'pair_tuned'),
    "A pair's encoder embeds as well as an encoder by masking.",
    shared.OURS,
    '-',
    {'direction': 'equal', 'paired': True},
  ),
  (
    ('pair', 'pair_tuned'),
    "Tuning makes a pair's encoder embed better.",
    shared.OURS,
    '-',
    {},
  ),
  metric=RECALL,
  direction='greater',
  smallest=0.05,
  reason='a query in twenty',
)
