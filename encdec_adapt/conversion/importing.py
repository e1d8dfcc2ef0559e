"""`convert import`: a model on disk -> a work directory at step 0.

Bad input is refused before anything is written, and the work directory
appears whole or not at all (`work_directory`).
"""

import dataclasses

from absl import flags

from encdec_adapt.adaptation import coverage as coverage_lib
from encdec_adapt.base import errors
from encdec_adapt.checkpoints import orbax_folder, t5x_checkpoint
from encdec_adapt.cli import command
from encdec_adapt.conversion import (
  model_on_disk,
  peft_exchange,
  pretrained_files,
  work_directory,
)
from encdec_adapt.files import atomic, paths
from encdec_adapt.huggingface import (
  config_json,
  flax_folder,
  new_folder,
  t5x_model,
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
  if peft_exchange.is_folder(path):
    peft_exchange.import_adapters(values, path)
    return 0
  if values.base:
    raise errors.UserError(
      f'--base={values.base} is for adapters of PEFT, which --source={path}'
      ' has not; leave it out.'
    )
  has_config = (path / tensor_folder.CONFIG).exists()
  # With a config.json it is a Hugging Face folder or a run, whatever else it
  # has.
  checkpoint = None if has_config else t5x_checkpoint.open_checkpoint(path)
  is_flax = checkpoint is not None
  is_flax |= not has_config and orbax_folder.is_orbax_folder(path)
  # The authors' Flax folders have no Hugging Face files to carry along.
  files: pretrained_files.Folders = {}
  if is_flax:
    source = _open_flax(path, checkpoint, values)
    if checkpoint and paths.at(values.model).name == tensor_folder.CONFIG:
      folder = paths.at(values.model).parent
      files = {'decoder': folder}
      if source.vocabularies is None:
        choice = model_on_disk.vocabularies_in(folder)
        source = dataclasses.replace(source, vocabularies=choice)
  else:
    if not model_on_disk.is_folder(path):
      raise errors.UserError(
        f'--source={path} is a work directory already; import reads Hugging'
        ' Face folders, the Flax folders of the authors, and t5x checkpoints.'
      )
    if values.model:
      raise errors.UserError(
        f'--model={values.model} is for folders of Flax and t5x arrays; {path}'
        ' has a config.json of its own.'
      )
    source = open_model(values.source, values)
    model_on_disk.require_head(source)
    files = pretrained_files.folders(path)
  for line in coverage_lib.by_reason(source.unused):
    print(f'unused: {line}')
  contents = work_directory.Contents(
    source.model,
    {'command': 'import', 'sources': [source.name], 'unused': source.unused},
    files,
    source.vocabularies,
    framing=source.framing,
  )
  work_directory.write(values.output, contents, source.arrays(), verb='read')
  return 0


def _open_flax(
  path: paths.Path,
  checkpoint: t5x_checkpoint.Checkpoint | None,
  values: flags.FlagValues,
) -> model_on_disk.StoredModel:
  """Opens a model in the layout of its authors' Flax code, or of t5x.

  Reads no arrays but the relative position biases of t5x.

  Raises:
    UserError: the model is damaged, differs from --model, or has no such
      window.
  """
  folder = checkpoint or orbax_folder.OrbaxFolder(path)
  arrays, reader, name = folder.arrays, folder.read, str(path)
  model = None
  if values.model:
    raw = atomic.read_json(values.model)
    model = config_json.model_from_raw(raw, values.model)[0]
  elif not checkpoint:
    # Such a folder has arrays only; shapes tell the released models apart.
    model = flax_folder.released_model(arrays, name)
  if checkpoint:
    if model is None:
      raise errors.UserError(
        f'{path} is a t5x checkpoint, which does not show its activation: give'
        ' its config.json, as transformers or this project writes it, with'
        ' --model=FILE.'
      )
    model = t5x_model.completed(model, arrays, reader, name)
  model = model_on_disk.with_window(model, values.encoder_window, name)
  model = model_config.with_vocab_multiple(model, values.vocab_multiple)
  layout = t5x_model.T5xModel if checkpoint else flax_folder.FlaxModel
  source = layout(arrays, reader, model, name)
  state = checkpoint.state if checkpoint else ()
  return model_on_disk.StoredModel(
    path,
    model,
    model_on_disk.vocabularies_in(path),
    source.arrays,
    unused=source.unused | dict.fromkeys(state, 'optimizer state'),
    name=values.source,
  )
