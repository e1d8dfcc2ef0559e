"""Writes work directories for imported, adapted and merged models.

They have the layout of a training job's, with a checkpoint of step 0, and are
written atomically.
"""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import functools
import os
import pathlib
from typing import Any

from absl import logging
import numpy as np

from encdec_adapt import config as config_lib
from encdec_adapt.adaptation import coverage as coverage_lib
from encdec_adapt.base import errors
from encdec_adapt.checkpoints import manager, streaming
from encdec_adapt.conversion import model_on_disk, pretrained_files
from encdec_adapt.data import data_section
from encdec_adapt.files import atomic, disk, lazy_array, paths
from encdec_adapt.huggingface import new_folder
from encdec_adapt.models import model_config, parameters
from encdec_adapt.telemetry import (
  compute_cost,
  environment,
  progress,
)
from encdec_adapt.tokenizers import vocabulary, vocabulary_pair
from encdec_adapt.training import state as state_lib

COVERAGE = 'coverage.json'
_LENGTH = 256  # Default tokens of either side in the configuration.


@dataclasses.dataclass(frozen=True)
class Contents:
  """Contents of a work directory other than the parameters.

  Attributes:
    model: config of the model.
    made_by: `command` and `sources`, the folders it was made from.
    kept: Hugging Face files to keep, see `pretrained_files.folders`.
    choice: paths of the vocabularies; None for none.
    coverage: coverage report of an adaptation.
    can_extend: whether the command has flags for larger tables,
      `--model.SIDE.vocab_size`.
  """

  model: model_config.ModelConfig
  made_by: dict[str, Any]
  kept: pretrained_files.Folders
  choice: vocabulary_pair.Choice | None = None
  coverage: coverage_lib.Coverage | None = None
  can_extend: bool = False


def write(
  output: str | os.PathLike[str],
  contents: Contents,
  arrays: Mapping[str, lazy_array.LazyArray],
  *,
  verb: str = 'written',
) -> None:
  """Writes a work directory and prints the number of its parameters.

  Each array is read when it is written and keeps its stored dtype: reading
  the checkpoint gives float32 in any case.

  Args:
    output: folder that does not exist or is empty; may be in a bucket.
    contents: contents other than the parameters.
    arrays: path -> parameter, all of the model's.
    verb: verb of the progress line, such as "read".

  Raises:
    UserError: the folder is taken or cannot be written, a kept file is
      damaged, or a vocabulary has more tokens than the table has rows.
    CheckpointError: the checkpoint was not written.
  """
  output = paths.at(output)
  pretrained_files.check(contents.kept)
  opened = _open_vocabularies(contents)
  config = _config(contents, opened)
  if config_lib.load(config, str(output)).model != contents.model:
    raise ValueError('the configuration describes another model')
  nbytes = sum(array.nbytes for array in arrays.values())
  count = parameters.count(contents.model)
  summary = compute_cost.summarise(
    output,
    {'made_by': contents.made_by, 'parameters': count, 'steps': 0},
    compute_cost.Cost(),
    compute_cost.read_sources(contents.made_by['sources']),
  )
  with new_folder.new_folder(output) as draft:
    remedy = ' ($TMPDIR)' if paths.is_bucket(output) else ''
    disk.require_space(
      draft.parent, nbytes, label='the parameters', remedy=remedy
    )
    config_lib.save(config, str(draft))
    atomic.write_json(draft / compute_cost.SUMMARY, summary)
    if opened:
      keep_vocabularies(draft, opened)
    pretrained_files.keep(draft, contents.kept)
    if contents.coverage:
      atomic.write_json(draft / COVERAGE, contents.coverage.to_json())
    meta = {
      'config': config.to_dict(),
      'environment': environment.report(),
      'made_by': contents.made_by,
      'vocabularies': opened.describe() if opened else None,
    }
    params = state_lib.unflatten(_reporting(arrays, nbytes, verb))
    _save(draft / manager.FOLDER, params, meta)
  print(f'{output}: {count:,} parameters, step 0')


def _reporting(
  arrays: Mapping[str, lazy_array.LazyArray], total: int, verb: str
) -> dict[str, lazy_array.LazyArray]:
  """Returns the arrays; reading one prints how many bytes have been read."""
  report, done = progress.ByteProgress(verb), 0

  def read(array: lazy_array.LazyArray, index: tuple[slice, ...]) -> np.ndarray:
    """Reads part of an array and prints the progress."""
    nonlocal done
    part = array.read_part(index)
    done += part.nbytes
    report(done, total)
    return part

  return {
    path: dataclasses.replace(array, read=functools.partial(read, array))
    for path, array in arrays.items()
  }


def _save(folder: pathlib.Path, params: Any, meta: dict[str, Any]) -> None:
  """Saves the checkpoint of step 0."""
  streaming.register()
  try:
    with _without_logging(), manager.Checkpoints(folder) as checkpoints:
      checkpoints.save(
        0, {'params': params}, data=compute_cost.Cost().as_dict(), meta=meta
      )
  except manager.CheckpointError as error:
    # A source that is read while it is saved may be damaged: a user error.
    raise errors.user_error_behind(error) or error from error


@contextlib.contextmanager
def _without_logging() -> Iterator[None]:
  """Suppresses Orbax's tracebacks of errors that are raised as well."""
  before = logging.get_verbosity()
  logging.set_verbosity(logging.FATAL)
  try:
    yield
  finally:
    logging.set_verbosity(before)


def _config(contents: Contents, opened: vocabulary_pair.Opened | None) -> Any:
  """Returns the default configuration with the model and vocabularies."""
  config = config_lib.defaults()
  config_lib.set_model(config.model, contents.model)
  data = config.data
  if contents.model.architecture.encodes_prompt:
    data.objective = 'prefix_lm'
    data.encoder_length = data.decoder_length = _LENGTH
  data.train_vocabulary = False
  if opened:
    keys = {'decoder': 'vocabulary', 'encoder': 'encoder_vocabulary'}
    for side, one in _distinct(opened).items():
      # Relative to the work directory, so that it can be moved.
      copy = f'{data_section.WORKDIR}/{config_lib.VOCABULARIES}/{side}'
      data[keys[side]] = copy if one.files else contents.choice.path(side)
    data.add_sentinels = contents.choice.added_sentinels
  return config


def _open_vocabularies(contents: Contents) -> vocabulary_pair.Opened | None:
  """Opens the vocabularies and checks that the model has a row for each token.

  Raises:
    UserError: one is damaged, or has more tokens than the table has rows.
  """
  if contents.choice is None:
    print(
      'note: the model comes without a tokenizer; set config.data.vocabulary'
      ' to train it on text.'
    )
    return None
  opened = model_on_disk.open_if_suitable(contents.choice)
  if opened is None:
    return None
  for side, stack in contents.model.stacks.items():
    key = f'--model.{side}.vocab_size' if contents.can_extend else ''
    note = vocabulary_pair.check_size(
      opened.sides[side], stack.vocab_size, side, key=key
    )
    if note:
      print(f'note: {note}')
  return opened


def _distinct(
  opened: vocabulary_pair.Opened,
) -> dict[str, vocabulary.Vocabulary]:
  """Returns the vocabularies by side, the decoder's alone if they are equal."""
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
  kept = _distinct(opened)
  for side in opened.sides:
    folder = paths.at(workdir) / config_lib.VOCABULARIES / side
    one, names = kept.get(side), {}
    if one:
      names = {file.name: file for file in one.files}
      if len(names) == 1 and one.files[0].suffix != '.json':
        names = {vocabulary_pair.SENTENCEPIECE: one.files[0]}
    if any(paths.at(file).parent == folder for file in names.values()):
      continue
    paths.remove(folder)
    for name, file in names.items():
      folder.mkdir(parents=True, exist_ok=True)
      paths.copy(file, folder / name)
