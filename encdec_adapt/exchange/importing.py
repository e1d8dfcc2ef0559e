"""`convert import`: a model on disk -> a work directory at step 0.

Bad input is refused before anything is written, and the work directory is
written atomically (`work_directory`).
"""

from absl import flags

from encdec_adapt.adaptation import coverage as coverage_lib
from encdec_adapt.base import errors
from encdec_adapt.checkpoints import orbax_folder
from encdec_adapt.cli import command
from encdec_adapt.exchange import peft_exchange
from encdec_adapt.files import atomic, paths
from encdec_adapt.huggingface import (
  config_json,
  flax_folder,
  new_folder,
  tensor_folder,
)
from encdec_adapt.models import model_config
from encdec_adapt.stored import model_on_disk, pretrained_files, work_directory


def open_model(
  path: str, values: flags.FlagValues
) -> model_on_disk.StoredModel:
  """Opens a model with the flags for `model_on_disk.open_model`."""
  # Subcommands define different subsets of these flags.
  names = [n for n in ('encoder_window', 'vocab_multiple') if n in values]
  options = {name: values[name].value for name in names}
  return model_on_disk.open_model(path, **options)


def import_folder(values: flags.FlagValues, _: list[str]) -> int:
  """Runs `convert import`.

  Raises:
    UserError: the output exists, or the source is damaged or has no model.
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
  # The authors' Flax folders have no Hugging Face files to store.
  files: pretrained_files.Folders = {}
  # Any folder with a config.json is a Hugging Face folder or a run.
  if not has_config and orbax_folder.is_orbax_folder(path):
    source = _open_flax(path, values)
  else:
    if not model_on_disk.is_folder(path):
      raise errors.UserError(
        f'--source={path} is a work directory already; import reads Hugging'
        ' Face folders, and the Flax folders of the authors.'
      )
    if values.model:
      raise errors.UserError(
        f'--model={values.model} is for folders of Flax arrays; {path} has a'
        ' config.json of its own.'
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
  path: paths.Path, values: flags.FlagValues
) -> model_on_disk.StoredModel:
  """Opens a model in its authors' Flax format; reads no arrays.

  Raises:
    UserError: the model is damaged, differs from --model, or has no such
      window.
  """
  folder, name = orbax_folder.OrbaxFolder(path), str(path)
  if values.model:
    raw = atomic.read_json(values.model)
    model = config_json.model_from_raw(raw, values.model)[0]
  else:
    # The folder has no config; shapes identify the released models.
    model = flax_folder.released_model(folder.arrays, name)
  model = model_on_disk.with_window(model, values.encoder_window, name)
  model = model_config.with_vocab_multiple(model, values.vocab_multiple)
  source = flax_folder.FlaxModel(folder.arrays, folder.read, model, name)
  return model_on_disk.StoredModel(
    path,
    model,
    model_on_disk.vocabularies_in(path),
    source.arrays,
    unused=source.unused,
    name=values.source,
  )
