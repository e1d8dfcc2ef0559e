r"""Models, text and settings that the studies' pages share.

    python -m encdec_adapt.train --workdir=runs/pair \
      --config=configs/studies/shared.py:size=cpu,encoder=base,decoder=base

is a pair of random weights. Sizes of a study:

- `smoke`: two steps of every arm, for tests.
- `cpu`: two cores. Adaptation starts from the decoders of configs/decoders, of
  4 layers of width 128 (1.2M parameters, trained on 6.1M tokens) and 3 layers
  of width 96 (.6M, 3.1M tokens) on the text that Python carries, which is also
  the text here. Arms without a source are 4 layers of width 64.
- `gpu`: one H100 or H200. `text` is a source, by default the books of
  ../shared/data where they are (12M tokens), else Python's text (4M);
  `vocabulary` its vocabulary, by default that of configs/decoders, which suits
  no other text well. `shape=s` or `b` are shapes of Encoder-Decoder Gemma; the
  source is trained first, as an arm. Budgets are made for 4M tokens of text;
  `scale=N` multiplies them (3 for the books).
- `pod`: Gemma 2, 4096 + 4096 tokens, the papers' numbers of tokens and one
  seed. `text` is yours; `topology` a row of configs/gemma2.py.

Every arm that a primary claim names has a learning rate of its own (`study`):
the best of three at a factor of 3, and of at most two more beyond an edge, in
runs of its full length with a seed of their own, by the loss of the development
part. Others share one where their page says so. Learning rates decay to a tenth
at the last step, but on `conversion`.
"""

import dataclasses
import glob
import json
import math

from encdec_adapt import config as config_lib
from encdec_adapt import configs
from encdec_adapt.base import errors
from encdec_adapt.cli import command
from encdec_adapt.configs import books as book_source
from encdec_adapt.configs import gemma2, packages, quickstart
from encdec_adapt.files import atomic, paths
from encdec_adapt.lab import budgets, pages
from encdec_adapt.models import model_config, presets
from encdec_adapt.telemetry import compute_cost
from encdec_adapt.tokenizers import vocabulary_pair

BOOKS = '../shared/data/pretrain_classic_books/train/*.txt'
T5GEMMA = 'Encoder-Decoder Gemma (arXiv:2504.06225)'
WANG = 'Wang et al. (arXiv:2204.05832)'
# Smallest difference of losses that matters, and why.
NATS = 0.02
REASON = (
  '0.02 nats per token is what a quarter more tokens give an adapted pair here'
  ' (2.81 after 0.29M target tokens, 2.635 after 1.84M)'
)
# The same between models from random weights.
RANDOM = {
  'smallest': 0.1,
  'reason': '0.1 nats per token is what a quarter more tokens give a model from'
  ' random weights here (3.78 after 0.77M target tokens, 3.08 after 4.0M)',
}
# The same of a claim after tuning on look-ups.
TUNED = {
  'smallest': 0.1,
  'reason': 'a fifth of the loss of a tuned pair in a first run, 0.54 nats',
}
# Middle of the learning rates of models from random weights at cpu.
RANDOM_RATE = 9e-3
# Floors of evaluations with other metrics than the loss.
FLOORS = {
  pages.LOSS: 'held_out/loss_shuffled_prefix',
  'held_out/accuracy': pages.MAJORITY,
}
# Source of a claim that no paper makes.
OURS = 'a question of ours'
# Of the decoders that models are made of, by size: a decoder's name and shape.
_CPU = {'base': (4, 128), 'small': (3, 96), 'tiny': (4, 64)}
_SHAPES = {
  's': {'base': 's', 'small': 'toy_large', 'tiny': 's'},
  'b': {'base': 'b', 'small': 's', 'tiny': 'b'},
  'pod': {'base': '2b', 'large': '9b'},
}
_RELEASED = {'base': 'google/gemma-2-2b', 'large': 'google/gemma-2-9b'}
# Wang et al., Table 1; rotary embeddings in the place of relative positions.
_WANG = model_config.StackConfig(
  layers=24,
  width=4096,
  mlp_width=10240,
  heads=64,
  kv_heads=64,
  head_dim=64,
  query_scale=64.0,
  vocab_size=32128,
  pattern=('global',),
  attention_softcap=None,
  final_softcap=None,
)
# Look-ups in a table, which a model on disk is tuned on (configs/lookups.py). A
# decoder reads both: fewer than the 256 tokens that it was trained on.
TUNING = {
  'init.mode': 'checkpoint',
  'data.source': 'lookups:length=short',
  'data.seqio_modules': ('encdec_adapt.configs.lookups',),
  'data.objective': 'pairs',
  'data.encoder_length': 184,
  'data.decoder_length': 40,
  'data.max_bytes': 0,
  'data.eval_fraction': 0.1,
  'data.eval_rows': 192,
}


@dataclasses.dataclass(frozen=True)
class Size:
  """A size of a study.

  Attributes:
    name: smoke, cpu, gpu or pod.
    shape: shape of the base decoder at gpu, s or b.
    text: source of the text; '' for that of the size.
    vocabulary: vocabulary of the text; '' for that of the size.
    scale: factor of the numbers of steps at gpu; 0 for that of the text.
    topology: chips at pod.
  """

  name: str
  shape: str = 's'
  text: str = ''
  vocabulary: str = ''
  scale: int = 0
  topology: str = 'h100:64'

  def __post_init__(self):
    sizes, shapes = ('smoke', 'cpu', 'gpu', 'pod'), ('s', 'b')
    if self.name not in sizes or self.shape not in shapes:
      raise errors.UserError(
        f'size={self.name} must be one of {", ".join(sizes)}, and'
        f' shape={self.shape} one of {", ".join(shapes)}.'
      )

  @property
  def large(self) -> bool:
    """Whether pages have the arms that are left out at cpu."""
    return self.name in ('gpu', 'pod')

  @property
  def seeds(self) -> tuple[int, ...]:
    """Seeds of every arm."""
    counts = {'smoke': 2, 'pod': 1}
    return tuple(range(counts.get(self.name, 5)))

  @property
  def unbalanced(self) -> tuple[str, str]:
    """Decoders that the encoder and decoder of an unbalanced pair are of."""
    return ('large', 'base') if self.name == 'pod' else ('base', 'small')

  @property
  def length(self) -> int:
    """Tokens S of inputs, and T of targets, of a row of text."""
    return {'gpu': 256, 'pod': 4096}.get(self.name, 128)

  @property
  def batch(self) -> int:
    """Rows of a step."""
    return {'smoke': 8, 'gpu': 32, 'pod': 512}.get(self.name, 16)

  @property
  def has_books(self) -> bool:
    """Whether the text is that of the books."""
    return self.name == 'gpu' and not self.text and bool(glob.glob(BOOKS))

  @property
  def source(self) -> str:
    """Source of the text."""
    if self.has_books:
      return f'text:{BOOKS}'
    return self.text or f'python:{configs.path("decoders/held_out.txt")}'

  @property
  def books(self) -> str:
    """Glob of the files that the text is of; '' for other text."""
    kind, _, pattern = self.source.partition(':')
    return pattern if kind == 'text' else ''

  @property
  def factor(self) -> int:
    """Factor of numbers of steps and tokens that are made for 4M tokens."""
    if self.name != 'gpu':
      return 1
    return self.scale or (3 if self.has_books else 1)

  def steps(self, cpu: int, gpu: int = 0, pod: int = 0) -> int:
    """Returns a number of steps; at gpu by default that at cpu, scaled."""
    if self.name == 'gpu':
      return (gpu or cpu) * self.factor
    return {'smoke': 2, 'cpu': cpu, 'pod': pod}[self.name]

  def tokens(self, steps: int) -> budgets.Tokens:
    """Returns the budget of the target tokens of steps on rows of text."""
    return budgets.Tokens(steps * self.batch * self.length)

  @property
  def arguments(self) -> str:
    """The size, as a page takes it after the colon."""
    texts = [f'size={self.name}']
    for field in dataclasses.fields(self)[1:]:
      value = getattr(self, field.name)
      if value != field.default:
        value = json.dumps(value) if field.type is str else value
        texts.append(f'{field.name}={value}')
    return ','.join(texts)

  def config(self, decoder: str = 'base', encoder: str = '') -> str:
    """Returns the flag of the configuration of a decoder, or a pair."""
    texts = f'{self.arguments},encoder={encoder},decoder={decoder}'
    return f'{configs.path("studies/shared.py")}:{texts}'


def size(arg):
  """Returns the size that the argument of a page names."""
  return parse(arg)[0]


def parse(arg, **others):
  """Returns the size of an argument, and the values of other fields."""
  fields = {x.name: x.default for x in dataclasses.fields(Size)[1:]}
  args = config_lib.parse_arg(arg, size='cpu', **fields, **others)
  values = [args.pop(name) for name in others]
  return Size(args.pop('size'), **args), values


def get_config(arg=None):
  """`encoder` and `decoder`, names of decoders, and those of a study's size."""
  size, sides = parse(arg, encoder='', decoder='base')
  if size.name == 'pod':
    config = _pod(size, sides)
  else:
    config = config_lib.defaults()
    _set_text(config, size)
    _set_job(config, size)
  config_lib.set_model(config.model, _model(size, sides))
  config.data.objective = 'prefix_lm' if sides[0] else 'causal_lm'
  config.data.encoder_length = size.length if sides[0] else 0
  config.data.decoder_length = size.length * (1 if sides[0] else 2)
  config.data.train_vocabulary = False
  # Reports read at most 32 rows of a group of documents. The text of `smoke`
  # has too few groups for a development part.
  config.data.eval_rows, config.data.development_rows = 512, 64
  if size.name == 'smoke':
    config.data.eval_rows, config.data.development_rows = 32, 0
  config.train.batch_size = size.batch
  return config


def _model(size, sides):
  stacks = [stack(size, name) for name in sides if name]
  if sides[0]:
    return model_config.encoder_decoder(*stacks)
  return model_config.DecoderOnlyConfig(*stacks)


def stack(size, name):
  """Returns the stack of a decoder."""
  if size.name in ('smoke', 'cpu'):
    return quickstart.stack(*_CPU[name])
  if size.name == 'pod' and name == 'tiny':
    return _WANG
  shapes = _SHAPES['pod' if size.name == 'pod' else size.shape]
  shape = presets.decoder_only(shapes[name], vocab_multiple=128).decoder
  if size.name == 'pod':
    return shape
  path = size.vocabulary or configs.path('decoders/base')
  rows = vocabulary_pair.open_vocabulary(path).size
  return dataclasses.replace(shape, vocab_size=rows)


def set_source(data, size):
  """Sets the text, what is held out of it, and its vocabulary."""
  data.source = size.source
  if size.has_books:
    data.eval_fraction = 0.15  # A group of held-out rows is a book.
  data.vocabulary = size.vocabulary or configs.path('decoders/base')


def _set_text(config, size):
  data = config.data
  set_source(data, size)
  data.max_bytes = 1_000_000 * (size.name == 'smoke')
  data.shards, data.workers = 2, 1
  data.repeat = True


def _set_job(config, size):
  if size.name == 'gpu':
    config.compute.remat = 'none'
  else:
    config.compute.dtype, config.compute.scan_unroll = 'float32', 4
  config.train.log_every = 20
  config.evaluation.loss = 0.1
  config.checkpoint.every = 0.2 if size.name == 'gpu' else 0.5


def spread(config, size, name):
  """Spreads a job of a pair over chips as the shipped recipe, if any, does."""
  if f'size={name},topology={size.topology}' in gemma2.SHIPPED:
    gemma2.spread(config, name, 'prefixlm', size.topology, 1)


def _pod(size, sides):
  """Returns the recipe of configs/gemma2.py on the chips of a topology."""
  unbalanced = sides[0] not in ('', sides[1])
  name = '9b_9b' if 'tiny' in sides else '9b_2b' if unbalanced else '2b_2b'
  config = gemma2.recipe(presets.t5gemma(name, vocab_multiple=128), 'prefixlm')
  spread(config, size, name)
  config.init.mode, config.loss.kind = 'random', 'cross_entropy'
  config.train.cross_attention_warmup = 0
  config.data.source = size.text
  config.data.vocabulary = size.vocabulary or f'hf://{_RELEASED["base"]}'
  return config


def note(text):
  """Returns the docstring of a page without its first line and commands."""
  paragraphs = [x for x in text.split('\n\n')[1:] if not x.startswith(' ')]
  return '\n\n'.join(' '.join(x.split()) for x in paragraphs)


def study(name, title, size, arms, sources=('base',), commands=(), **fields):
  """Returns a page of arms that start from decoders, by their names.

  The decoders are shipped or released ones, which are imported, or at gpu arms
  that are trained first. An arm with a `rate` that a primary claim names
  chooses a learning rate of its own, as does an arm whose `rate` has its name;
  others share the rate that they name. At pod, learning rates are those of the
  recipes.

  Args:
    name: name of the page.
    title: title of the report.
    size: size of the study.
    arms: the arms.
    sources: names of decoders.
    commands: further stages.
    **fields: further fields of the page; and `middles`, the middle rate by arm:
      by default 3e-3, in tuning at gpu 1e-3.
  """
  imports, trained, middles = [], [], fields.pop('middles', {})
  for source in sources:
    if size.name == 'gpu':
      trained.append(_trained(size, source))
      continue
    folder = configs.path(f'decoders/{source}')
    if size.name == 'pod':
      folder = f'hf://{_RELEASED[source]}'
    flags = 'import', f'--source={folder}', f'--output={{{source}}}'
    imports.append(pages.Command(source, 'convert', flags, seconds=10))
  primary = {
    arm for x in fields.get('claims', ()) if x.primary for arm in x.contrast
  }

  def rate(arm):
    is_chosen = arm.rate and arm.name in primary
    return f'rate_{arm.name}' if is_chosen else arm.rate

  is_pod = size.name == 'pod'
  arms = [dataclasses.replace(x, rate='' if is_pod else rate(x)) for x in arms]
  return pages.Study(
    name=name,
    title=title,
    size=size.name,
    arms=(*trained, *arms),
    seeds=fields.pop('seeds', size.seeds),
    commands=(*imports, *commands),
    rates=_rates(size, arms, middles),
    platform='gpu' if size.name == 'gpu' else '',
    topology=size.topology if size.name == 'pod' else '',
    **fields,
  )


def _trained(size, source):
  return pages.Arm(
    source,
    size.config(source),
    {'data.passes': 2, 'optimizer.learning_rate': 1e-3},
    budget=size.steps(480),
    seeds=(0,),
  )


def pair(size, name, steps, sides=('base', 'base'), taught=True, **fields):
  """Returns a pair that is adapted from decoders.

  Args:
    size: size of the study.
    name: name of the arm.
    steps: steps on rows of text.
    sides: names of the encoder's and decoder's sources.
    taught: whether it learns from the decoder's source, all of the loss at
      pod, and half of it elsewhere.
    **fields: fields of the arm; `changes` are added.
  """
  changes = {'init.mode': 'adapt'} | fields.pop('changes', {})
  starts = {'init.encoder': sides[0]}
  if sides[1] != sides[0]:
    starts['init.decoder'] = sides[1]
  if taught:
    share = 1.0 if size.name == 'pod' else 0.5
    changes |= {'loss.kind': 'distill', 'loss.distill.share': share}
    starts['teacher.checkpoint'] = sides[1]
  config, budget = size.config(sides[1], sides[0]), steps
  # Others have as many rows, with fewer targets.
  if 'data.objective' not in changes:
    budget = size.tokens(steps)
  return pages.Arm(name, config, changes, starts, budget, **fields)


def scratch(arm, name, taught=True, **fields):
  """Returns an arm from random weights, with the same teacher if any."""
  dropped = ('init.',) if taught else ('init.', 'loss.', 'teacher.')
  changes, starts = (
    {key: x for key, x in values.items() if not key.startswith(dropped)}
    for values in (arm.changes, arm.starts)
  )
  return dataclasses.replace(
    arm, name=name, changes=changes, starts=starts, **fields
  )


def decoder(size, name, steps, **fields):
  """Returns the base decoder, trained on with the loss on all of a row."""
  changes = {
    'model.kind': 'decoder_only',
    'init.mode': 'checkpoint',
    'data.objective': 'prefix_lm',
    'data.encoder_length': size.length,
    'data.decoder_length': size.length,
    'loss.on_inputs': True,
  }
  return pages.Arm(
    name,
    size.config(),
    changes | fields.pop('changes', {}),
    {'init.encoder': 'base'},
    budget=size.tokens(steps),
    **fields,
  )


def late(size, arm, steps):
  """Returns a pair from random weights that can be tuned on look-ups.

  Their 184 inputs are more than its encoder would read at cpu: of as many rows
  of 256 tokens it predicts the last 32.
  """
  if size.length >= TUNING['data.encoder_length']:
    return arm
  changes = {'data.objective': 'denoise:-:suffix:0.12'}
  changes |= {'data.encoder_length': 224, 'data.decoder_length': 32}
  changes = {**arm.changes, **changes}
  return dataclasses.replace(arm, changes=changes, budget=steps)


def tuned(size, arm, rate, steps=0, **changes):
  """Returns an arm after tuning on look-ups, or on what changes say."""
  kept = {k: x for k, x in arm.changes.items() if k.startswith('model.')}
  return pages.Arm(
    f'{arm.name}_tuned',
    arm.config,
    {**kept, **TUNING, **changes},
    {'init.encoder': arm.name},
    # At cpu as in the quickstart.
    budget=steps or {'smoke': 2, 'cpu': 110}.get(size.name, 100),
    rate=rate,
    seeds=arm.seeds,
  )


def partial_tables(arm, models):
  """Returns commands and evaluations of look-ups with less of the table.

  Models answer the questions that are held out of an arm, without the table
  (no_table), and with the row that is asked for alone (asked_row). Questions
  that are too long with their table are among these.

  Args:
    arm: a tuned arm.
    models: the tuned arms that are measured.
  """
  data = {k: x for k, x in arm.changes.items() if k.startswith('data.')}
  commands, evaluations = [], []
  for name, table in ('no_table', 'none'), ('asked_row', 'asked'):
    changes = {'data.source': f'{data["data.source"]},table={table}'}
    commands.append(records(name, arm.config, data | changes))
    evaluations.append(
      pages.Evaluation(
        f'answers_{name}',
        (f'--records={{{name}}}/eval',),
        models=tuple(x.name for x in models),
      )
    )
  return tuple(commands), tuple(evaluations)


def records(name, config, changes):
  """Returns a command that makes records that no arm reads."""
  changes = {**changes, 'data.folder': f'{{{name}}}'}
  flags = [f'--config.{key}={value}' for key, value in changes.items()]
  return pages.Command(name, 'materialize', (f'--config={config}', *flags))


def labelled(
  size, arm, rate, kind='encoder_only', books='', decoder='base', steps=40
):
  """Returns the classifier that a stack of an arm is tuned to be.

  Args:
    size: size of the study.
    arm: the arm.
    rate: name of its choice of the learning rate.
    kind: kind of the classifier; of a pair, encoder_only is its encoder.
    books: glob of texts, of which it tells passages apart; '' for packages of
      Python's text.
    decoder: the decoder of its stack's shape.
    steps: number of steps on packages.
  """
  names, source, module = packages.PACKAGES, 'packages', 'packages'
  if books:
    source, module = f'books:{books}', 'books'
    names = book_source.BookSource(source).labels
  labels = json.dumps('|'.join(names))
  changes = {
    **TUNING,
    'model.kind': kind,
    'data.source': source,
    'data.seqio_modules': (f'encdec_adapt.configs.{module}',),
    'data.objective': f'classify:labels={labels},too_long=truncate',
    'data.encoder_length': 128,
    'data.decoder_length': 0,
    # A module is a group of rows, a third of them for the development part.
    # One of few seeds below 400 that leave 50 pieces of every package to train
    # on, and at least 16 to report.
    'data.seed': 0 if books else 50,
    'data.eval_fraction': 0.2 if books else 0.35,
    'data.eval_rows': 4096 if books else 384,
    'train.batch_size': max(32, size.batch),
  }
  name, steps = f'{arm.name}_labels', 200 if books else steps
  steps = 2 if size.name == 'smoke' else steps
  config = size.config(decoder)
  starts = {'init.encoder': arm.name}
  return pages.Arm(name, config, changes, starts, steps, rate)


def prompted(arm):
  """Returns a tuned arm that reads prompts about packages, too."""
  names = 'lookups', 'packages'
  changes = {'data.source': f'package_prompts + {TUNING["data.source"]}'}
  changes['data.seqio_modules'] = tuple(
    f'encdec_adapt.configs.{name}' for name in names
  )
  return dataclasses.replace(arm, changes={**arm.changes, **changes})


def _rates(size, arms, middles):
  """Returns choices of learning rates, for each arm with one of its name."""
  # Runs of two steps choose nothing.
  factors = (1.0,) if size.name == 'smoke' else (1 / 3, 1.0, 3.0)
  rates = []
  for arm in arms:
    if arm.rate == f'rate_{arm.name}':
      # Tuning needs lower rates than text, but not at cpu (`tuning`).
      is_tuned = 'data.source' in arm.changes
      middle = 1e-3 if is_tuned and size.large else 3e-3
      values = tuple(x * middles.get(arm.name, middle) for x in factors)
      rates.append(pages.Rate(arm.rate, arm.name, values))
  return tuple(rates)


def measured(
  name, records, arms, *others, metrics=('held_out/loss',), **fields
):
  """Returns the evaluation of models on held-out rows.

  Args:
    name: name of the evaluation.
    records: name of the arm whose rows they are, or `pages.EACH_MODEL`.
    arms: arms that are measured.
    *others: names of further models.
    metrics: 'TASK/METRIC' of each metric that claims name.
    **fields: further fields of the evaluation.
  """
  models = (*(arm.name for arm in arms), *others)
  return pages.Evaluation(
    name, metrics=metrics, records=records, models=models, **fields
  )


def claim(contrast, sentence, source, paper, direction='less', **fields):
  """Returns a claim on the held-out loss, unless fields say otherwise."""
  fields = {
    'metric': 'held_out/loss',
    'smallest': NATS,
    'reason': REASON,
    **fields,
  }
  return pages.Claim(
    sentence, source, paper, contrast, direction=direction, **fields
  )


def claims(*rows, **fields):
  """Returns a claim for each row.

  Args:
    *rows: contrast, sentence, source, numbers of the paper, and a mapping of
      fields that differ from `fields`.
    **fields: fields of all claims.
  """
  return tuple(
    claim(contrast, text, source, numbers, **fields | changes)
    for contrast, text, source, numbers, changes in rows
  )


def settings(arm):
  """Returns the settings of an arm, without the models that it reads."""
  texts = {k: x for k, x in arm.starts.items() if k.startswith('data.')}
  values = {**arm.changes, **texts}
  flags = [f'--config={arm.config}']
  flags += [f'--config.{key}={value}' for key, value in values.items()]
  config = command.parse(command.define_config, flags).config
  return config_lib.load(config, sources=False)


def spent(size, arm):
  """Returns FLOPs of a step, with the teacher's, and the number of steps."""
  teacher, references = arm.starts.get('teacher.checkpoint'), []
  if teacher:
    # Without the page before it (`combined`).
    config = size.config(teacher.rpartition('.')[2])
    references = [settings(pages.Arm(teacher, config)).model]
  step = budgets.Step.of(settings(arm), references)
  steps = arm.budget
  return step.flops, steps if isinstance(steps, int) else steps.steps(step)


def flops(size, arm):
  """Returns the FLOPs of training an arm, with its teacher's."""
  return math.prod(spent(size, arm))


def source_flops(size, name='base'):
  """Returns the FLOPs that a decoder has cost, shipped or trained at gpu."""
  if size.name == 'gpu':
    return flops(size, _trained(size, name))
  path = paths.at(configs.path(f'decoders/{name}')) / compute_cost.SUMMARY
  return atomic.read_json(path)['inclusive']['flops']
