"""Import and merge: models on disk -> a work directory at step 0.

Bad input is refused before anything is written, and the work directory
appears whole or not at all.
"""

import functools

from absl import flags
import numpy as np

from encdec_adapt.adaptation import coverage as coverage_lib
from encdec_adapt.adaptation import merge
from encdec_adapt.checkpoints import orbax_folder
from encdec_adapt.cli import command, errors
from encdec_adapt.conversion import (
  flax_folder,
  source_files,
  stored_model,
  work_directory,
)
from encdec_adapt.files import lazy_array, paths
from encdec_adapt.huggingface import new_folder, tensor_folder
from encdec_adapt.models import model_config


def open_model(path: str, values: flags.FlagValues) -> stored_model.StoredModel:
  """Opens a model with the options of `stored_model` given as flags."""
  names = [n for n in ('encoder_window', 'vocab_multiple') if n in values]
  options = {name: values[name].value for name in names}
  return stored_model.open_model(path, **options)


def import_folder(values: flags.FlagValues, _: list[str]) -> int:
  """Runs `convert import`.

  Raises:
    UserError: the output exists, or the source is damaged or no model folder.
  """
  command.require(values, 'source', 'output')
  new_folder.require_free(values.output)
  path = paths.at(values.source)
  is_flax = not (
    path / tensor_folder.CONFIG
  ).exists() and orbax_folder.is_orbax_folder(path)
  if is_flax:
    source = flax_folder.open_flax(
      path,
      values.model,
      encoder_window=values.encoder_window,
      vocab_multiple=values.vocab_multiple,
    )
  else:
    if not stored_model.is_folder(path):
      raise errors.UserError(
        f'--source={path} is a work directory already; import reads Hugging'
        ' Face folders, and the Flax folders of the authors.'
      )
    if values.model:
      raise errors.UserError(
        f'--model={values.model} is for folders of Orbax arrays; {path} has a'
        ' config.json of its own.'
      )
    source = open_model(path, values)
  for line in coverage_lib.by_reason(source.unused):
    print(f'unused: {line}')
  made_by = {
    'command': 'import',
    'sources': [str(path)],
    'unused': source.unused,
  }
  contents = work_directory.Contents(
    source.model,
    made_by,
    {} if is_flax else source_files.folders(path),
    source.vocabularies,
  )
  work_directory.write(values.output, contents, source.arrays(), verb='read')
  return 0


def merge_models(values: flags.FlagValues, operands: list[str]) -> int:
  """Runs `convert merge`: averages models of one shape.

  Raises:
    UserError: the output exists, the models differ in shape or vocabulary, or
      the weights are no average.
  """
  command.require(values, 'output')
  new_folder.require_free(values.output)
  weights = _weights(values.weights, len(operands))
  merge.check_weights(weights, len(operands))
  first = stored_model.open_model(operands[0])
  multiple = first.model.decoder.vocab_multiple
  others = [
    stored_model.open_model(path, vocab_multiple=multiple)
    for path in operands[1:]
  ]
  for other in others:
    found = model_config.differences(first.model, other.model)
    if not found and other.model != first.model:
      found = ['their tables are padded to other multiples']
    if found:
      raise errors.UserError(
        f'{first.path} and {other.path} differ in shape: {"; ".join(found)}.'
        ' Only models of one config can be averaged.'
      )
    if first.vocabularies and other.vocabularies:
      for side in first.model.stacks:
        own = first.vocabularies.path(side)
        stored_model.require_same_tokens(other, side, own, str(first.path))
  contents = work_directory.Contents(
    first.model,
    {'command': 'merge', 'sources': operands, 'weights': weights},
    source_files.folders(operands[0]),
    first.vocabularies,
  )
  averages = _averages([first, *others], weights)
  work_directory.write(values.output, contents, averages, verb='averaged')
  return 0


def _weights(text: str | None, models: int) -> list[float]:
  """Parses --weights; equal weights where none are given."""
  if not text:
    return [1 / models] * models
  try:
    return [float(part) for part in text.split(',')]
  except ValueError as error:
    raise errors.UserError(
      f'--weights={text} must be numbers separated by commas, such as 0.5,0.5.'
    ) from error


def _averages(
  models: list[stored_model.StoredModel], weights: list[float]
) -> dict[str, lazy_array.LazyArray]:
  """Returns every parameter of the average, computed when it is read."""
  sources = [model.arrays() for model in models]

  def read(path: str, index: tuple[slice, ...]) -> np.ndarray:
    """Reads part of a parameter of every source and averages it."""
    return merge.average(
      [arrays[path].read(index) for arrays in sources], weights
    )

  return {
    path: lazy_array.LazyArray(
      array.shape, np.dtype(np.float32), functools.partial(read, path)
    )
    for path, array in sources[0].items()
  }
