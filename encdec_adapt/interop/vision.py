"""The vision part of a folder, which passes through untouched.

Our models read text. The vision tower and the projector of a T5Gemma 2
folder are kept as they are, so that what is exported reads images as before;
those of a Gemma 3 folder are of the same make and can be given to a T5Gemma 2
that was adapted from it.
"""

from collections.abc import Mapping
import dataclasses
import functools
import os
import re
from typing import Any

import numpy as np

from encdec_adapt.interop import (
  families,
  tensor_folder,
  tensor_writer,
)
from encdec_adapt.models import config as config_lib
from encdec_adapt.runtime import errors, files, storage

FOLDER = 'vision'  # Where a work directory keeps the part, in a folder.
MODEL_TYPE = 't5gemma2'  # The encoder-decoder that has one.
# What its names start with in a T5Gemma 2; others differ before these parts.
_START = 'model.encoder.'
_NAME = re.compile(r'(?:^|\.)((?:vision_tower|multi_modal_projector)\..+)$')
_TOWER = 'vision_tower.'
_LAYER = re.compile(r'\.layers\.(\d+)\.')
_PROJECTION = 'multi_modal_projector.mm_input_projection_weight'
_NORM = 'multi_modal_projector.mm_soft_emb_norm.weight'
# What transformers initialises anew where a T5Gemma 2 folder has no part.
MISSING = (
  f'{_START}vision_tower.*',
  f'{_START}{_PROJECTION}',
  f'{_START}{_NORM}',
)
_SHAPE_FIELDS = ('vision_config', 'mm_tokens_per_image')
_IDS = ('boi_token_index', 'image_token_index')


def is_vision(name: str) -> bool:
  """Whether a tensor of this name belongs to a vision part."""
  return _NAME.search(name) is not None


@dataclasses.dataclass(frozen=True)
class Vision:
  """A vision part whose tensors have not been read.

  Attributes:
    folder: it was found in.
    fields: of the encoder in a T5Gemma 2 config.json: `vision_config` and
      what else belongs to images.
    tensors: where they lie.
    names: the name in a T5Gemma 2 folder -> the one in `tensors`.
  """

  folder: storage.Path
  fields: Mapping[str, Any]
  tensors: tensor_folder.TensorFolder
  names: Mapping[str, str]

  def planned(self) -> list[tensor_writer.PlannedTensor]:
    """Its tensors to be written, bit for bit, by their T5Gemma 2 names."""
    plans = []
    for name, stored in self.names.items():
      info = self.tensors.tensors[stored]
      make = functools.partial(self._read, stored)
      plans.append(
        tensor_writer.PlannedTensor(name, info.shape, info.dtype, make)
      )
    return plans

  def require_fits(self, model: config_lib.EncoderDecoderConfig) -> None:
    """Refuses a part that projects to another width than the encoder's.

    Raises:
      UserError: says both widths.
    """
    width = self.tensors.tensors[self.names[_START + _PROJECTION]].shape[1]
    if width != model.encoder.width:
      raise errors.UserError(
        f'the vision part of {self.folder} projects to width {width}, and the'
        f' encoder has width {model.encoder.width}. Give the folder of a model'
        ' of that width.'
      )

  def _read(self, name: str) -> np.ndarray:
    array = self.tensors.read(name)
    file = self.tensors.tensors[name].file
    tensor_folder.check_finite(name, array, file)
    return array


def open_vision(folder: str | os.PathLike[str]) -> Vision | None:
  """Finds the vision part of a folder; reads headers only.

  Args:
    folder: of a T5Gemma 2 or a multimodal Gemma 3, or what a work directory
      keeps of one.

  Returns:
    The part, None where the folder has none.

  Raises:
    UserError: it is incomplete, or contradicts its config.json.
  """
  folder = storage.at(folder)
  kept = folder / FOLDER
  weights = kept if kept.is_dir() else folder
  if not any(
    (weights / name).exists()
    for name in (tensor_folder.SINGLE, tensor_folder.INDEX)
  ):
    return None
  tensors = tensor_folder.TensorFolder.open(weights)
  found = {name: _NAME.search(name) for name in tensors.tensors}
  names = {match.group(1): name for name, match in found.items() if match}
  if not names:
    return None
  raw = files.read_json(folder / tensor_folder.CONFIG)
  if raw.get('model_type') != MODEL_TYPE:
    # Gemma 3 as transformers 4 wrote it.
    names = {
      name.replace(f'{_TOWER}vision_model.', _TOWER): stored
      for name, stored in names.items()
    }
  names = {_START + name: stored for name, stored in names.items()}
  part = Vision(folder, _fields(raw), tensors, names)
  _check(part)
  return part


def keep(part: Vision, folder: storage.Path) -> None:
  """Copies a part to where `open_vision(folder)` finds it.

  Args:
    part: the part.
    folder: has, or will have, the config.json of the part's folder.
  """
  with storage.staged(folder / FOLDER) as place:
    tensor_writer.write_tensors(place, part.planned())


def with_vision(raw: Mapping[str, Any], part: Vision) -> dict[str, Any]:
  """A T5Gemma 2 config.json that says what the vision part is.

  Args:
    raw: from `model_configs.raw_from_model`.
    part: the part that is written beside it.
  """
  encoder = {**raw['encoder'], **part.fields}
  top = {k: v for k, v in part.fields.items() if k == 'image_token_index'}
  return {**raw, **top, 'encoder': encoder}


def image_ids(raw: families.Raw) -> dict[str, int]:
  """Ids that frame an image in a T5Gemma 2; none for another model.

  Gemma 3's are other ones, above T5Gemma 2's vocabulary.

  Args:
    raw: a parsed config.json.
  """
  encoder = raw['encoder'] if raw.get('model_type') == MODEL_TYPE else {}
  return {key: encoder[key] for key in _IDS if key in encoder}


def _fields(raw: families.Raw) -> dict[str, Any]:
  where = raw['encoder'] if raw.get('model_type') == MODEL_TYPE else raw
  shape = {key: where[key] for key in _SHAPE_FIELDS if key in where}
  return shape | image_ids(raw)


def _check(part: Vision) -> None:
  """Compares tensors with the config: projector's widths, tower's layers."""
  shapes = {}
  for name in (_PROJECTION, _NORM):
    stored = part.names.get(_START + name)
    if stored is None:
      raise errors.UserError(
        f'{part.folder} has a vision part without a tensor {name!r}; it is'
        ' incomplete. Fetch it again.'
      )
    shapes[name] = part.tensors.tensors[stored].shape
  config = part.fields.get('vision_config') or {}
  width = config.get('hidden_size', shapes[_NORM][0])
  if shapes[_NORM] != (width,) or shapes[_PROJECTION][:-1] != (width,):
    raise errors.UserError(
      f'{_PROJECTION} in {part.folder} has shape {list(shapes[_PROJECTION])}'
      f' and {_NORM} {list(shapes[_NORM])}; vision_config.hidden_size in its'
      f' {tensor_folder.CONFIG} is {width}.'
    )
  layers = {
    int(found.group(1)) for found in map(_LAYER.search, part.names) if found
  }
  wanted = config.get('num_hidden_layers', len(layers))
  if layers != set(range(wanted)):
    raise errors.UserError(
      f'the vision tower in {part.folder} has {len(layers)} layers;'
      f' vision_config.num_hidden_layers in its {tensor_folder.CONFIG} is'
      f' {wanted}.'
    )
