"""Writes a model as a Hugging Face folder.

Supports the layouts of transformers and our native layout (`weights.NATIVE`).
"""

from collections.abc import Callable, Mapping
import functools
import os
from typing import Any

import numpy as np

from encdec_adapt.files import atomic, lazy_array, paths
from encdec_adapt.huggingface import (
  config_json,
  new_folder,
  tensor_folder,
  tensor_writer,
  torch_export,
  transposed_copy,
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
  native: bool = False,
  dtype: np.dtype | None = None,
  fields: Mapping[str, Mapping[str, Any]] | None = None,
  common_fields: Mapping[str, Any] | None = None,
  files: Mapping[str, paths.Path | bytes] | None = None,
  vision: vision_lib.Vision | None = None,
  on_progress: Callable[[int, int], None] = lambda nbytes, total: None,
) -> paths.Path:
  """Writes config.json, safetensors and further files atomically.

  Args:
    folder: absent or empty folder; may be in a bucket.
    config: model config; must have a transformers class unless `native`.
    params: parameter path -> array, or an array-like that NumPy converts after
      indexing. Parameters are fetched one at a time.
    native: whether to write our native layout, which supports every model.
    dtype: dtype of the tensors; None keeps the parameter dtypes.
    fields: further fields of config.json by stack, such as token ids; see
      `config_json.carried_fields`.
    common_fields: further fields of config.json of no stack: the framing of
      prompts, the names of labels.
    files: further files, name in the folder -> file to copy, or content.
    vision: vision part of a T5Gemma 2, written in its stored dtype.
    on_progress: called with the bytes written and in total.

  Returns:
    The folder.

  Raises:
    UserError: transformers has no class for the model, a parameter is not
      finite (in `dtype`), or the folder cannot be written.
  """
  if native:
    raw, layout = config_json.native_from_model(config), weights.NATIVE
  else:
    raw, layout = config_json.raw_from_model(config)
  raw = config_json.with_fields(raw, fields or {}) | dict(common_fields or {})
  plans = _plan(config, layout, params, dtype)
  # Without the vision part, which keeps its stored dtypes.
  common = folder_lib.common_dtype(plan.dtype for plan in plans.values())
  files = dict(files or {})
  if native and not torch_export.problem(config):
    files |= torch_export.files()
  if vision is not None:
    raw = vision_lib.with_vision(raw, vision)
    plans |= vision.arrays(layout.stacks.get('encoder', ''))
    files = {**vision.processors, **files}
  raw |= {'dtype': str(common)}
  files[tensor_folder.CONFIG] = atomic.json_bytes(raw)
  folder = paths.at(folder)
  with new_folder.new_folder(folder) as draft:
    for name, file in files.items():
      (draft / name).parent.mkdir(exist_ok=True)
      if isinstance(file, bytes):
        (draft / name).write_bytes(file)
      else:
        paths.copy(file, draft / name)
    bucket = folder if paths.is_bucket(folder) else None
    tensor_writer.write_tensors(
      draft, plans, bucket=bucket, on_progress=on_progress
    )
  return folder


def _plan(
  config: model_config.ModelConfig,
  layout: weights.Layout,
  params: Mapping[str, Any],
  dtype: np.dtype | None,
) -> dict[str, lazy_array.LazyArray]:
  leaves = layer_leaves.leaves_of(config)

  def dtype_of(weight: weights.Weight) -> np.dtype:
    return np.dtype(dtype or params[leaves[weight.leaf].path].dtype)

  def make(weight: weights.Weight) -> np.ndarray:
    leaf, tensor_dtype = leaves[weight.leaf], dtype_of(weight)
    stored = params[leaf.path]
    # Fetches only this layer and expert of a stacked parameter.
    index = tuple(i for i in (leaf.index, weight.part) if i is not None)
    ours = np.asarray(stored[index] if index else stored)
    with np.errstate(over='ignore'):  # check_finite names the value.
      tensor = weight.to_theirs(ours).astype(tensor_dtype, copy=False)
    # Reordered first: the check would copy a transposed array more slowly.
    tensor = transposed_copy.in_order(tensor)
    tensor_folder.check_finite(
      weight.leaf, tensor, f'the {tensor_dtype} form of the parameters'
    )
    return tensor

  def plan(name: str, parts: list[weights.Weight]) -> lazy_array.LazyArray:
    shape = layout.shape_of(name, parts)

    def make_all() -> np.ndarray:
      if name == parts[0].name:
        return make(parts[0])
      tensor = np.empty(shape, dtype_of(parts[0]))
      pieces = layout.pieces(name, shape)
      for weight in parts:
        tensor[pieces[weight.name]] = make(weight)
      return tensor

    return lazy_array.LazyArray.in_full(shape, dtype_of(parts[0]), make_all)

  # By path: `params` may stack layers in one array, and a checkpoint caches
  # only the last array read. Another order would read it once per layer.
  order = sorted(
    weights.weights(config, layout).values(),
    key=lambda weight: leaves[weight.leaf].path,
  )
  tensors: dict[str, list[weights.Weight]] = {}
  for weight in order:
    tensors.setdefault(layout.written(weight.name), []).append(weight)
  plans = {name: plan(name, parts) for name, parts in tensors.items()}
  if layout.fixed_bias and layout.fixed_bias not in plans:
    shape = 1, config.decoder.vocab_size
    dtype_of_all = folder_lib.common_dtype(x.dtype for x in plans.values())
    plans[layout.fixed_bias] = lazy_array.LazyArray.in_full(
      shape, dtype_of_all, functools.partial(np.zeros, shape, dtype_of_all)
    )
  return plans
