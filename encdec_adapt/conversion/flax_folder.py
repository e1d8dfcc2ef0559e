"""Model folders of Gemma 2 or T5Gemma as their authors' Flax code saves."""

import os

from encdec_adapt.checkpoints import orbax_folder
from encdec_adapt.conversion import stored_model
from encdec_adapt.files import atomic, paths
from encdec_adapt.huggingface import config_json, flax_layout
from encdec_adapt.models import model_config


def open_flax(
  path: str | os.PathLike[str],
  config: str | None,
  *,
  encoder_window: str | None = None,
  vocab_multiple: int | None = None,
) -> stored_model.StoredModel:
  """Opens a folder of Orbax arrays; reads names and shapes only.

  Args:
    path: the folder.
    config: path of a config.json of Gemma 2 or T5Gemma, which has windows,
      caps and scales. None for the released model of these shapes.
    encoder_window: see `stored_model.open_model`.
    vocab_multiple: see `stored_model.open_model`.

  Raises:
    UserError: it is damaged, it is not the configured model, or it has no
      such window.
  """
  path = paths.at(path)
  folder = orbax_folder.OrbaxFolder(path)
  if config is None:
    model = flax_layout.released_model(folder.arrays, str(path))
  else:
    raw = atomic.read_json(config)
    model = config_json.model_from_raw(raw, config)[0]
  model = stored_model.with_window(model, encoder_window, str(path))
  if vocab_multiple is not None:
    model = model_config.with_vocab_multiple(model, vocab_multiple)
  found = flax_layout.FlaxModel(folder.arrays, folder.read, model, str(path))
  return stored_model.StoredModel(
    path,
    model,
    stored_model.vocabularies_in(path),
    found.arrays,
    unused=found.unused,
  )
