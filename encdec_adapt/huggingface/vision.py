"""The vision part of a folder, which passes through untouched.

Our models read text. The vision tower and the projector of a T5Gemma 2
folder are kept as they are, with the files that say how an image becomes
pixels, so that what is exported reads images as before; those of a Gemma 3
folder are of the same make and can be given to a T5Gemma 2 that was adapted
from it.
"""

from collections.abc import Mapping
import dataclasses
import functools
import os
import re
from typing import Any

import numpy as np

from encdec_adapt.cli import errors
from encdec_adapt.files import atomic, paths
from encdec_adapt.huggingface import (
  families,
  siglip,
  tensor_folder,
  tensor_writer,
)
from encdec_adapt.models import model_config

# What transformers makes of an image before the tower reads it: in the first
# file, or in both (version 4), or in the second alone (version 5).
PROCESSORS = ('preprocessor_config.json', 'processor_config.json')
FOLDER = 'vision'  # Where a work directory keeps the part, in a folder.
MODEL_TYPE = 't5gemma2'  # The encoder-decoder that has one.
# What its names start with in a T5Gemma 2; others differ before these parts.
_START = 'model.encoder.'
_NAME = re.compile(r'(?:^|\.)((?:vision_tower|multi_modal_projector)\..+)$')
# What transformers initialises anew where a T5Gemma 2 folder has no part.
MISSING = (
  f'{_START}vision_tower.*',
  f'{_START}{siglip.PROJECTION}',
  f'{_START}{siglip.NORM}',
)
_SHAPE_FIELDS = ('vision_config', 'mm_tokens_per_image')
_IDS = ('boi_token_index', 'image_token_index')
_IMAGE_TOKEN = 256001  # Of a T5Gemma 2 whose config.json is silent.


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
    processors: files of `PROCESSORS` by name, as far as the folder has them.
  """

  folder: paths.Path
  fields: Mapping[str, Any]
  tensors: tensor_folder.TensorFolder
  names: Mapping[str, str]
  processors: Mapping[str, paths.Path]

  @property
  def image_token(self) -> int:
    """Id that a T5Gemma 2 with this part reads as a piece of an image."""
    return self.fields.get('image_token_index', _IMAGE_TOKEN)

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

  def require_fits(self, model: model_config.EncoderDecoderConfig) -> None:
    """Refuses a part that projects to another width than the encoder's.

    Raises:
      UserError: says both widths.
    """
    stored = self.names[_START + siglip.PROJECTION]
    width = self.tensors.tensors[stored].shape[1]
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
    UserError: it is incomplete, has a tensor or a shape that its config.json
      does not say, or a damaged file.
  """
  folder = paths.at(folder)
  kept = folder / FOLDER
  weights = kept if kept.is_dir() else folder
  if not any(
    (weights / name).exists()
    for name in (tensor_folder.SINGLE, tensor_folder.INDEX)
  ):
    return None
  tensors = tensor_folder.TensorFolder.open(weights)
  found = {
    name: match.group(1)
    for name in tensors.tensors
    if (match := _NAME.search(name))
  }
  if not found:
    return None
  raw = atomic.read_json(folder / tensor_folder.CONFIG)
  canonical = _matched(found, tensors, raw, folder)
  names = found  # What is exported again is spelled as it was.
  if raw.get('model_type') != MODEL_TYPE:
    names = canonical
  names = {_START + name: stored for stored, name in names.items()}
  return Vision(folder, _fields(raw), tensors, names, _processors(folder))


def keep(part: Vision, folder: paths.Path) -> None:
  """Copies a part, and its files, to where `open_vision(folder)` finds it.

  Args:
    part: the part.
    folder: has, or will have, the config.json of the part's folder.
  """
  with paths.staged(folder / FOLDER) as place:
    tensor_writer.write_tensors(place, part.planned())
  for name, path in part.processors.items():
    paths.copy(path, folder / name)


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
  if raw.get('model_type') != MODEL_TYPE:
    return {}
  # Where both state it, transformers takes the outer one.
  given = dict(_encoder(raw))
  if 'image_token_index' in raw:
    given['image_token_index'] = raw['image_token_index']
  return {key: given[key] for key in _IDS if key in given}


def _encoder(raw: families.Raw) -> families.Raw:
  """The object with `text_config`, `vision_config` and ids.

  Raises:
    UserError: a T5Gemma 2 has none.
  """
  if raw.get('model_type') != MODEL_TYPE:
    return raw
  if not isinstance(raw.get('encoder'), Mapping):
    raise errors.UserError(
      f'the config.json of a T5Gemma 2 has encoder = {raw.get("encoder")!r}; it'
      ' must be an object. Correct the file, or fetch it again.'
    )
  return raw['encoder']


def _fields(raw: families.Raw) -> dict[str, Any]:
  where = _encoder(raw)
  shape = {key: where[key] for key in _SHAPE_FIELDS if key in where}
  return shape | image_ids(raw)


def _processors(folder: paths.Path) -> dict[str, paths.Path]:
  """The files that say how an image becomes pixels; refuses damaged ones."""
  found = {name: folder / name for name in PROCESSORS}
  found = {name: path for name, path in found.items() if path.is_file()}
  for path in found.values():
    atomic.read_json(path)
  return found


def _matched(
  found: Mapping[str, str],
  tensors: tensor_folder.TensorFolder,
  raw: families.Raw,
  folder: paths.Path,
) -> dict[str, str]:
  """Compares every tensor with what the config.json says of the part.

  Args:
    found: name of a tensor -> the same from the part's name on.
    tensors: where they lie.
    raw: the parsed config.json.
    folder: that of the config.json.

  Returns:
    Name of a tensor -> its name in `siglip.shapes`.

  Raises:
    UserError: one is missing, comes twice, is of another shape or is none of
      a vision part; names it, and its file.
  """
  file = str(folder / tensor_folder.CONFIG)
  wanted = _wanted(_encoder(raw), file)
  canonical: dict[str, str] = {}
  for stored, name in found.items():
    name, info = siglip.canonical(name), tensors.tensors[stored]
    if name not in wanted or name in canonical.values():
      raise errors.UserError(
        f'{stored} in {info.file} is no tensor of the vision part that {file}'
        ' describes, or is there twice. Nothing is dropped silently: remove'
        ' it, or correct the vision_config.'
      )
    if tuple(info.shape) != wanted[name]:
      raise errors.UserError(
        f'{stored} in {info.file} has shape {list(info.shape)}; by'
        f' vision_config and text_config in {file} it is'
        f' {list(wanted[name])}. Fetch the folder again, or correct them.'
      )
    canonical[stored] = name
  missing = [name for name in wanted if name not in canonical.values()]
  if missing:
    raise errors.UserError(
      f'{folder} has a vision part without a tensor {missing[0]!r}'
      + (f' (and {len(missing) - 1} more)' if len(missing) > 1 else '')
      + f', which vision_config in {file} asks for. Fetch the folder again, or'
      ' correct the config.'
    )
  return canonical


def _wanted(encoder: families.Raw, file: str) -> siglip.Shapes:
  """Every tensor that a config.json says of its vision part."""
  parts = {}
  for key in ('text_config', 'vision_config'):
    parts[key] = {} if encoder.get(key) is None else encoder[key]
    if not isinstance(parts[key], Mapping):
      raise errors.UserError(
        f'{file} has {key} = {parts[key]!r}; it must be an object.'
      )
  text = {**families.FAMILIES['gemma3_text'].defaults, **parts['text_config']}
  return siglip.shapes(parts['vision_config'], text['hidden_size'], file)
