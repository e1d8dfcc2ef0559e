"""A model of ours as a Hugging Face folder, written tensor by tensor."""

from collections.abc import Callable, Mapping, Sequence
import json
import os
import pathlib
import shutil
from typing import Any

import numpy as np

from encdec_adapt.interop import (
  folder as folder_lib,
)
from encdec_adapt.interop import (
  model_configs,
  new_folder,
  tensor_writer,
  weights,
)
from encdec_adapt.models import config as config_lib
from encdec_adapt.models import leaves as leaves_lib


def write(
  folder: str | os.PathLike[str],
  config: config_lib.ModelConfig,
  params: Mapping[str, Any],
  *,
  dtype: np.dtype | None = None,
  fields: Mapping[str, Any] | None = None,
  carried: Sequence[pathlib.Path] = (),
  shard_bytes: int = tensor_writer.SHARD_BYTES,
  on_progress: Callable[[int, int], None] | None = None,
) -> pathlib.Path:
  """Writes config.json and safetensors, whole or not at all.

  Args:
    folder: must not exist, or be empty.
    config: a model that transformers has a class for.
    params: our path -> array; anything that can be indexed and is then
      taken by numpy. Only one leaf at a time is fetched.
    dtype: of the tensors; None for each parameter's own.
    fields: further fields of config.json, such as token ids.
    carried: files to copy beside it, such as the tokenizer's.
    shard_bytes: size at which a new file begins.
    on_progress: called with the bytes written and those to write.

  Returns:
    The folder.

  Raises:
    UserError: transformers has no class for the model, or the folder cannot
      be written.
  """
  raw, layout = model_configs.raw_from_model(config)
  folder = pathlib.Path(folder)
  leaves = leaves_lib.leaves_of(config)

  def plan(weight: weights.Weight) -> tensor_writer.PlannedTensor:
    leaf = leaves[weight.leaf]
    stored = params[leaf.path]
    kind = np.dtype(dtype or stored.dtype)

    def make() -> np.ndarray:
      ours = stored if leaf.index is None else stored[leaf.index]
      return weight.to_theirs(np.asarray(ours)).astype(kind, copy=False)

    return tensor_writer.PlannedTensor(
      weight.name, weight.their_shape, kind, make
    )

  # By stored array, so that each is walked once.
  order = sorted(
    weights.weights(config, layout).values(),
    key=lambda weight: leaves[weight.leaf].path,
  )
  with new_folder.new_folder(folder) as draft:
    names = sorted({str(np.dtype(dtype or a.dtype)) for a in params.values()})
    text = {**raw, **(fields or {}), 'dtype': names[0]}
    (draft / folder_lib.CONFIG).write_text(json.dumps(text, indent=2) + '\n')
    for path in carried:
      shutil.copyfile(path, draft / path.name)
    tensor_writer.write_tensors(
      draft,
      [plan(weight) for weight in order],
      shard_bytes=shard_bytes,
      on_progress=on_progress,
    )
  return folder
