"""Exports and imports PEFT folders, and merges adapters into their base.

Implements `convert export --layout=peft`, `convert import` of PEFT folders and
`convert merge-lora`. Names of tensors and options are in
`huggingface.peft_folder`.
"""

import os

from absl import flags

from encdec_adapt.base import errors
from encdec_adapt.cli import command
from encdec_adapt.files import atomic, lazy_array, paths
from encdec_adapt.huggingface import (
  config_json,
  new_folder,
  peft_folder,
  weights,
)
from encdec_adapt.models import adapters as adapters_lib
from encdec_adapt.models import heads, model_config
from encdec_adapt.stored import (
  model_on_disk,
  pretrained_files,
  prompt_framing,
  work_directory,
)


def is_folder(path: paths.Path) -> bool:
  """Returns whether PEFT wrote a folder."""
  return (path / peft_folder.CONFIG).exists()


def export_adapters(
  values: flags.FlagValues, stored: model_on_disk.StoredModel
) -> None:
  """Writes a PEFT folder to load over the exported base.

  Raises:
    UserError: the model is not a run of adapters, PEFT does not support them,
      or a flag applies only to full models.
  """
  adapters, base = _require_adapters(stored), stored.base.full_name
  if differing := model_config.differences(stored.model, stored.base.model):
    raise errors.UserError(
      f'{stored.name} was trained with other settings than its base, which PEFT'
      f' would compute with: {"; ".join(differing)}; merge the adapters'
      ' (`convert merge-lora`) and export that model.'
    )
  for name in (
    'dtype',
    'vision',
    'embedding',
    'dimensions',
    'language',
    'evaluation',
  ):
    if value := values[name].value:
      raise errors.UserError(
        f'--{name}={value} is for whole models, and --layout=peft writes'
        ' adapters alone; leave it out, or choose another layout.'
      )
  # PEFT reads the name from its working directory.
  if os.path.isabs(base) and base.startswith(f'{os.getcwd()}/'):
    base = os.path.relpath(base)
  layout = _layout(stored.model)
  files = peft_folder.files(adapters, stored.trained(), layout, base)
  files[prompt_framing.PEFT] = atomic.json_bytes(stored.framing.fields())
  with new_folder.new_folder(values.output) as draft:
    for file, content in files.items():
      (draft / file).write_bytes(content)
  decoder, opened = stored.model.decoder, ''
  if heads.classifies(decoder.head):
    opened = f' (as a classifier of num_labels={decoder.outputs})'
  print(
    f'{values.output}: adapters; PEFT loads them over an export of {base}'
    f'{opened}'
  )


def import_adapters(values: flags.FlagValues, path: paths.Path) -> None:
  """Writes a work directory with the adapters of a PEFT folder.

  Raises:
    UserError: the base is not given, or does not fit the adapters.
  """
  config = atomic.read_json(path / peft_folder.CONFIG)
  name = values.base or config.get('base_model_name_or_path') or ''
  if not values.base and not (name and paths.at(name).is_dir()):
    raise errors.UserError(
      f'--source={path} adapts {name!r}, which is not a folder; give --base.'
    )
  base = model_on_disk.open_model(name, vocab_multiple=values.vocab_multiple)
  if base.adapters:
    raise errors.UserError(
      f'--base={name} is a run of adapters, and adapters are trained over a'
      ' whole model; merge it first (`convert merge-lora`).'
    )
  adapters, arrays = peft_folder.read(path, base.model, _layout(base.model))
  # The adapters' prompt framing if the folder has it, as ours do, otherwise
  # the base's; only the base's run has the labels of a head.
  file = path / prompt_framing.PEFT
  is_stated = file.exists() and base.model.decoder.head.predicts_tokens
  contents = work_directory.Contents(
    base.model,
    {'command': 'import', 'sources': [base.name], 'adapters': str(path)},
    pretrained_files.folders(base.path),
    base.vocabularies,
    lora=adapters.options,
    base={'name': base.full_name, 'digest': base.digest},
    run=None if is_stated else base.run,
    framing=prompt_framing.in_file(file) if is_stated else base.framing,
  )
  work_directory.write(
    values.output,
    contents,
    {
      key: lazy_array.LazyArray(x.shape, x.dtype, x.__getitem__)
      for key, x in arrays.items()
    },
    verb='read',
  )


def merge_adapters(values: flags.FlagValues, _: list[str]) -> int:
  """Runs `convert merge-lora`: W + scale A B over the stored base.

  Raises:
    UserError: the output exists, or the model is not a run of adapters.
  """
  command.require(values, 'checkpoint', 'output')
  new_folder.require_free(values.output)
  stored = model_on_disk.open_model(values.checkpoint)
  _require_adapters(stored)
  contents = work_directory.Contents(
    stored.model,
    {'command': 'merge-lora', 'sources': [stored.name, stored.base.name]},
    pretrained_files.folders(stored.path),
    stored.vocabularies,
    run=stored.path,
  )
  work_directory.write(values.output, contents, stored.arrays(), verb='merged')
  return 0


def _require_adapters(
  stored: model_on_disk.StoredModel,
) -> adapters_lib.Adapters:
  if stored.adapters is None:
    raise errors.UserError(
      f'--checkpoint={stored.name} is a whole model; give a run of adapters'
      f' ({adapters_lib.LABEL}).'
    )
  return stored.adapters


def _layout(model: model_config.ModelConfig) -> weights.Layout:
  """Returns the names of a model's tensors in transformers.

  Raises:
    UserError: transformers has no class for the model.
  """
  raw, _ = config_json.raw_from_model(model)
  return config_json.model_from_raw(raw, 'the base')[1]
