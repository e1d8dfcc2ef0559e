"""A model on disk, whoever wrote it: a run of ours or a Hugging Face folder."""

from collections.abc import Callable
import dataclasses
import json
import os
import pathlib
from typing import Any

import jax
import numpy as np

from encdec_adapt import config as config_lib
from encdec_adapt.interop import folder as folder_lib
from encdec_adapt.models import config as model_config
from encdec_adapt.runtime import errors
from encdec_adapt.training import checkpoint
from encdec_adapt.training import state as state_lib

Read = Callable[[state_lib.Placement], Any]


@dataclasses.dataclass(frozen=True)
class Source:
  """A model whose parameters have not been read yet.

  Attributes:
    path: where it is.
    model: its config.
    vocabulary: path of its SentencePiece file, '' where there is none.
    read: a placement of that model -> its parameters, sharded, fp32.
    unused: tensors that are no part of the model -> why.
  """

  path: pathlib.Path
  model: model_config.ModelConfig
  vocabulary: str
  read: Read
  unused: dict[str, str] = dataclasses.field(default_factory=dict)


def open_source(
  path: str | os.PathLike[str], *, encoder_window: str = 'exclusive'
) -> Source:
  """Opens the work directory of a run, or a Hugging Face folder.

  Reads configs and headers only.

  Args:
    path: the folder.
    encoder_window: how the encoder of a T5Gemma folder looks around; see
      `interop.model_configs.model_from_raw`.

  Raises:
    UserError: it is neither, or damaged.
  """
  path = pathlib.Path(path)
  if _is_hugging_face(path):
    return _open_folder(path, encoder_window)
  settings = config_lib.load_run(str(path))
  found = checkpoint.open_latest(path)

  def read(where: state_lib.Placement) -> Any:
    return found.restore_params(where.abstract_params())

  return Source(path, settings.model, settings.data.vocabulary, read)


def _is_hugging_face(path: pathlib.Path) -> bool:
  file = path / folder_lib.CONFIG
  if not file.exists():
    raise errors.UserError(
      f'{path} holds no model: it has no {folder_lib.CONFIG}. Give the work'
      ' directory of a training job, or a Hugging Face folder.'
    )
  try:
    return 'model_type' in json.loads(file.read_bytes())
  except ValueError as error:
    raise errors.UserError(f'{file} is not JSON ({error}).') from error


def _open_folder(path: pathlib.Path, encoder_window: str) -> Source:
  opened = folder_lib.ModelFolder.open(path, encoder_window=encoder_window)
  sentencepiece = path / 'tokenizer.model'

  def read(where: state_lib.Placement) -> Any:
    return state_lib.unflatten(
      {
        array.path: _place(array, where.parameters[array.path])
        for array in opened.arrays()
      }
    )

  return Source(
    path,
    opened.config,
    str(sentencepiece) if sentencepiece.exists() else '',
    read,
    dict(opened.unused),
  )


def _place(
  array: folder_lib.LazyArray, sharding: jax.sharding.Sharding
) -> jax.Array:
  """Reads what each device of this process holds, and no more, as fp32."""
  return jax.make_array_from_callback(
    array.shape,
    sharding,
    lambda index: np.asarray(array.read(index), np.float32),
  )
