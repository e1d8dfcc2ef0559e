"""Vision part of a folder: carried from import to export unchanged.

Our models read text. The vision tower and the projector of a T5Gemma 2 folder
are kept, with its image processor files, so that the exported model reads
images as before. Those of a Gemma 3 folder have the same form and can be given
to a T5Gemma 2 that was adapted from it.
"""

from collections.abc import Mapping
import dataclasses
import functools
import os
import re
from typing import Any

import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.files import atomic, paths
from encdec_adapt.huggingface import families, tensor_folder, tensor_writer
from encdec_adapt.models import model_config

# How transformers turns images into pixels: the first file (version 4), both,
# or the second (version 5).
PROCESSORS = ('preprocessor_config.json', 'processor_config.json')
FOLDER = 'vision'  # Subfolder of a work directory that keeps the tensors.
MODEL_TYPE = 't5gemma2'  # The encoder-decoder that has a vision part.
# Start of the names in a T5Gemma 2; other models have other prefixes.
_START = 'model.encoder.'
_NAME = re.compile(r'(?:^|\.)((?:vision_tower|multi_modal_projector)\..+)$')
# Tensors of the encoder that transformers initialises if a T5Gemma 2 folder has
# text only.
MISSING = ('vision_tower.*', 'multi_modal_projector.*')
PROJECTION = 'multi_modal_projector.mm_input_projection_weight'
_SHAPE_FIELDS = ('vision_config', 'mm_tokens_per_image')
_IDS = ('boi_token_index', 'image_token_index')
_IMAGE_TOKEN = 256001  # Default of the T5Gemma 2 class.


def is_vision(name: str) -> bool:
  """Returns whether a tensor of this name belongs to a vision part."""
  return _NAME.search(name) is not None


@dataclasses.dataclass(frozen=True)
class Vision:
  """A vision part with unread tensors.

  Attributes:
    folder: folder of its config.json.
    fields: fields of the encoder in a T5Gemma 2 config.json: `vision_config`
      and others about images.
    tensors: stored tensors.
    names: name in a T5Gemma 2 folder -> name in `tensors`.
    processors: the files of `PROCESSORS` that the folder has, by name.
  """

  folder: paths.Path
  fields: Mapping[str, Any]
  tensors: tensor_folder.TensorFolder
  names: Mapping[str, str]
  processors: Mapping[str, paths.Path]

  @property
  def image_token(self) -> int:
    """Id of the placeholder token of an image patch."""
    return self.fields.get('image_token_index', _IMAGE_TOKEN)

  def planned(self, start: str = _START) -> list[tensor_writer.PlannedTensor]:
    """Returns its tensors, to be written bit for bit with T5Gemma 2 names.

    Args:
      start: start of the names; '' for those of the encoder alone.
    """
    plans = []
    for name, stored in self.names.items():
      name = start + name.removeprefix(_START)
      info = self.tensors.tensors[stored]
      make = functools.partial(self._read, stored)
      plans.append(
        tensor_writer.PlannedTensor(name, info.shape, info.dtype, make)
      )
    return plans

  def require_fits(self, encoder: model_config.StackConfig) -> None:
    """Raises an error if images are not projected to the encoder's width.

    Raises:
      UserError: names both widths.
    """
    stored = self.names[_START + PROJECTION]
    width = self.tensors.tensors[stored].shape[1]
    if width != encoder.width:
      raise errors.UserError(
        f'the vision part of {self.folder} projects to width {width}, and the'
        f' encoder has width {encoder.width}. Give the folder of a model'
        ' of that width.'
      )

  def _read(self, name: str) -> np.ndarray:
    array = self.tensors.read(name)
    tensor_folder.check_finite(name, array, self.tensors.tensors[name].file)
    return array


def open_vision(folder: str | os.PathLike[str]) -> Vision | None:
  """Opens the vision part of a folder; reads headers only.

  Args:
    folder: folder of a T5Gemma 2 or a multimodal Gemma 3, or a folder that
      `keep` wrote.

  Returns:
    The vision part, or None if the folder has none.

  Raises:
    UserError: a file is damaged, the part has no projection, or a tensor is
      stored twice.
  """
  folder = paths.at(folder)
  weights = folder / FOLDER if (folder / FOLDER).is_dir() else folder
  names = (tensor_folder.SINGLE, tensor_folder.INDEX)
  if not any((weights / name).exists() for name in names):
    return None
  tensors = tensor_folder.TensorFolder(weights)
  stored = {
    name: match.group(1)
    for name in tensors.tensors
    if (match := _NAME.search(name))
  }
  if not stored:
    return None
  raw = atomic.read_json(folder / tensor_folder.CONFIG)
  if raw.get('model_type') != MODEL_TYPE:
    # A T5Gemma 2 is exported with the names that it had, others with those of
    # transformers 5, which has no `vision_model.` as version 4 had.
    stored = {k: v.replace('.vision_model.', '.', 1) for k, v in stored.items()}
  names = {_START + theirs: name for name, theirs in stored.items()}
  if len(names) < len(stored) or _START + PROJECTION not in names:
    raise errors.UserError(
      f'{folder} has a vision part without tensor {PROJECTION!r}, or with one'
      ' under two names. Download the folder again.'
    )
  encoder = _encoder(raw)
  fields = {key: encoder[key] for key in _SHAPE_FIELDS if key in encoder}
  processors = {
    name: folder / name for name in PROCESSORS if (folder / name).is_file()
  }
  for file in processors.values():
    atomic.read_json(file)  # Raises an error if it is damaged.
  return Vision(folder, fields | image_ids(raw), tensors, names, processors)


def keep(part: Vision, folder: paths.Path) -> None:
  """Copies a vision part and its files into a folder for `open_vision`.

  Args:
    part: vision part.
    folder: target, which has or will have the config.json of the part.
  """
  with paths.staged(folder / FOLDER) as target:
    tensor_writer.write_tensors(target, part.planned())
  for name, path in part.processors.items():
    paths.copy(path, folder / name)


def with_vision(raw: Mapping[str, Any], part: Vision) -> dict[str, Any]:
  """Returns a config.json of T5Gemma 2 with the fields of a vision part.

  Args:
    raw: result of `config_json.raw_from_model`, of a pair or its encoder.
    part: vision part that is written into the same folder.
  """
  if 'encoder' not in raw:
    return {**raw, **part.fields}
  encoder = {**raw['encoder'], **part.fields}
  # transformers prefers the value at the top, which would be its default.
  top = {k: v for k, v in part.fields.items() if k == 'image_token_index'}
  return {**raw, **top, 'encoder': encoder}


def image_ids(raw: families.Raw) -> dict[str, int]:
  """Returns the token ids that frame an image in a T5Gemma 2.

  Empty for other models: those of Gemma 3 lie above T5Gemma 2's vocabulary.

  Args:
    raw: parsed config.json.
  """
  if raw.get('model_type') != MODEL_TYPE:
    return {}
  ids = dict(_encoder(raw))
  if 'image_token_index' in raw:  # transformers prefers the outer value.
    ids['image_token_index'] = raw['image_token_index']
  return {key: ids[key] for key in _IDS if key in ids}


def _encoder(raw: families.Raw) -> families.Raw:
  """Returns an object with `text_config`, `vision_config` and image ids.

  Raises:
    UserError: a T5Gemma 2 config.json has no encoder.
  """
  if raw.get('model_type') != MODEL_TYPE:
    return raw
  if not isinstance(raw.get('encoder'), Mapping):
    raise errors.UserError(
      f"a config.json of {MODEL_TYPE} must have an object 'encoder'."
    )
  return raw['encoder']
