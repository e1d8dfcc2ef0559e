"""The conversions that make a folder: import, export, merge.

Functions of flags, which `convert` defines. Each refuses bad input before it
writes, and what it writes appears whole or not at all.
"""

import json

from absl import flags
import numpy as np

from encdec_adapt.adaptation import coverage as coverage_lib
from encdec_adapt.adaptation import merge
from encdec_adapt.cli import command, errors
from encdec_adapt.conversion import (
  flax_folder,
  kept_files,
  model_card,
  stored_model,
  work_directory,
)
from encdec_adapt.files import paths
from encdec_adapt.huggingface import (
  config_json,
  export,
  new_folder,
  tensor_folder,
)
from encdec_adapt.huggingface import folder as folder_lib
from encdec_adapt.huggingface import vision as vision_lib
from encdec_adapt.models import model_config, parameters
from encdec_adapt.telemetry import progress


def open_source(
  path: str, values: flags.FlagValues
) -> stored_model.StoredModel:
  """Opens a model as the flags say, those that the command has."""
  return stored_model.open_model(
    path,
    **{
      name: values[name].value
      for name in ('encoder_window', 'vocab_multiple')
      if name in values
    },
  )


def import_folder(values: flags.FlagValues, _: list[str]) -> int:
  """Makes a work directory of a Hugging Face folder, or an authors' one."""
  command.require(values, 'source', 'output')
  work_directory.require(values.output)
  is_flax = _is_flax(values.source)
  if is_flax:
    source = flax_folder.open_flax(
      values.source,
      values.model,
      encoder_window=values.encoder_window,
      vocab_multiple=values.vocab_multiple,
    )
  else:
    if values.model:
      raise errors.UserError(
        f'--model={values.model} is for folders of Orbax arrays;'
        f' {values.source} has a config.json of its own.'
      )
    source = open_source(values.source, values)
  print_unused(source)
  contents = work_directory.Contents(
    source.model,
    {
      'command': 'import',
      'sources': [str(source.path)],
      'unused': source.unused,
    },
    {} if is_flax else kept_files.folders(source.path),
    source.vocabularies,
  )
  lazy = work_directory.lazy_params(
    source.arrays(), progress.ByteProgress('read')
  )
  work_directory.write(values.output, contents, lazy)
  count = parameters.count(source.model)
  print(f'{values.output}: {count:,} parameters, step 0')
  return 0


def _is_flax(path: str) -> bool:
  """Whether import reads the authors' layout there, or a Hugging Face folder.

  Raises:
    UserError: it is neither.
  """
  has_config = (paths.at(path) / tensor_folder.CONFIG).exists()
  if not has_config and flax_folder.is_flax_folder(path):
    return True
  if not stored_model.is_folder(path):
    raise errors.UserError(
      f'--source={path} is a work directory already; import reads Hugging Face'
      " folders, and the authors' Flax ones."
    )
  return False


def export_folder(values: flags.FlagValues, _: list[str]) -> int:
  """Makes a Hugging Face folder of a checkpoint."""
  command.require(values, 'checkpoint', 'output')
  new_folder.require_free(values.output)
  source = stored_model.open_model(values.checkpoint)
  own = _is_own_layout(source.model, values.layout)
  found = kept_files.folders(source.path)
  kept_files.check(found)
  opened = source.vocabularies.open() if source.vocabularies else None
  files = kept_files.tokenizer_files(found, opened)
  carried = kept_files.with_added(files, opened)
  vision = _vision(values.vision, source.model, found, own=own)
  notes = [
    _window_note(source.model, own=own),
    kept_files.added_note(opened, is_written=carried != files),
    _vision_note(vision, values.vision, source.model, own=own),
    _processor_note(vision, values.vision, found),
    kept_files.dropped_note(found),
  ]
  notes = [note for note in notes if note]
  for note in notes:
    print(f'note: {note}')
  fields = kept_files.config_fields(found, opened)
  is_pair = isinstance(source.model, model_config.EncoderDecoderConfig)
  generation = kept_files.generation_config(found, fields, is_pair=is_pair)
  arrays = {array.path: array for array in source.arrays()}
  dtype = np.dtype(values.dtype) if values.dtype else None
  dtypes = {dtype or array.dtype for array in arrays.values()}
  name = ' and '.join(sorted(map(str, dtypes)))
  print(f'tensors of {name}')
  export.write(
    values.output,
    source.model,
    arrays,
    own=own,
    dtype=dtype,
    fields=fields,
    files={
      **carried,
      kept_files.GENERATION: (json.dumps(generation, indent=2) + '\n').encode(),
      'README.md': model_card.write(
        source, own=own, dtype=name, notes=notes
      ).encode(),
    },
    vision=vision,
    on_progress=progress.ByteProgress('written'),
  )
  print(f'{values.output}: {parameters.count(source.model):,} parameters')
  return 0


def _vision(
  folder: str | None,
  model: model_config.ModelConfig,
  found: kept_files.Folders,
  *,
  own: bool,
) -> vision_lib.Vision | None:
  """The vision part to export; None where there is none."""
  if not _may_read_images(model, own=own):
    if folder:
      raise errors.UserError(
        f'--vision={folder} is for what transformers loads as T5Gemma 2; this'
        ' model has no part that reads images.'
      )
    return None
  part = kept_files.vision_part(found, folder)
  if part is not None:
    part.require_fits(model)
  return part


def _vision_note(
  part: vision_lib.Vision | None,
  folder: str | None,
  model: model_config.ModelConfig,
  *,
  own: bool,
) -> str:
  """Where a T5Gemma 2's vision part is from, or that it has none; or ''."""
  if not _may_read_images(model, own=own):
    return ''
  if part is None:
    return (
      'only the text part is written: transformers reports as missing, and'
      f' draws anew, {", ".join(vision_lib.MISSING)}. `export --vision=FOLDER`'
      ' takes them from another model.'
    )
  name = 'the model it was imported from'
  if folder:
    name = f'`{paths.at(folder).name}`'
  return f'its vision part, {len(part.names)} tensors, is that of {name}.'


def _processor_note(
  part: vision_lib.Vision | None, folder: str | None, found: kept_files.Folders
) -> str:
  """Which files make pixels of images, and what they need besides; or ''."""
  if part is None:
    return ''
  names = ' and '.join(f'`{name}`' for name in part.processors)
  if not names:
    names = ' and '.join(f'`{name}`' for name in vision_lib.PROCESSORS)
    return (
      f'the vision part came without {names}, and transformers makes no pixels'
      ' of an image without them: take them from the model that the vision part'
      ' is of.'
    )
  if folder is None or kept_files.reads_images(found):
    return ''
  return (
    f'{names} came with the vision part; the tokenizer did not. An image is'
    f' read where the id {part.image_token} is (image_token_index): image_token'
    ' in tokenizer_config.json has to name the token of that id.'
  )


def _may_read_images(model: model_config.ModelConfig, *, own: bool) -> bool:
  """Whether transformers loads what is exported as a T5Gemma 2."""
  is_pair = isinstance(model, model_config.EncoderDecoderConfig)
  return is_pair and not own and model.decoder.cross_merged


def _is_own_layout(model: model_config.ModelConfig, layout: str) -> bool:
  """Whether our own layout is written; says so, and why, beforehand."""
  if layout == 'encdec_adapt':
    return True
  try:
    raw, _ = config_json.raw_from_model(model)
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


def _window_note(model: model_config.ModelConfig, *, own: bool) -> str:
  """Where software differs in how far the encoder looks; or ''."""
  is_pair = isinstance(model, model_config.EncoderDecoderConfig)
  if own or not is_pair or model.decoder.cross_merged:
    return ''
  window = model.encoder.window
  if window is None or 'local' not in model.encoder.pattern:
    return ''
  if model.encoder.window_rule == 'inclusive':
    return (
      f'local layers of the encoder look at {window} tokens on either side, as'
      ' in transformers 5.23 with eager attention; the code of the authors,'
      ' older transformers and FlashAttention look at less than'
      f' {window}. config.json says it to encdec_adapt, by'
      f' {config_json.WINDOW}.'
    )
  return (
    f'local layers of the encoder look at less than {window} tokens on either'
    ' side, as those of the authors; in transformers 5.23 with eager attention,'
    f' at {window}.'
  )


def merge_models(values: flags.FlagValues, operands: list[str]) -> int:
  """Averages models of one shape."""
  command.require(values, 'output')
  work_directory.require(values.output)
  weights = _weights(values.weights, len(operands))
  merge.check_weights(weights, len(operands))
  sources = [stored_model.open_model(operands[0])]
  rows = sources[0].model.decoder.vocab_multiple
  sources += [
    stored_model.open_model(path, vocab_multiple=rows) for path in operands[1:]
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
    stored_model.require_same_vocabularies(sources[0], source)
  contents = work_directory.Contents(
    sources[0].model,
    {'command': 'merge', 'sources': operands, 'weights': weights},
    kept_files.folders(operands[0]),
    sources[0].vocabularies,
  )
  lazy = work_directory.lazy_params(
    _averages(sources, weights), progress.ByteProgress('averaged')
  )
  work_directory.write(values.output, contents, lazy)
  print(f'{values.output}: the average of {len(operands)} models')
  return 0


def _averages(sources: list[stored_model.StoredModel], weights: list[float]):
  """Every parameter of the average, made when it is read."""
  for arrays in zip(*(s.arrays() for s in sources), strict=True):

    def read(index, arrays=arrays):
      return merge.average([array.read(index) for array in arrays], weights)

    first = arrays[0]
    yield folder_lib.LazyArray(
      first.path, first.shape, np.dtype(np.float32), read
    )


def print_unused(source: stored_model.StoredModel) -> None:
  """Says what is left out: all of it is in summary.json."""
  for line in coverage_lib.by_reason(source.unused):
    print(f'unused: {line}')


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
