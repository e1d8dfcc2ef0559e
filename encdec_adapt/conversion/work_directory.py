"""Makes a work directory that holds a model, as training leaves one.

For models that no training made: imported, adapted, merged. The folder
appears whole or not at all.
"""

from collections.abc import Iterable, Iterator
import contextlib
import dataclasses
import functools
import os
import pathlib
from typing import Any

from absl import logging
import jax
import numpy as np

from encdec_adapt import config as config_lib
from encdec_adapt.adaptation import coverage as coverage_lib
from encdec_adapt.checkpoints import manager, streamed
from encdec_adapt.cli import errors
from encdec_adapt.conversion import kept_files, stored_model
from encdec_adapt.data import data_section
from encdec_adapt.files import atomic, disk, paths
from encdec_adapt.huggingface import folder as folder_lib
from encdec_adapt.huggingface import new_folder
from encdec_adapt.models import model_config, parameters
from encdec_adapt.telemetry import accounting, environment
from encdec_adapt.tokenizers import vocabularies, vocabulary
from encdec_adapt.training import state as state_lib

COVERAGE = 'coverage.json'
_LENGTH = 256  # Tokens of either side, where a configuration wants to know.


@dataclasses.dataclass(frozen=True)
class Contents:
  """What goes into a work directory beside its parameters.

  Attributes:
    model: the model.
    made_by: `command` and `sources`, the folders it was made from.
    kept: Hugging Face files (`kept_files`).
    choice: of vocabularies; None for none.
    coverage: the account of an adaptation.
    can_extend: the command has flags for larger tables, `SIDE_vocab_size`.
  """

  model: model_config.ModelConfig
  made_by: dict[str, Any]
  kept: kept_files.Folders
  choice: vocabularies.Choice | None = None
  coverage: coverage_lib.Coverage | None = None
  can_extend: bool = False


def require(output: str | os.PathLike[str]) -> None:
  """Refuses, before any work, an output that is taken or out of reach.

  Raises:
    UserError: something is there, or this is no checkout of the repository.
  """
  new_folder.require_free(output)


def lazy_params(
  arrays: Iterable[folder_lib.LazyArray], on_progress: stored_model.OnProgress
) -> Any:
  """Parameters for `write`, each read when it is written, in its own dtype.

  Whoever reads the checkpoint gets float32: half the bytes say as much.

  Args:
    arrays: every parameter of the model.
    on_progress: called with the bytes read and those to read.
  """
  arrays = list(arrays)
  total, done = sum(array.nbytes for array in arrays), 0

  def make(array: folder_lib.LazyArray) -> np.ndarray:
    nonlocal done
    made = np.asarray(array)
    done += array.nbytes
    on_progress(done, total)
    return made

  return state_lib.unflatten(
    {
      array.path: streamed.Leaf(
        array.shape, array.dtype, functools.partial(make, array)
      )
      for array in arrays
    }
  )


def write(
  output: str | os.PathLike[str], contents: Contents, params: Any
) -> None:
  """Writes the folder.

  Args:
    output: not there yet, or empty.
    contents: what goes into it.
    params: nested parameters: arrays, or as `lazy_params` gives them.

  Raises:
    UserError: the folder is taken or cannot be written, a file that is kept
      is damaged, or a vocabulary has more tokens than the table rows.
    CheckpointError: the checkpoint was not written.
  """
  output = paths.at(output)
  kept_files.check(contents.kept)
  opened = _open_vocabularies(contents)
  config = _config(contents.model)
  if opened:
    _name_vocabularies(config.data, contents.choice, opened)
  settings = config_lib.load(config, str(output))
  if settings.model != contents.model:
    raise ValueError(
      'the configuration says another model: '
      + '; '.join(model_config.differences(settings.model, contents.model))
    )
  nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
  summary = accounting.summarise(
    output,
    {
      'made_by': contents.made_by,
      'parameters': parameters.count(contents.model),
      'steps': 0,
    },
    accounting.Cost(),
    accounting.read_sources(contents.made_by['sources']),
  )
  with new_folder.new_folder(output) as draft:
    remedy = ' ($TMPDIR)' if paths.is_bucket(output) else ''
    disk.require_space(
      draft.parent, nbytes, what='the parameters', remedy=remedy
    )
    config_lib.save(config, str(draft))
    atomic.write_json(draft / accounting.SUMMARY, summary)
    if opened:
      keep_vocabularies(draft, opened)
    kept_files.keep(draft, contents.kept)
    if contents.coverage:
      atomic.write_json(draft / COVERAGE, contents.coverage.to_json())
    meta = {
      'config': config.to_dict(),
      'environment': environment.report(),
      'made_by': contents.made_by,
      'vocabularies': opened.describe() if opened else None,
    }
    _save(draft / manager.FOLDER, params, meta)


def _save(folder: pathlib.Path, params: Any, meta: dict[str, Any]) -> None:
  """Saves and seals step 0."""
  streamed.register()
  try:
    with (
      _silent_logging(),
      manager.Checkpoints(folder) as checkpoints,
    ):
      checkpoints.save(
        0, {'params': params}, data=accounting.Cost().as_dict(), meta=meta
      )
  except manager.CheckpointError as error:
    # What a leaf is made of may be damaged: that is not the disk's fault.
    raise errors.user_error_behind(error) or error from error


@contextlib.contextmanager
def _silent_logging() -> Iterator[None]:
  """No traceback of Orbax's: what fails is raised, and said once."""
  before = logging.get_verbosity()
  logging.set_verbosity(logging.FATAL)
  try:
    yield
  finally:
    logging.set_verbosity(before)


def _config(model: model_config.ModelConfig):
  """Returns the defaults with this model and an objective that fits it."""
  config = config_lib.defaults()
  config_lib.set_model(config.model, model)
  if isinstance(model, model_config.EncoderDecoderConfig):
    config.data.objective = 'prefix_lm'
    config.data.encoder_length = config.data.decoder_length = _LENGTH
  config.data.train_vocabulary = False
  return config


def _open_vocabularies(contents: Contents) -> vocabularies.Opened | None:
  """The vocabularies, where our data pipeline reads them.

  Raises:
    UserError: one is damaged, or has more tokens than the table has rows.
  """
  if contents.choice is None:
    print(
      'note: no tokenizer beside the weights, so there is no vocabulary for'
      ' training and generating from text; give config.data.vocabulary.'
    )
    return None
  try:
    opened = contents.choice.open()
  except vocabulary.DamagedError:
    raise
  except errors.UserError as error:
    print(f'note: not used as a vocabulary: {error}')
    return None
  for side, stack in contents.model.stacks.items():
    key = f'--{side}_vocab_size' if contents.can_extend else ''
    note = vocabularies.check_size(
      opened.sides[side], stack.vocab_size, side, key=key
    )
    if note:
      print(f'note: {note}')
  return opened


def _kept_sides(
  opened: vocabularies.Opened,
) -> dict[str, vocabulary.Vocabulary]:
  """The vocabularies that there are, by side."""
  return opened.sides if opened.differ else {'decoder': opened.decoder}


def _name_vocabularies(
  data: Any, choice: vocabularies.Choice, opened: vocabularies.Opened
) -> None:
  """Writes the section `data`: paths that move with the folder."""
  keys = {'decoder': 'vocabulary', 'encoder': 'encoder_vocabulary'}
  for side, one in _kept_sides(opened).items():
    below = f'{data_section.WORKDIR}/{config_lib.VOCABULARIES}/{side}'
    data[keys[side]] = below if one.files else choice.path(side)
  data.add_sentinels = choice.added_sentinels


def keep_vocabularies(
  workdir: str | os.PathLike[str], opened: vocabularies.Opened
) -> None:
  """Copies the files of the vocabularies, and those that name their ids.

  What is there goes, unless it is what they were opened from.

  Args:
    workdir: where they go, a folder for a side.
    opened: the vocabularies.
  """
  sides = _kept_sides(opened)
  for side in opened.sides:
    folder = paths.at(workdir) / config_lib.VOCABULARIES / side
    one, names = sides.get(side), {}
    if one:
      names = kept_files.vocabulary_files(one)
      names |= {file.name: file for file in one.files if file.suffix == '.json'}
    if any(paths.at(file).parent == folder for file in names.values()):
      continue
    paths.remove(folder)
    for name, file in names.items():
      folder.mkdir(parents=True, exist_ok=True)
      paths.copy(file, folder / name)
