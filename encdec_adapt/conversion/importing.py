"""`convert import` and `merge`: models on disk -> a work directory at step 0.

Bad input is refused before anything is written, and the work directory
appears whole or not at all (`work_directory`).
"""

import functools

from absl import flags
import numpy as np

from encdec_adapt.adaptation import coverage as coverage_lib
from encdec_adapt.base import errors, option_strings
from encdec_adapt.checkpoints import orbax_folder
from encdec_adapt.cli import command
from encdec_adapt.conversion import (
  model_on_disk,
  pretrained_files,
  work_directory,
)
from encdec_adapt.files import atomic, lazy_array, paths
from encdec_adapt.huggingface import (
  config_json,
  flax_folder,
  new_folder,
  tensor_folder,
)
from encdec_adapt.models import model_config


def open_model(
  path: str, values: flags.FlagValues
) -> model_on_disk.StoredModel:
  """Opens a model with the options of `model_on_disk` given as flags."""
  # Subcommands that open models define different ones of these flags.
  names = [n for n in ('encoder_window', 'vocab_multiple') if n in values]
  options = {name: values[name].value for name in names}
  return model_on_disk.open_model(path, **options)


def import_folder(values: flags.FlagValues, _: list[str]) -> int:
  """Runs `convert import`.

  Raises:
    UserError: the output exists, or the source is damaged or no model folder.
  """
  command.require(values, 'source', 'output')
  new_folder.require_free(values.output)
  path, _ = model_on_disk.resolve(values.source)
  has_config = (path / tensor_folder.CONFIG).exists()
  # With a config.json it is a Hugging Face folder or a run, whatever else it
  # has.
  is_flax = not has_config and orbax_folder.is_orbax_folder(path)
  if is_flax:
    source = _open_flax(path, values)
  else:
    if not model_on_disk.is_folder(path):
      raise errors.UserError(
        f'--source={path} is a work directory already; import reads Hugging'
        ' Face folders, and the Flax folders of the authors.'
      )
    if values.model:
      raise errors.UserError(
        f'--model={values.model} is for folders of Orbax arrays; {path} has a'
        ' config.json of its own.'
      )
    source = open_model(values.source, values)
  for line in coverage_lib.by_reason(source.unused):
    print(f'unused: {line}')
  contents = work_directory.Contents(
    source.model,
    {'command': 'import', 'sources': [source.name], 'unused': source.unused},
    # The authors' Flax folders have no Hugging Face files to carry along.
    {} if is_flax else pretrained_files.folders(path),
    source.vocabularies,
  )
  work_directory.write(values.output, contents, source.arrays(), verb='read')
  return 0


def _open_flax(
  path: paths.Path, values: flags.FlagValues
) -> model_on_disk.StoredModel:
  """Opens a model as its authors' Flax code saves it; reads no arrays.

  Raises:
    UserError: it is damaged, it is not the model of --model, or it has no
      such window.
  """
  folder = orbax_folder.OrbaxFolder(path)
  if values.model:
    raw = atomic.read_json(values.model)
    model = config_json.model_from_raw(raw, values.model)[0]
  else:
    # Such a folder has arrays only; shapes tell the released models apart.
    model = flax_folder.released_model(folder.arrays, str(path))
  model = model_on_disk.with_window(model, values.encoder_window, str(path))
  model = model_config.with_vocab_multiple(model, values.vocab_multiple)
  source = flax_folder.FlaxModel(folder.arrays, folder.read, model, str(path))
  choice = model_on_disk.vocabularies_in(path)
  return model_on_disk.StoredModel(
    path, model, choice, source.arrays, unused=source.unused, name=values.source
  )


def merge_models(values: flags.FlagValues, operands: list[str]) -> int:
  """Runs `convert merge`: averages models of the same shape.

  Raises:
    UserError: the output exists, the models differ in shape or vocabulary, or
      the weights do not make an average.
  """
  command.require(values, 'output')
  new_folder.require_free(values.output)
  weights = _weights(values.weights, len(operands))
  first = model_on_disk.open_model(operands[0])
  # Folders are padded as the first model is; runs keep the padding they have.
  multiple = first.model.decoder.vocab_multiple
  models = [first] + [
    model_on_disk.open_model(path, vocab_multiple=multiple)
    for path in operands[1:]
  ]
  for model in models[1:]:
    differences = model_config.differences(first.model, model.model)
    # `differences` leaves padding out; averaged arrays must share it too.
    if not differences and model.model != first.model:
      differences = ['their tables are padded to other multiples']
    if differences:
      raise errors.UserError(
        f'{first.path} and {model.path} differ in shape:'
        f' {"; ".join(differences)}. Only models of one config can be averaged.'
      )
    # Nothing is known of the ids of a model without a tokenizer.
    if first.vocabularies and model.vocabularies:
      for side in first.model.stacks:
        path = first.vocabularies.path(side)
        model_on_disk.require_same_tokens(model, side, path, str(first.path))
  contents = work_directory.Contents(
    first.model,
    {'command': 'merge', 'sources': operands, 'weights': weights},
    pretrained_files.folders(first.path),
    first.vocabularies,
  )
  averages = _averages(models, weights)
  work_directory.write(values.output, contents, averages, verb='averaged')
  return 0


def _weights(text: str | None, models: int) -> list[float]:
  """Parses --weights; equal weights where none are given.

  Raises:
    UserError: they are not as many numbers as models, or do not sum to 1.
  """
  if not text:
    return [1 / models] * models
  string = option_strings.Part('--weights', text)
  weights = [part.read(float, 'a number') for part in string.divide(',')]
  # Negated, so that nan is refused; the tolerance allows for rounded thirds.
  if len(weights) != models or not abs(sum(weights) - 1) < 1e-6:
    raise string.error(
      f'must be {models} numbers, one for each model, that sum to 1, separated'
      ' by commas.'
    )
  return weights


def _averages(
  models: list[model_on_disk.StoredModel], weights: list[float]
) -> dict[str, lazy_array.LazyArray]:
  """Returns every parameter of the average, computed when it is read."""
  sources = [model.arrays() for model in models]

  def read(path: str, index: tuple[slice, ...]) -> np.ndarray:
    # In float32 whatever the sources have: a bfloat16 sum would lose bits.
    return sum(
      np.float32(weight) * np.asarray(arrays[path].read_part(index), np.float32)
      for weight, arrays in zip(weights, sources, strict=True)
    )

  return {
    path: lazy_array.LazyArray(
      array.shape, np.dtype(np.float32), functools.partial(read, path)
    )
    for path, array in sources[0].items()
  }
