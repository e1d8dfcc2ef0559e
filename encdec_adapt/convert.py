r"""Models in and out: Hugging Face folders, our checkpoints, and between them.

    python -m encdec_adapt.convert import --source=HF_DIR --output=CKPT
    python -m encdec_adapt.convert adapt --encoder=SRC [--decoder=SRC] \
      [--target=t5gemma2] --output=CKPT
    python -m encdec_adapt.convert export --checkpoint=CKPT --output=HF_DIR
    python -m encdec_adapt.convert inspect PATH
    python -m encdec_adapt.convert diff A B
    python -m encdec_adapt.convert merge A B ... [--weights=0.7,0.3] \
      --output=CKPT
    python -m encdec_adapt.convert verify A B [--tokens=FILE]

SRC, A, B and PATH are Hugging Face folders or work directories of ours. CKPT
is a work directory as training leaves one, with a checkpoint of step 0.
"""

import functools

from absl import flags

from encdec_adapt.cli import command, errors
from encdec_adapt.conversion import (
  adapting,
  compare,
  conversions,
  inspection,
  stored_model,
)
from encdec_adapt.models import model_config

_LAYOUTS = ('auto', 'transformers', 'encdec_adapt')
_DTYPES = ('float32', 'bfloat16', 'float16')


def _string(name: str, text: str, default: str | None = None):
  return functools.partial(flags.DEFINE_string, name, default, text)


_OUTPUT = _string('output', 'Folder to make; must not exist, or be empty.')
_WINDOW = functools.partial(
  flags.DEFINE_enum,
  'encoder_window',
  None,
  list(stored_model.WINDOWS),
  'Local window of the encoder, a bidirectional one: |q-k| < W, as the authors'
  " of T5Gemma, or <= W, as transformers 5.23. By default a run's own; of a"
  " folder, what its config.json says, or the authors'.",
)
_MULTIPLE = functools.partial(
  flags.DEFINE_integer,
  'vocab_multiple',
  128,
  'Tables are padded to a multiple of so many rows, to divide over a mesh.',
)


# What the model that `adapt` makes has else than its sources; None for no
# change.
_SHAPE = (
  functools.partial(
    flags.DEFINE_enum,
    'target',
    None,
    ['t5gemma', 't5gemma2'],
    'Family that transformers has to be able to load: t5gemma, of Gemma 2, or'
    ' t5gemma2, of Gemma 3 (merged attention, one table, a vector for'
    ' --eoi_token). Without it, cross-attention and a table for each stack as'
    ' in t5gemma, of any family.',
  ),
  functools.partial(
    flags.DEFINE_bool, 'causal_encoder', False, 'Keep the encoder causal.'
  ),
  functools.partial(
    flags.DEFINE_bool,
    'shared_table',
    None,
    "The encoder reads the decoder's embedding table.",
  ),
  functools.partial(
    flags.DEFINE_bool,
    'cross_merged',
    None,
    "The decoder's self-attention reads the encoder too; needs equal widths.",
  ),
  functools.partial(
    flags.DEFINE_enum,
    'cross_layers',
    None,
    ['all', 'global'],
    'Layers of the decoder that read the encoder.',
  ),
  functools.partial(
    flags.DEFINE_integer,
    'encoder_kv_heads',
    None,
    "Key/value heads of the encoder, a multiple of its source's: each is"
    ' repeated.',
  ),
  functools.partial(
    flags.DEFINE_integer,
    'encoder_vocab_size',
    None,
    "Tokens of the encoder, at least its source's: new ones are the mean.",
  ),
  functools.partial(
    flags.DEFINE_integer,
    'decoder_vocab_size',
    None,
    'The same of the decoder.',
  ),
  functools.partial(
    flags.DEFINE_bool,
    'tied_head',
    None,
    "Logits use the decoder's embedding table; --notied_head makes a head of"
    ' it.',
  ),
  functools.partial(
    flags.DEFINE_integer,
    'eoi_token',
    None,
    f'Token after an image, of a t5gemma2; {model_config.EOI_TOKEN} by'
    ' default.',
  ),
)


def _defining(*definitions) -> command.DefineFlags:
  """A function that defines these flags."""

  def define(values: flags.FlagValues) -> None:
    for definition in definitions:
      definition(flag_values=values)

  return define


def inspect(_: flags.FlagValues, operands: list[str]) -> int:
  """Prints what a model is."""
  print(inspection.describe(stored_model.open_model(operands[0])))
  return 0


def diff(values: flags.FlagValues, operands: list[str]) -> int:
  """Prints where two models differ; 1 if they do."""
  one, other = (conversions.open_source(path, values) for path in operands)
  fields = model_config.differences(one.model, other.model)
  for line in fields:
    print(f'config: {line}')
  count = different = 0
  for leaf in compare.diff(one, other):
    count += 1
    different += not leaf.same
    if values.all or not leaf.same:
      print(leaf.line())
  print(f'{count} parameters, {different} different')
  return 1 if different or fields else 0


def verify(values: flags.FlagValues, operands: list[str]) -> int:
  """Compares what two models predict; 1 if above the tolerance."""
  one, other = (conversions.open_source(path, values) for path in operands)
  compare.require_alike(one, other)
  if values.tokens:
    rows = compare.read_rows(values.tokens, one.model)
  else:
    for name in ('rows', 'length'):
      if values[name].value < 1:
        raise errors.UserError(
          f'--{name} is {values[name].value}; it must be at least 1.'
        )
    rows = compare.random_rows(
      one.model, rows=values.rows, length=values.length, seed=values.seed
    )
  found = compare.verify(
    tuple(operands), rows, encoder_window=values.encoder_window
  )
  print(
    f'{found.tokens} predictions: largest difference of a logit'
    f' {found.largest:.3e}, KL {found.kl:.3e} nats, top-1 agreement'
    f' {found.top1:.2%}'
  )
  if values.tolerance is None or found.largest <= values.tolerance:
    return 0
  print(f'the difference is above --tolerance={values.tolerance:g}')
  return 1


COMMANDS = {
  'import': command.Subcommand(
    'a Hugging Face folder -> a checkpoint of ours',
    _defining(
      _string('source', 'Hugging Face folder, or a Flax one of the authors.'),
      _OUTPUT,
      _string(
        'model',
        'Of a Flax folder: a size (2b), two (9b_2b), or a config.json; by'
        ' default the released model of these shapes.',
      ),
      _WINDOW,
      _MULTIPLE,
    ),
    conversions.import_folder,
  ),
  'export': command.Subcommand(
    'a checkpoint of ours -> a Hugging Face folder',
    _defining(
      _string('checkpoint', 'Work directory (or a folder, to write anew).'),
      _OUTPUT,
      functools.partial(
        flags.DEFINE_enum,
        'dtype',
        None,
        _DTYPES,
        'Of the tensors; by default as they are stored: as they were imported,'
        ' and float32 after training, adapt and merge.',
      ),
      _string(
        'vision',
        'Folder whose vision part a T5Gemma 2 gets; by default that of the'
        ' folder that it was imported from.',
      ),
      functools.partial(
        flags.DEFINE_enum,
        'layout',
        'auto',
        _LAYOUTS,
        'What loads it: transformers where it has a class for the model and'
        ' otherwise this project (auto), or only one of them.',
      ),
    ),
    conversions.export_folder,
  ),
  'adapt': command.Subcommand(
    'decoder-only models -> an encoder-decoder at step 0',
    _defining(
      _string('encoder', "The encoder's source."),
      _string('decoder', "The decoder's; without it, the encoder's."),
      _OUTPUT,
      functools.partial(
        flags.DEFINE_enum,
        'cross_attention',
        'auto',
        ['auto', 'copy', 'fresh'],
        'Copied from self-attention where shapes allow (auto), or as said.',
      ),
      functools.partial(
        flags.DEFINE_enum,
        'post_norm_gain',
        'one',
        ['one', 'zero'],
        "Of a fresh cross-attention's post-norm.",
      ),
      functools.partial(flags.DEFINE_integer, 'seed', 0, 'Of fresh weights.'),
      _MULTIPLE,
      *_SHAPE,
      functools.partial(
        flags.DEFINE_bool,
        'dry_run',
        False,
        'Print what would become of every weight, read none, and stop.',
      ),
    ),
    adapting.adapt_models,
  ),
  'inspect': command.Subcommand(
    'what a model is', _defining(), inspect, ('PATH',)
  ),
  'diff': command.Subcommand(
    'where the parameters of two models differ',
    _defining(
      functools.partial(
        flags.DEFINE_bool, 'all', False, 'Print equal ones too.'
      ),
      _WINDOW,
    ),
    diff,
    ('A', 'B'),
  ),
  'merge': command.Subcommand(
    'the average of models of one shape',
    _defining(
      _string('weights', 'One per model, apart by commas; equal by default.'),
      _OUTPUT,
    ),
    conversions.merge_models,
    ('A', 'B'),
    more=True,
  ),
  'verify': command.Subcommand(
    'what two models predict for the same tokens',
    _defining(
      _string(
        'tokens',
        'File of rows, one JSON value per line: a list of ids, or an object'
        ' with lists encoder and decoder. Without it, random tokens.',
      ),
      functools.partial(flags.DEFINE_integer, 'rows', 4, 'Random rows.'),
      functools.partial(flags.DEFINE_integer, 'length', 64, 'Their tokens.'),
      functools.partial(flags.DEFINE_integer, 'seed', 0, 'Of random rows.'),
      functools.partial(
        flags.DEFINE_float, 'tolerance', None, 'Status 1 above it.'
      ),
      _WINDOW,
    ),
    verify,
    ('A', 'B'),
  ),
}


if __name__ == '__main__':
  command.main_of(__doc__, COMMANDS)
