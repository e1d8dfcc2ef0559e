"""A model of ours as a folder of safetensors, written tensor by tensor.

In the layout that transformers loads, or in our own (`weights.OWN`).
"""

from collections.abc import Callable, Mapping
import json
import os
from typing import Any

import numpy as np

from encdec_adapt.files import paths
from encdec_adapt.huggingface import (
  config_json,
  new_folder,
  own_config,
  tensor_folder,
  tensor_writer,
  transposing,
  weights,
)
from encdec_adapt.huggingface import folder as folder_lib
from encdec_adapt.huggingface import vision as vision_lib
from encdec_adapt.models import layer_leaves, model_config


def write(
  folder: str | os.PathLike[str],
  config: model_config.ModelConfig,
  params: Mapping[str, Any],
  *,
  own: bool = False,
  dtype: np.dtype | None = None,
  fields: Mapping[str, Mapping[str, Any]] | None = None,
  texts: Mapping[str, str] | None = None,
  carried: Mapping[str, paths.Path | bytes] | None = None,
  vision: vision_lib.Vision | None = None,
  shard_bytes: int = tensor_writer.SHARD_BYTES,
  on_progress: Callable[[int, int], None] | None = None,
) -> paths.Path:
  """Writes config.json and safetensors, whole or not at all.

  Args:
    folder: must not exist, or be empty.
    config: a model that transformers has a class for, unless `own`.
    params: our path -> array; anything that can be indexed and is then
      taken by numpy. Only one leaf at a time is fetched.
    own: write our own layout, which is for every model.
    dtype: of the tensors; None for each parameter's own.
    fields: further fields of config.json by stack, such as token ids; see
      `model_configs.carried_fields`.
    texts: further files, name -> text.
    carried: further files, name -> the file to copy, or its content, such as
      the tokenizer's. A name may lie in a folder.
    vision: the vision part of a T5Gemma 2, in its own dtype, and its files;
      None for none.
    shard_bytes: size at which a new file begins.
    on_progress: called with the bytes written and those to write.

  Returns:
    The folder.

  Raises:
    UserError: transformers has no class for the model, a parameter is not
      finite (in `dtype`), or the folder cannot be written.
  """
  if own:
    raw, layout = own_config.raw_from_model(config), weights.OWN
  else:
    raw, layout = config_json.raw_from_model(config)
  raw = config_json.with_fields(raw, fields or {})
  if vision is not None:
    raw = vision_lib.with_vision(raw, vision)
  folder = paths.at(folder)
  plans = _plan(config, layout, params, dtype)
  with new_folder.new_folder(folder) as draft:
    common = folder_lib.common_dtype(plan.dtype for plan in plans)
    text = {**raw, 'dtype': str(common)}
    (draft / tensor_folder.CONFIG).write_text(json.dumps(text, indent=2) + '\n')
    processors = vision.processors if vision else {}
    for name, file in {**(carried or {}), **processors}.items():
      (draft / name).parent.mkdir(exist_ok=True)
      if isinstance(file, bytes):
        (draft / name).write_bytes(file)
      else:
        paths.copy(file, draft / name)
    for name, content in (texts or {}).items():
      (draft / name).write_text(content, encoding='utf-8')
    if vision is not None:
      plans += vision.planned()
    tensor_writer.write_tensors(
      draft, plans, shard_bytes=shard_bytes, on_progress=on_progress
    )
  return folder


def _plan(
  config: model_config.ModelConfig,
  layout: weights.Layout,
  params: Mapping[str, Any],
  dtype: np.dtype | None,
) -> list[tensor_writer.PlannedTensor]:
  """Every tensor, those of one stored array after another."""
  leaves = layer_leaves.leaves_of(config)

  def plan(weight: weights.Weight) -> tensor_writer.PlannedTensor:
    leaf = leaves[weight.leaf]
    stored = params[leaf.path]
    kind = np.dtype(dtype or stored.dtype)
    place = tuple(i for i in (leaf.index, weight.part) if i is not None)

    def make() -> np.ndarray:
      ours = stored[place] if place else stored
      return weight.to_theirs(np.asarray(ours))

    def finish(theirs: np.ndarray) -> np.ndarray:
      with np.errstate(over='ignore'):  # It is looked for below.
        made = theirs.astype(kind, copy=False)
      made = transposing.in_order(made)
      tensor_folder.check_finite(
        weight.leaf, made, f'the {kind} form of the parameters'
      )
      return made

    return tensor_writer.PlannedTensor(
      weight.name, weight.their_shape, kind, make, finish
    )

  order = sorted(
    weights.weights(config, layout).values(),
    key=lambda weight: leaves[weight.leaf].path,
  )
  return [plan(weight) for weight in order]
