r"""Converts models between Hugging Face folders and our checkpoints.

    python -m encdec_adapt.convert import --source=HF_DIR --output=CKPT
    python -m encdec_adapt.convert adapt --encoder=SRC [--decoder=SRC] \
      [--target=t5gemma2] [--model.encoder.kv_heads=8] --output=CKPT
    python -m encdec_adapt.convert export --checkpoint=CKPT --output=HF_DIR
    python -m encdec_adapt.convert inspect PATH
    python -m encdec_adapt.convert diff A B
    python -m encdec_adapt.convert merge A B ... [--weights=0.7,0.3] \
      [--last=3] [--start=C] --output=CKPT
    python -m encdec_adapt.convert merge-lora --checkpoint=CKPT --output=CKPT
    python -m encdec_adapt.convert resize --checkpoint=SRC --tokens=FILE \
      --output=CKPT
    python -m encdec_adapt.convert verify A B [--rows=4 --length=64] \
      [--with=transformers]
    python -m encdec_adapt.convert push HF_DIR --repo=ORG/NAME [--public]

SRC, A, B and PATH are Hugging Face folders, hf://ORG/NAME[@REVISION] on the
Hub, work directories of runs, or RUN@STEP for a step of a run. CKPT is a work
directory with a checkpoint at step 0.
"""

# Only flags and printed results; `exchange` does the work.

from absl import flags

from encdec_adapt.cli import command
from encdec_adapt.exchange import (
  adapting,
  compare,
  exporting,
  importing,
  inspection,
  merging,
  peft_exchange,
  resizing,
)
from encdec_adapt.models import model_config
from encdec_adapt.stored import model_on_disk

# Flags shared by several subcommands.
_OUTPUT = command.string(
  'output', 'Folder to write; must not exist, or be empty.'
)
_WINDOW = command.choice(
  'encoder_window',
  list(model_on_disk.WINDOWS),
  'Window of the local layers of a bidirectional encoder: |q-k| < W (exclusive,'
  ' the authors of T5Gemma) or <= W (inclusive, transformers 5.23). Default:'
  " the run's own; for a folder, that of its config.json, or exclusive.",
)
_MULTIPLE = command.integer(
  'vocab_multiple',
  'Pad tables to a multiple of this many rows, to divide over a mesh.',
  # A multiple of the devices that share a table (`rules.VOCABULARY_GROUP`).
  default=128,
)


def inspect(_: flags.FlagValues, operands: list[str]) -> int:
  """Prints a description of a model."""
  print(inspection.describe(model_on_disk.open_model(operands[0])))
  return 0


def diff(values: flags.FlagValues, operands: list[str]) -> int:
  """Prints the differences of two models; returns 1 if there are any."""
  a, b = (importing.open_model(path, values) for path in operands)
  # Settings such as windows may differ with equal parameters.
  fields = model_config.differences(a.model, b.model)
  for line in fields:
    print(f'config: {line}')
  count = different = 0
  for leaf in compare.diff(a, b):
    count += 1
    different += leaf.largest != 0  # None (different shapes) counts too.
    if values.all or leaf.largest != 0:
      print(leaf)
  print(f'{count} parameters, {different} different')
  return 1 if different or fields else 0


def verify(values: flags.FlagValues, operands: list[str]) -> int:
  """Compares the logits of two models; returns 1 if above the tolerance."""
  a, b = (importing.open_model(path, values) for path in operands)
  agreement = compare.verify(
    a,
    b,
    rows=values.rows,
    length=values.length,
    seed=values.seed,
    with_transformers=values['with'].value is not None,
  )
  print(
    f'{agreement.tokens} predictions: largest difference of a logit'
    f' {agreement.largest:.3e}, KL {agreement.kl:.3e} nats, top-1 agreement'
    f' {agreement.top1:.2%}'
  )
  # nan fails, as `<=` is False for it.
  if values.tolerance is None or agreement.largest <= values.tolerance:
    return 0
  print(f'the difference is above --tolerance={values.tolerance:g}')
  return 1


COMMANDS = {
  'import': command.Subcommand(
    'Hugging Face folder or Flax arrays -> Orbax checkpoint',
    command.define(
      command.string(
        'source',
        'Hugging Face folder, Flax folder of the authors, or PEFT folder.',
      ),
      _OUTPUT,
      command.string(
        'base',
        'For a PEFT folder: the model that it adapts. Default: the folder that'
        ' it names.',
      ),
      command.string(
        'model',
        'For a Flax folder: the path of a config.json. Default: the released'
        ' model of the shapes.',
      ),
      _WINDOW,
      _MULTIPLE,
    ),
    importing.import_folder,
  ),
  'export': command.Subcommand(
    'Orbax checkpoint -> Hugging Face folder',
    command.define(
      command.string(
        'checkpoint', 'A run, RUN@STEP, or a Hugging Face folder to rewrite.'
      ),
      _OUTPUT,
      command.choice(
        'dtype',
        ['float32', 'bfloat16', 'float16'],
        'Dtype of the tensors. Default: as stored, which is that of the import'
        ' and float32 after training, adapt and merge.',
      ),
      command.choice(
        'embedding',
        ['mean', 'last', 'first'],
        'Write the stack that reads prompts alone, as an embedding model with'
        ' this config.model.head.pooling.',
      ),
      command.flag(
        'multi_integer',
        'dimensions',
        'With --embedding: sizes of leading parts that are vectors too; may be'
        ' repeated.',
      ),
      command.string(
        'vision',
        'Folder to take the vision part of a T5Gemma 2 from. Default: the'
        ' folder that the model was imported from.',
      ),
      command.choice(
        'layout',
        ['auto', 'transformers', 'encdec_adapt', 'peft'],
        'Layout of the folder: that of transformers, that of this project, or'
        ' that of transformers where it has a class for the model (auto); peft'
        ' writes the adapters of a run alone, the others merge them.',
        default='auto',
      ),
      command.flag(
        'list',
        'language',
        'Codes of the languages for the model card, such as en,de. Default:'
        ' those that the README.md of the base models states.',
        default=[],
      ),
      command.string(
        'evaluation',
        'Output folder of `evaluate`: its results of this model go into the'
        ' metadata of the model card.',
      ),
    ),
    exporting.export_folder,
  ),
  'adapt': command.Subcommand(
    'decoder-only models -> encoder-decoder at step 0',
    command.define(
      command.string('encoder', 'Source of the encoder.'),
      command.string(
        'decoder', "Source of the decoder. Default: the encoder's."
      ),
      _OUTPUT,
      command.choice(
        'cross_attention',
        ['auto', 'copy', 'fresh'],
        'Copy cross-attention from self-attention, draw it fresh, or copy'
        ' where shapes allow (auto).',
        default='auto',
      ),
      command.choice(
        'post_norm_gain',
        ['one', 'zero'],
        'Gain of the post-norm of fresh cross-attention.',
        default='one',
      ),
      command.integer('seed', 'Seed of fresh weights.', default=0),
      _MULTIPLE,
      command.choice(
        'target',
        ['t5gemma', 't5gemma2'],
        'Family that transformers must be able to load: t5gemma from Gemma 2,'
        ' or t5gemma2 from Gemma 3 (merged attention, one table, a vector for'
        ' one token). Default: cross-attention and a table for each stack as'
        ' in t5gemma, for any family.',
      ),
      adapting.define_model,
      command.boolean(
        'dry_run',
        'Print the coverage report and stop; reads no weights.',
        default=False,
      ),
    ),
    adapting.adapt_models,
  ),
  'inspect': command.Subcommand(
    'describe a model', command.define(), inspect, ('PATH',)
  ),
  'diff': command.Subcommand(
    'compare the parameters of two models',
    command.define(
      command.boolean('all', 'Print equal ones too.', default=False), _WINDOW
    ),
    diff,
    ('A', 'B'),
  ),
  'merge': command.Subcommand(
    'average models or task vectors of one shape',
    command.define(
      command.string(
        'weights',
        'One weight per model, separated by commas; they sum to 1. With --start'
        ' they may be any numbers: a sum below 1 interpolates towards it.'
        ' Default: equal weights.',
      ),
      command.integer(
        'last',
        'The last N steps that each run has kept, in place of the run.',
        lower_bound=1,
      ),
      command.string(
        'start',
        'The model that A, B .. were trained from: it is added to the weighted'
        ' sum of the differences from it.',
      ),
      _OUTPUT,
    ),
    merging.merge_models,
    ('A',),
    more=True,
  ),
  'merge-lora': command.Subcommand(
    'run of adapters -> whole model at step 0',
    command.define(
      command.string('checkpoint', 'A run of adapters, or RUN@STEP.'), _OUTPUT
    ),
    peft_exchange.merge_adapters,
  ),
  'resize': command.Subcommand(
    'add tokens to a model and its tokenizer -> checkpoint at step 0',
    command.define(
      command.string(
        'checkpoint', 'A run, RUN@STEP, or a Hugging Face folder.'
      ),
      command.string(
        'tokens',
        'File of new tokens, one a line; a tab and the name of a piece after it'
        ' copy the rows of that piece. Other rows are drawn with the mean and'
        ' deviation of the rows of text. Default: no tokens, only rows for'
        ' tokens of the tokenizer without a row.',
      ),
      _OUTPUT,
      command.integer('seed', 'Seed of drawn rows.', default=0, lower_bound=0),
      _MULTIPLE,
    ),
    resizing.resize_model,
  ),
  'verify': command.Subcommand(
    'compare the logits of two models on random tokens',
    command.define(
      command.integer('rows', 'Number of rows.', default=4, lower_bound=1),
      command.integer('length', 'Tokens of a row.', default=64, lower_bound=1),
      command.integer('seed', 'Seed of the tokens.', default=0),
      command.number(
        'tolerance', 'Largest difference of a logit to end with status 0.'
      ),
      command.choice(
        'with',
        ['transformers'],
        'Let transformers compute B, an exported folder, in torch (extra'
        ' `peer`), and encode and continue texts as A does; runs the code that'
        ' the folder carries.',
      ),
      _WINDOW,
    ),
    verify,
    ('A', 'B'),
  ),
  'push': command.Subcommand(
    'Hugging Face folder -> repository on the Hub',
    command.define(
      command.string('repo', 'ORG/NAME; made if it does not exist.'),
      command.boolean('public', 'Everybody may read it. Default: private.'),
    ),
    exporting.push_folder,
    ('HF_DIR',),
  ),
}


if __name__ == '__main__':
  command.main_of(__doc__, COMMANDS)
