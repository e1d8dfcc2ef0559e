"""Writes work directories for imported, adapted and merged models.

They have the layout of a training job with a checkpoint at step 0, and are
written atomically. The parameters are computed by the commands.
"""

from collections.abc import Mapping
import dataclasses
import functools
import json
import os
import pathlib
from typing import Any

import numpy as np

from encdec_adapt import config as config_lib
from encdec_adapt.adaptation import coverage as coverage_lib
from encdec_adapt.base import errors, keys
from encdec_adapt.checkpoints import manager, step_folders, streaming
from encdec_adapt.data import data_section
from encdec_adapt.files import atomic, disk, lazy_array, paths
from encdec_adapt.huggingface import new_folder
from encdec_adapt.models import adapters as adapters_lib
from encdec_adapt.models import heads, model_config, parameters
from encdec_adapt.objectives import objective_names
from encdec_adapt.stored import (
  model_on_disk,
  pretrained_files,
  prompt_framing,
  source_vocabularies,
)
from encdec_adapt.telemetry import compute_cost, environment, progress
from encdec_adapt.tokenizers import vocabulary, vocabulary_pair
from encdec_adapt.training import state as state_lib

COVERAGE = 'coverage.json'
_LENGTH = 256  # Default tokens of each side in the configuration.


@dataclasses.dataclass(frozen=True)
class Contents:
  """Contents of a work directory other than the parameters.

  Attributes:
    model: config of the model.
    made_by: `command` and `sources`, the models it was made from, see
      `model_on_disk.resolve`.
    sources: folders of Hugging Face files, see `pretrained_files.folders`.
    choice: paths of the vocabularies; None for none.
    coverage: coverage report of an adaptation.
    can_extend: whether the command has flags for larger tables,
      `--model.SIDE.vocab_size`.
    lora: options of adapters; with a rank above 0, the parameters are adapters.
    base: name and digest of the base of adapters.
    run: work directory of the run that trained the model; its objective and
      loss define labels, prompts and temperature of a model with a head.
    framing: prompt framing of a language model without `run`.
    tokenizers: stack -> folder of tokenizer files that replace the files of
      `sources`; a stack that is missing has the decoder's.
  """

  model: model_config.ModelConfig
  made_by: dict[str, Any]
  sources: pretrained_files.Folders
  choice: vocabulary_pair.Choice | None = None
  coverage: coverage_lib.Coverage | None = None
  can_extend: bool = False
  lora: adapters_lib.Options = adapters_lib.Options()
  base: Mapping[str, str] | None = None
  run: paths.Path | None = None
  framing: prompt_framing.PromptFraming = prompt_framing.PromptFraming()
  tokenizers: pretrained_files.Folders = dataclasses.field(default_factory=dict)


def write(
  output: str | os.PathLike[str],
  contents: Contents,
  arrays: Mapping[str, lazy_array.LazyArray],
  *,
  verb: str = 'written',
) -> None:
  """Writes a work directory and prints its number of parameters.

  Arrays are read lazily and keep their stored dtype; checkpoints are restored
  as float32 anyway.

  Args:
    output: new or empty folder; may be in a bucket.
    contents: contents other than the parameters.
    arrays: path -> parameter, for all parameters of the model.
    verb: verb of the progress line, such as "read".

  Raises:
    UserError: the folder is not empty or cannot be written, a pretrained file
      is damaged, or a vocabulary has more tokens than the table has rows.
    CheckpointError: the checkpoint could not be written.
  """
  output = paths.at(output)
  step_folders.absolute(output)  # A bucket's draft has another path.
  pretrained_files.check(contents.sources)
  opened = _open_vocabularies(contents)
  config = _config(contents, opened)
  # Fail now: a model field without a config key would be lost when a job starts
  # from the folder.
  if (
    config_lib.load(config, str(output), sources=False).model != contents.model
  ):
    raise ValueError('the configuration describes another model')
  nbytes = sum(array.nbytes for array in arrays.values())
  count = parameters.count(contents.model)
  summary = compute_cost.summarise(
    output,
    {'made_by': contents.made_by, 'parameters': count, 'steps': 0},
    compute_cost.Cost(),
    compute_cost.read_sources(
      {x: model_on_disk.resolve(x)[0] for x in contents.made_by['sources']}
    ),
  )
  with new_folder.new_folder(output) as draft:
    # A bucket's draft is local and needs space for the model too.
    remedy = ' ($TMPDIR)' if paths.is_bucket(output) else ''
    disk.require_space(
      draft.parent, nbytes, label='the parameters', remedy=remedy
    )
    config_lib.save(config, str(draft))
    atomic.write_json(draft / compute_cost.SUMMARY, summary)
    if opened:
      keep_vocabularies(draft, opened)
    pretrained_files.keep(draft, contents.sources)
    if contents.tokenizers:
      pretrained_files.replace_tokenizers(draft, contents.tokenizers)
    if contents.coverage:
      atomic.write_json(draft / COVERAGE, contents.coverage.to_json())
    meta = {
      'config': config.to_dict(),
      'environment': environment.report(),
      'made_by': contents.made_by,
      'vocabularies': opened.describe() if opened else None,
      **({'base': contents.base} if contents.base else {}),
    }
    params = state_lib.unflatten(_reporting(arrays, nbytes, verb))
    _save(draft / manager.FOLDER, params, meta)
  print(f'{output}: {count:,} parameters, step 0')


def _reporting(
  arrays: Mapping[str, lazy_array.LazyArray], total: int, verb: str
) -> dict[str, lazy_array.LazyArray]:
  report, nbytes = progress.ByteProgress(verb), 0

  def read(array: lazy_array.LazyArray, index: tuple[slice, ...]) -> np.ndarray:
    nonlocal nbytes
    part = array.read_part(index)
    nbytes += part.nbytes
    report(nbytes, total)
    return part

  return {
    path: dataclasses.replace(array, read_part=functools.partial(read, array))
    for path, array in arrays.items()
  }


def _save(folder: pathlib.Path, params: Any, meta: dict[str, Any]) -> None:
  streaming.register()
  try:
    with manager.Checkpoints(folder) as checkpoints:
      checkpoints.save(
        0, {'params': params}, data=compute_cost.Cost().as_dict(), meta=meta
      )
  except manager.CheckpointError as error:
    # Sources are read while saving; a damaged source is a user error.
    raise errors.user_error_behind(error) or error from error


def _config(contents: Contents, opened: vocabulary_pair.Opened | None) -> Any:
  config = config_lib.defaults()
  config_lib.set_model(config.model, contents.model)
  if contents.base:
    config.train.lora.update(keys.values_of(contents.lora))
    config.init.mode, config.init.encoder = 'checkpoint', contents.base['name']
  data, head = config.data, contents.model.decoder.head
  if contents.model.architecture.encodes_prompt:
    data.objective = 'prefix_lm'
    if length := contents.model.encoder.passages.length:
      data.objective, data.source = f'passages:length={length}', ''
    data.encoder_length = data.decoder_length = _LENGTH
  elif contents.model.architecture.is_encoder:
    data.objective = 'bert'
    data.encoder_length, data.decoder_length = _LENGTH, 0
  if isinstance(head, heads.Labels):
    data.objective, data.source = _labels_objective(contents), ''
    data.decoder_length = 0
  if contents.run:  # Keeps the prompt framing of its run.
    saved = config_lib.saved(str(contents.run))
    data.update(saved.data)
    if not head.predicts_tokens:
      config.loss.update(saved.loss)
      config.teacher.update(saved.teacher)
    else:  # Further training is on single answers.
      objectives = objective_names.parse(data.objective)
      if objectives[0].rows.answers > 1:
        name = 'chat' if objectives[0].rows.ends_turns else 'pairs'
        _, colon, options = data.objective.partition(':')
        data.objective, data.source = name + colon + options, ''
  elif contents.framing and head.predicts_tokens:
    data.objective, data.source = contents.framing.training_objective(), ''
    data.encoder_length = data.decoder_length = _LENGTH
  # Table rows are tokens of the sources; a new vocabulary would change their
  # meaning.
  data.train_vocabulary = False
  if opened:
    names = {'decoder': 'vocabulary', 'encoder': 'encoder_vocabulary'}
    for side, vocab in _distinct(opened).items():
      # Relative to the work directory, so that it can be moved.
      copy = f'{data_section.WORKDIR}/{config_lib.VOCABULARIES}/{side}'
      # 'bytes' has no files.
      data[names[side]] = copy if vocab.files else contents.choice.path(side)
    data.add_sentinels = contents.choice.added_sentinels
  return config


def _labels_objective(contents: Contents) -> str:
  """Returns the objective with the labels of a classifier's folder."""
  folder = contents.sources.get('decoder')
  labels = model_on_disk.labels_in(folder, contents.model.decoder.outputs)
  words = folder and model_on_disk.labels_words_in(folder)
  return (
    f'{"tag" if words else "classify"}:labels={json.dumps("|".join(labels))}'
  )


def _open_vocabularies(contents: Contents) -> vocabulary_pair.Opened | None:
  """Opens the vocabularies and checks that the model has a row for each token.

  Raises:
    UserError: a vocabulary is damaged, or larger than the table.
  """
  if contents.choice is None:
    print(
      'note: the model comes without a tokenizer; set config.data.vocabulary'
      ' to train it on text.'
    )
  opened = source_vocabularies.open_if_suitable(contents.choice)
  for side, stack in contents.model.stacks.items() if opened else ():
    # Name a flag only if the command has it.
    key = f'--model.{side}.vocab_size' if contents.can_extend else ''
    vocab = opened.sides[side]
    if note := vocabulary_pair.check_size(
      vocab, stack.vocab_size, side, key=key
    ):
      print(f'note: {note}')
  return opened


def _distinct(
  opened: vocabulary_pair.Opened,
) -> dict[str, vocabulary.Vocabulary]:
  return opened.sides if opened.differ else {'decoder': opened.decoder}


def keep_vocabularies(
  workdir: str | os.PathLike[str], opened: vocabulary_pair.Opened
) -> None:
  """Copies the files of the vocabularies into a work directory.

  Earlier copies are removed, unless the vocabularies were opened from them.

  Args:
    workdir: the work directory.
    opened: the vocabularies.
  """
  distinct = _distinct(opened)
  # Both sides: an earlier start may have left an encoder's.
  for side in opened.sides:
    folder = paths.at(workdir) / config_lib.VOCABULARIES / side
    sources = distinct[side].files if side in distinct else ()
    # A SentencePiece model may have any name; this name is expected.
    names = {
      file.name
      if file.suffix == '.json'
      else vocabulary_pair.SENTENCEPIECE: file
      for file in sources
    }
    # Removing the folder would remove the files to copy.
    if any(paths.at(file).parent == folder for file in names.values()):
      continue
    paths.remove(folder)
    for name, file in names.items():
      folder.mkdir(parents=True, exist_ok=True)
      paths.copy(file, folder / name)
