"""Models in and out: Hugging Face folders, our checkpoints, and between them.

    python -m encdec_adapt.convert import --source=HF_DIR --output=CKPT
    python -m encdec_adapt.convert adapt --encoder=SRC [--decoder=SRC] \
      --output=CKPT
    python -m encdec_adapt.convert export --checkpoint=CKPT --output=HF_DIR
    python -m encdec_adapt.convert inspect PATH
    python -m encdec_adapt.convert diff A B
    python -m encdec_adapt.convert merge A B ... --output=CKPT
    python -m encdec_adapt.convert verify A B

SRC, A, B and PATH are Hugging Face folders or work directories of ours. CKPT
is a work directory as training leaves one, with a checkpoint of step 0.
"""

import functools
import json
from typing import Any

from absl import flags
import jax
import numpy as np

from encdec_adapt import compare, inspection, model_card, origin, work_folder
from encdec_adapt import source as source_lib
from encdec_adapt.adaptation import initialise, merge
from encdec_adapt.interop import export as export_lib
from encdec_adapt.interop import (
  folder as folder_lib,
)
from encdec_adapt.interop import (
  model_configs,
  new_folder,
)
from encdec_adapt.models import build, parameters
from encdec_adapt.models import config as model_config
from encdec_adapt.runtime import command, errors, progress
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import rules as rules_lib
from encdec_adapt.training import state as state_lib

_LAYOUTS = ('auto', 'transformers', 'encdec_adapt')
_DTYPES = ('float32', 'bfloat16', 'float16')


def _string(name: str, text: str, default: str | None = None):
  return functools.partial(flags.DEFINE_string, name, default, text)


_OUTPUT = _string('output', 'Folder to make; must not exist, or be empty.')
_WINDOW = functools.partial(
  flags.DEFINE_enum,
  'encoder_window',
  'exclusive',
  ['exclusive', 'inclusive'],
  "Local window of a T5Gemma folder's encoder: |q-k| < W, as its authors, or"
  ' <= W, as transformers 5.23.',
)
_MULTIPLE = functools.partial(
  flags.DEFINE_integer,
  'vocab_multiple',
  128,
  'Tables are padded to a multiple of so many rows, to divide over a mesh.',
)


def _defining(*definitions) -> command.DefineFlags:
  """A function that defines these flags."""

  def define(values: flags.FlagValues) -> None:
    for definition in definitions:
      definition(flag_values=values)

  return define


def import_(values: flags.FlagValues, _: list[str]) -> int:
  """Makes a work directory of a Hugging Face folder."""
  command.require(values, 'source', 'output')
  work_folder.require(values.output)
  if not source_lib.is_folder(values.source):
    raise errors.UserError(
      f'--source={values.source} is a work directory already; import reads'
      ' Hugging Face folders.'
    )
  source = _open(values.source, values)
  _print_unused(source)
  contents = work_folder.Contents(
    source.model,
    {'command': 'import', 'source': str(source.path)},
    [str(source.path)],
    origin.folders(source.path),
    source.vocabulary,
  )
  lazy = work_folder.lazy_params(source.arrays(), progress.ByteProgress('read'))
  work_folder.write(values.output, contents, lazy)
  count = parameters.count(source.model)
  print(f'{values.output}: {count:,} parameters, step 0')
  return 0


def export(values: flags.FlagValues, _: list[str]) -> int:
  """Makes a Hugging Face folder of a checkpoint."""
  command.require(values, 'checkpoint', 'output')
  new_folder.require_free(values.output)
  if values.shard_gb <= 0:
    raise errors.UserError(
      f'--shard_gb is {values.shard_gb}; it must be above 0.'
    )
  source = source_lib.open_source(values.checkpoint)
  own = _is_own_layout(source.model, values.layout)
  found = origin.folders(source.path)
  fields = origin.config_fields(found)
  is_pair = isinstance(source.model, model_config.EncoderDecoderConfig)
  generation = origin.generation_config(found, fields, is_pair=is_pair)
  export_lib.write(
    values.output,
    source.model,
    {array.path: array for array in source.arrays()},
    own=own,
    dtype=np.dtype(values.dtype),
    fields=fields,
    texts={
      origin.GENERATION: json.dumps(generation, indent=2) + '\n',
      'README.md': model_card.write(source, own=own, dtype=values.dtype),
    },
    carried=origin.tokenizer_files(found, source.vocabulary),
    shard_bytes=round(values.shard_gb * 1e9),
    on_progress=progress.ByteProgress('written'),
  )
  print(f'{values.output}: {parameters.count(source.model):,} parameters')
  return 0


def _is_own_layout(model: model_config.ModelConfig, layout: str) -> bool:
  """Whether our own layout is written; says so, and why, beforehand."""
  if layout == 'encdec_adapt':
    return True
  try:
    raw, _ = model_configs.raw_from_model(model)
  except errors.UserError as error:
    if layout == 'transformers':
      raise
    print(
      f'{error} It is written in the layout of this project instead, which'
      ' encdec_adapt.load reads.'
    )
    return True
  print(f'transformers loads it as {raw["architectures"][0]}.')
  return False


def adapt(values: flags.FlagValues, _: list[str]) -> int:
  """Makes an encoder-decoder of one or two decoder-only models."""
  command.require(values, 'encoder', 'output')
  work_folder.require(values.output)
  paths = [values.encoder] + ([values.decoder] if values.decoder else [])
  sources = [_open_decoder_only(path, values) for path in paths]
  encoder, decoder = sources[0], sources[-1]
  _note_vocabularies(encoder, decoder)
  target = model_config.encoder_decoder(
    encoder.model.decoder,
    decoder.model.decoder,
    causal_encoder=values.causal_encoder,
  )
  params, report = _adapted(target, sources, values)
  print(report.table())
  if encoder.model.decoder.width != decoder.model.decoder.width:
    print(
      'the pair is unbalanced: its cross-attention is fresh. Let it warm up'
      ' alone, with --config.train.cross_attention_warmup=1000 (arXiv'
      ' 2504.06225) or about 5 % of the steps.'
    )
  contents = work_folder.Contents(
    target,
    {
      'command': 'adapt',
      'encoder': str(encoder.path),
      'decoder': str(decoder.path),
    },
    list(dict.fromkeys(paths)),
    origin.of_pair(encoder.path, decoder.path),
    decoder.vocabulary,
    report,
  )
  work_folder.write(values.output, contents, params)
  print(f'{values.output}: {parameters.count(target):,} parameters, step 0')
  return 0


def _adapted(target, sources: list[source_lib.Source], values) -> Any:
  """Parameters of the target, and the account of where they came from."""
  mesh = mesh_lib.make_mesh(
    mesh_lib.MeshConfig(), devices=jax.local_devices()[:1]
  )

  def place(model: model_config.ModelConfig) -> state_lib.Placement:
    return state_lib.Placement(
      build.build(model), mesh, rules_lib.named('fsdp')
    )

  read = [
    source.read(place(source.model), progress.ByteProgress('read'))
    for source in sources
  ]
  reports = []

  def make(rng, *params):
    pairs = zip((source.model for source in sources), params, strict=True)
    made, report = initialise.initialise(
      target,
      *pairs,
      rng=rng,
      cross_attention=values.cross_attention,
      post_norm_gain=values.post_norm_gain,
    )
    reports.append(report)
    return made

  params = place(target).place(make, jax.random.key(values.seed), *read)
  return params, reports[-1]


def inspect(_: flags.FlagValues, operands: list[str]) -> int:
  """Prints what a model is."""
  print(inspection.describe(source_lib.open_source(operands[0])))
  return 0


def diff(values: flags.FlagValues, operands: list[str]) -> int:
  """Prints where two models differ; 1 if they do."""
  one, other = (_open(path, values) for path in operands)
  for line in model_config.differences(one.model, other.model):
    print(f'config: {line}')
  count = different = 0
  for leaf in compare.diff(one, other):
    count += 1
    different += not leaf.same
    if values.all or not leaf.same:
      print(leaf.line())
  print(f'{count} parameters, {different} different')
  return 1 if different else 0


def merge_(values: flags.FlagValues, operands: list[str]) -> int:
  """Averages models of one shape."""
  command.require(values, 'output')
  work_folder.require(values.output)
  weights = _weights(values.weights, len(operands))
  merge.check_weights(weights, len(operands))
  sources = [source_lib.open_source(operands[0])]
  rows = sources[0].model.decoder.vocab_multiple
  sources += [
    source_lib.open_source(path, vocab_multiple=rows) for path in operands[1:]
  ]
  for source in sources[1:]:
    found = model_config.differences(sources[0].model, source.model)
    if not found and source.model != sources[0].model:
      found = ['their tables are padded to other multiples']
    if found:
      raise errors.UserError(
        f'{sources[0].path} and {source.path} are not of one shape:'
        f' {"; ".join(found)}. Only models of the same config are averaged.'
      )
  contents = work_folder.Contents(
    sources[0].model,
    {'command': 'merge', 'models': operands, 'weights': weights},
    list(dict.fromkeys(operands)),
    origin.folders(operands[0]),
    sources[0].vocabulary,
  )
  lazy = work_folder.lazy_params(
    _averages(sources, weights), progress.ByteProgress('averaged')
  )
  work_folder.write(values.output, contents, lazy)
  print(f'{values.output}: the average of {len(operands)} models')
  return 0


def _averages(sources: list[source_lib.Source], weights: list[float]):
  """Every parameter of the average, made when it is read."""
  for arrays in zip(*(s.arrays() for s in sources), strict=True):

    def read(index, arrays=arrays):
      return merge.average([array.read(index) for array in arrays], weights)

    first = arrays[0]
    yield folder_lib.LazyArray(
      first.path, first.shape, np.dtype(np.float32), read
    )


def verify(values: flags.FlagValues, operands: list[str]) -> int:
  """Compares what two models predict; 1 if above the tolerance."""
  one, other = (_open(path, values) for path in operands)
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


def _open(path: str, values: flags.FlagValues) -> source_lib.Source:
  """Opens a source as the flags say."""
  return source_lib.open_source(
    path,
    encoder_window=values.encoder_window,
    vocab_multiple=(
      values.vocab_multiple if 'vocab_multiple' in values else None
    ),
  )


def _open_decoder_only(
  path: str, values: flags.FlagValues
) -> source_lib.Source:
  source = source_lib.open_source(path, vocab_multiple=values.vocab_multiple)
  if not isinstance(source.model, model_config.DecoderOnlyConfig):
    raise errors.UserError(
      f'{path} is an encoder-decoder; adaptation starts from decoder-only'
      ' models.'
    )
  _print_unused(source)
  return source


def _note_vocabularies(
  encoder: source_lib.Source, decoder: source_lib.Source
) -> None:
  """Says it where the stacks may mean other text by the same id."""
  found = [s.vocabulary_fingerprint() for s in (encoder, decoder)]
  if found[0] != found[1]:
    print(
      f'note: {encoder.path} and {decoder.path} have not the same'
      ' tokenizer.model; the two sides of an example are tokenised apart.'
    )


def _print_unused(source: source_lib.Source) -> None:
  for name, reason in source.unused.items():
    print(f'unused: {name} ({reason})')


def _weights(text: str | None, models: int) -> list[float]:
  """Weights of the models, equal where none are given."""
  if not text:
    return [1 / models] * models
  try:
    return [float(part) for part in text.split(',')]
  except ValueError as error:
    raise errors.UserError(
      f'--weights={text} is not numbers apart by commas, as 0.5,0.5.'
    ) from error


COMMANDS = {
  'import': command.Subcommand(
    'a Hugging Face folder -> a checkpoint of ours',
    _defining(
      _string('source', 'Hugging Face folder.'), _OUTPUT, _WINDOW, _MULTIPLE
    ),
    import_,
  ),
  'export': command.Subcommand(
    'a checkpoint of ours -> a Hugging Face folder',
    _defining(
      _string('checkpoint', 'Work directory (or a folder, to write anew).'),
      _OUTPUT,
      functools.partial(
        flags.DEFINE_enum,
        'dtype',
        'float32',
        _DTYPES,
        'Of the tensors; training keeps float32.',
      ),
      functools.partial(
        flags.DEFINE_float, 'shard_gb', 5.0, 'Most GB (1e9 bytes) of a file.'
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
    export,
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
      functools.partial(
        flags.DEFINE_bool, 'causal_encoder', False, 'Keep the encoder causal.'
      ),
      functools.partial(flags.DEFINE_integer, 'seed', 0, 'Of fresh weights.'),
      _MULTIPLE,
    ),
    adapt,
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
    merge_,
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
