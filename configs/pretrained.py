"""Training that starts from models on disk, whatever their family and shape.

    python -m encdec_adapt.train --workdir=... \
      --config=configs/pretrained.py:encoder=LLAMA_1B,decoder=QWEN_600M \
      --config.data.source=jsonl:/data/*.jsonl

adapts decoder-only models into an encoder-decoder, of the family `target`
(t5gemma or t5gemma2) where one is given, whose sides keep their models'
tokenizers; the encoder may be one that was trained as one (BERT).
`teacher=MODEL` distills from a model of the decoder's vocabulary alone
(config.loss.kind='distill'), as the paper does from the decoder's source. With
`source=MODEL` in the place of `encoder` and `decoder`, the same model is
trained on. Each is a Hugging Face folder or a work directory; their configs are
read here, so that config.model is theirs. The text has no default:
`config.data.source` names it. Everything else is of configs/base.py, but for
lengths, steps, the learning rate and the warm-up of unbalanced pairs (1000
steps: arXiv 2504.06225).
"""

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.huggingface import config_json
from encdec_adapt.models import heads, model_config
from encdec_adapt.stored import model_on_disk, source_vocabularies

_MULTIPLE = 128  # Rows of the tables, to divide over a mesh.


def get_config(arg=None, **values):
  """`encoder`, `decoder` where it is another, `target`, `teacher`; `source`.

  Other configurations give them as `values`.
  """
  args = config_lib.parse_arg(
    arg, encoder='', decoder='', target='', teacher='', source=''
  )
  args |= values
  if bool(args['encoder']) == bool(args['source']):
    raise errors.UserError(
      'give models after the colon: encoder=FOLDER[,decoder=FOLDER] to adapt,'
      ' or source=FOLDER to train the same model on.'
    )
  config = config_lib.defaults()
  model, warmup, choice = _model(args)
  config_lib.set_model(config.model, model)
  config.init.mode = 'adapt' if args['encoder'] else 'checkpoint'
  config.init.encoder = args['encoder'] or args['source']
  config.init.decoder = args['decoder']
  config.teacher.checkpoint = args['teacher']
  if args['teacher']:
    config.loss.kind = 'distill'
  # The default is Python's own text, which nobody's models are trained on.
  config.data.source = ''
  config.data.train_vocabulary = False
  if choice:
    config.data.vocabulary = choice.decoder
    config.data.encoder_vocabulary = choice.encoder
    config.data.add_sentinels = choice.added_sentinels
  if model.architecture.encodes_prompt:
    config.data.objective = 'prefix_lm'
    lengths = dict.fromkeys(('encoder', 'decoder'), 1024)
  else:
    side = 'encoder' if model.architecture.is_encoder else 'decoder'
    lengths = {'encoder': 0, 'decoder': 0, side: 2048}
    if model.architecture.is_encoder:
      config.data.objective = 'bert'
  for side, length in lengths.items():
    stack = model.stacks.get(side, model.decoder)
    config.data[f'{side}_length'] = min(length, stack.positions.limit)
  config.train.steps = 10_000
  config.train.cross_attention_warmup = warmup
  config.evaluation.loss = 1000
  config.checkpoint.every = 1000
  config.optimizer.learning_rate = 1e-4
  return config


def get_stack_config(source, pair=False):
  """The config of a task for the stack that reads prompts, or for a pair.

  Args:
    source: model; of a pair its encoder is trained, with its vocabulary.
    pair: whether both stacks of a pair are trained; None for those of a
      classifier alone.
  """
  config = get_config(source=source)
  opened = open_model(source)
  model, choice = opened.model, opened.vocabularies
  has_both, head = model.architecture.encodes_prompt, model.decoder.head
  if pair is None:
    pair = has_both and isinstance(head, heads.Labels)
  if pair and not (has_both and not (choice and choice.encoder)):
    raise errors.UserError(
      f'{source} is no encoder-decoder with a single vocabulary, whose stacks'
      ' can both read a text; leave out pair=1.'
    )
  if not pair:
    head = model.prompt_reader.head
    if not isinstance(head, (heads.Embedding, heads.Labels)):
      head = heads.Tokens()
    model = model_config.prompt_model(model, head)
  config_lib.set_model(config.model, model)
  # Of a classifier the form of its head stays; another task has other labels.
  config.model.head.labels = 0
  if choice and choice.encoder:
    config.data.vocabulary, config.data.encoder_vocabulary = choice.encoder, ''
  config.data.encoder_length, config.data.decoder_length = 512, 0
  config.data.passes = 3
  config.train.steps = 0
  config.evaluation.loss = 100
  config.checkpoint.every = 100
  config.checkpoint.keep_best = True
  return config


def set_adapters(config, rank):
  """Trains adapters of a rank over the frozen model; of rank 0 all of it."""
  if rank:
    config.train.lora.rank, config.train.lora.alpha = rank, 32.0
    config.optimizer.learning_rate *= 10


def _model(args):
  """Returns the trained model, its warm-up steps and its vocabularies."""
  if args['source']:
    opened = open_model(args['source'])
    return opened.model, 0, opened.vocabularies
  encoder = open_model(args['encoder'])
  decoder = open_model(args['decoder']) if args['decoder'] else encoder
  model_on_disk.require_sources(encoder, decoder)
  stacks = encoder.model.decoder, decoder.model.decoder
  balanced = stacks[0].width == stacks[1].width
  pair = config_json.pair_of(*stacks, target=args['target'])
  choice = source_vocabularies.vocabularies_of_pair(encoder, decoder)
  return pair, 0 if balanced else 1000, choice


def open_model(path):
  """Opens a work directory or a Hugging Face folder."""
  return model_on_disk.open_model(path, vocab_multiple=_MULTIPLE)
