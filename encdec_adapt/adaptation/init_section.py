"""The configuration section `init`: where the parameters come from."""

import dataclasses

from encdec_adapt.base import keys

MODES = ('random', 'checkpoint', 'adapt', 'embeddings')


@dataclasses.dataclass(frozen=True)
class InitConfig:
  """Keys of `config.init`."""

  mode: str = keys.key(
    'random',
    "'random'; 'checkpoint' (continue training the same model, or with a new"
    ' head; a classifier of one stack, an embedding model or an encoder-only'
    " model starts from the encoder of a pair); 'adapt' (an"
    ' encoder-decoder from decoder-only checkpoints, a decoder from the decoder'
    " of a pair, an encoder from its encoder); or 'embeddings' (as 'adapt' to a"
    ' pair, but only the embedding tables are kept: a control). With'
    " 'adapt' a stack of config.model equals its source's, except that it may"
    ' have fewer layers (with half of them, every other one), a'
    ' multiple of its kv_heads (each is repeated), a larger vocab_size'
    ' (new tokens get the mean embedding), an untied head (a copy of the'
    ' table) and other attention masks.',
    one_of=MODES,
  )
  encoder: str = keys.key(
    '',
    'Source of the encoder, or of a model of a single stack: a work directory,'
    ' RUN@STEP (a step of it), a Hugging Face folder, or'
    ' hf://ORG/NAME[@REVISION] on the Hub.',
  )
  decoder: str = keys.key(
    '', "Source of the decoder; '' for the encoder's source."
  )
  cross_attention: str = keys.key(
    'auto',
    "For 'adapt': 'copy' cross-attention from self-attention, draw it"
    " ('fresh'), or 'auto': copy where shapes allow (balanced pairs).",
    one_of=('auto', 'copy', 'fresh'),
  )
  post_norm_gain: str = keys.key(
    'one',
    "For 'adapt': gain of a fresh cross-attention's post-norm, 'one', or"
    " 'zero' (at step 0 the decoder computes what its source does).",
    one_of=('one', 'zero'),
  )
  optimizer: str = keys.key(
    'fresh',
    "State of the optimizer: 'fresh'; or 'source', that of the source with its"
    " step count, at which the schedules 'rsqrt' and 'constant' resume (Wang et"
    " al. 2022): with 'checkpoint', and with 'adapt' from one source if every"
    ' weight is copied.',
    one_of=('fresh', 'source'),
  )

  def __post_init__(self):
    keys.check(self, 'config.init.')
    # Refuse keys ignored by the mode: a run that names a decoder but
    # initializes it randomly would look like an adaptation.
    plan = ('cross_attention', 'post_norm_gain')
    unread = {
      'random': ('encoder', 'decoder', *plan, 'optimizer'),
      'checkpoint': ('decoder', *plan),
      'embeddings': (*plan, 'optimizer'),
      'adapt': (),
    }[self.mode]
    defaults = keys.defaults(InitConfig)
    keys.require_defaults(
      vars(self),
      {name: defaults[name] for name in unread},
      'config.init.',
      f'config.init.mode is {self.mode!r}',
    )
