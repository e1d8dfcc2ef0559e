r"""Text embeddings: a model on disk that learns which text belongs to a query.

    python -m encdec_adapt.train --workdir=runs/embedder \
      --config=configs/embeddings.py:source=runs/adapted \
      --config.data.source='embed:/data/*.jsonl#question,passage,distractors'

`source` is a work directory or a Hugging Face folder: of a pair the encoder is
trained, of another model its stack. Each line has a query, the text that it
should find and, if named, texts that it should not. `config.model.head` has the
options of the head: `--config.model.head.projections='(3072,768)'` and
`--config.model.head.dimensions='(256,128)'` are EmbeddingGemma's
(arXiv:2509.20354), and `config.loss.kind` has those of the loss. A batch is
large for the sake of its negatives: `config.train.microbatches=8` keeps the
activations of an eighth of it in memory, at the cost of another forward pass,
and changes no result. Several sources, of which each batch has one:
`--config.data.rates=batches:1,1`. `lora=16` trains adapters of rank 16 and the
head (configs/lora.md), at ten times the learning rate. Then

    python -m encdec_adapt.evaluate --checkpoint=runs/embedder \
      --embeddings=BEIR_FOLDER --embeddings='sts.jsonl#first,second,score' \
      --output=runs/scores --cost=
    python -m encdec_adapt.convert export --checkpoint=runs/embedder \
      --output=EMBEDDER

and `SentenceTransformer('EMBEDDER', trust_remote_code=True)` computes equal
vectors, with the prompts 'query' and 'document' of `config.data.objective`.
"""

from encdec_adapt import config as config_lib
from encdec_adapt.configs import pretrained


def get_config(arg=None):
  """`source`; `lora`: rank of adapters."""
  args = config_lib.parse_arg(arg, source='', lora=0)
  config = pretrained.get_stack_config(args['source'])
  config.model.head.update(kind='embedding', pooled='', layer='')
  config.data.objective = 'embed:too_long=truncate'
  config.loss.kind = 'infonce'
  config.train.batch_size = 64
  pretrained.set_adapters(config, args['lora'])
  return config
