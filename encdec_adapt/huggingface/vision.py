"""Carries the vision part of a folder from import to export unchanged.

Our models read text. The vision tower, projector and image processor files of a
T5Gemma 2 folder are kept, so that the exported model reads images as before. A
Gemma 3 folder has the same parts, for a T5Gemma 2 adapted from it.
"""

from collections.abc import Mapping
import dataclasses
import functools
import os
import re
from typing import Any

import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.files import atomic, lazy_array, paths
from encdec_adapt.huggingface import families, tensor_folder, tensor_writer
from encdec_adapt.models import model_config

# Image processor files: transformers 4 writes the first, version 5 the second;
# folders may have both.
PROCESSORS = ('preprocessor_config.json', 'processor_config.json')
FOLDER = 'vision'  # Subfolder of a work directory with the tensors.
MODEL_TYPE = 't5gemma2'  # The encoder-decoder with a vision part.
# Prefix of the names in a T5Gemma 2; other models have other prefixes.
_START = 'model.encoder.'
_NAME = re.compile(r'(?:^|\.)((?:vision_tower|multi_modal_projector)\..+)$')
# Encoder tensors that transformers initialises if a T5Gemma 2 folder has none.
MISSING = ('vision_tower.*', 'multi_modal_projector.*')
PROJECTION = 'multi_modal_projector.mm_input_projection_weight'
_SHAPE_FIELDS = ('vision_config', 'mm_tokens_per_image')
_IDS = ('boi_token_index', 'image_token_index')
_IMAGE_TOKEN = 256001  # Default of the T5Gemma 2 class.


def is_vision(name: str) -> bool:
  """Returns whether a tensor belongs to a vision part, by its name."""
  return _NAME.search(name) is not None


@dataclasses.dataclass(frozen=True)
class Vision:
  """A vision part with unread tensors.

  Attributes:
    folder: folder of its config.json.
    fields: image fields of the encoder in a T5Gemma 2 config.json, such as
      `vision_config`.
    tensors: stored tensors.
    names: name in the encoder of a T5Gemma 2 -> name in `tensors`.
    processors: name -> file, for `PROCESSORS` in the folder.
  """

  folder: paths.Path
  fields: Mapping[str, Any]
  tensors: tensor_folder.TensorFolder
  names: Mapping[str, str]
  processors: Mapping[str, paths.Path]

  @property
  def image_token(self) -> int:
    """Placeholder token id of image patches."""
    return self.fields.get('image_token_index', _IMAGE_TOKEN)

  def arrays(self, start: str = _START) -> dict[str, lazy_array.LazyArray]:
    """Returns the tensors, unchanged, by T5Gemma 2 names.

    Args:
      start: prefix of the names; '' for an encoder alone.
    """
    arrays = {}
    for name, stored in self.names.items():
      info = self.tensors.tensors[stored]
      arrays[start + name] = lazy_array.LazyArray.in_full(
        info.shape, info.dtype, functools.partial(self._read, stored)
      )
    return arrays

  def require_fits(self, encoder: model_config.StackConfig) -> None:
    """Raises an error unless images are projected to the encoder's width.

    Raises:
      UserError: names both widths.
    """
    width = self.tensors.tensors[self.names[PROJECTION]].shape[1]
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
    folder: a T5Gemma 2 or multimodal Gemma 3 folder, or a folder from `keep`.

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
    # A T5Gemma 2 keeps its names; others get the names of transformers 5, which
    # dropped version 4's `vision_model.`.
    stored = {k: v.replace('.vision_model.', '.', 1) for k, v in stored.items()}
  names = {theirs: name for name, theirs in stored.items()}
  if len(names) < len(stored) or PROJECTION not in names:
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
    folder: target folder, with the config.json of the part now or later.
  """
  with paths.staged(folder / FOLDER) as target:
    tensor_writer.write_tensors(target, part.arrays())
  for name, path in part.processors.items():
    paths.copy(path, folder / name)


def with_vision(raw: Mapping[str, Any], part: Vision) -> dict[str, Any]:
  """Returns a config.json of T5Gemma 2 with the fields of a vision part.

  Args:
    raw: result of `config_json.raw_from_model`, for a pair or its encoder.
    part: vision part, written into the same folder.
  """
  if 'encoder' not in raw:
    return {**raw, **part.fields}
  encoder = {**raw['encoder'], **part.fields}
  # transformers prefers the top-level value, even a default.
  top = {k: v for k, v in part.fields.items() if k == 'image_token_index'}
  return {**raw, **top, 'encoder': encoder}


def image_ids(raw: families.Raw) -> dict[str, int]:
  """Returns the token ids that frame an image in a T5Gemma 2.

  Empty for other models: Gemma 3's are beyond T5Gemma 2's vocabulary.

  Args:
    raw: parsed config.json.
  """
  if raw.get('model_type') != MODEL_TYPE:
    return {}
  ids = dict(_encoder(raw))
  if 'image_token_index' in raw:  # transformers prefers the top-level value.
    ids['image_token_index'] = raw['image_token_index']
  return {key: ids[key] for key in _IDS if key in ids}


def _encoder(raw: families.Raw) -> families.Raw:
  """Returns the object with `text_config`, `vision_config` and image ids.

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
