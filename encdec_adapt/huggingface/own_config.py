"""config.json of our own layout, for models that transformers has no class for.

`model_type` is 'encdec_adapt', and `model` has the keys of `config.model`
(`models.model_section`). The tensors of the folder have the layout
`weights.OWN`.
"""

from collections.abc import Mapping
from typing import Any

from encdec_adapt.cli import errors
from encdec_adapt.models import model_config, model_section

MODEL_TYPE = 'encdec_adapt'


def raw_from_model(config: model_config.ModelConfig) -> dict[str, Any]:
  """Returns the content of config.json for a model."""
  section = model_section.section_from_model(config)
  return {'model_type': MODEL_TYPE, 'model': section}


def model_from_raw(
  raw: Mapping[str, Any], file: str
) -> model_config.ModelConfig:
  """Returns the model that a config.json describes.

  Args:
    raw: parsed file; other keys, such as token ids, are ignored.
    file: name of the file, for error messages.

  Raises:
    UserError: a key is missing, unknown (written by another version) or has a
      value that no model has.
  """
  try:
    return model_section.model_from_section(raw['model'])
  except errors.UserError as error:
    raise errors.UserError(f'{file}: {error}') from error
  except (KeyError, TypeError, AttributeError) as error:
    raise errors.UserError(
      f"{file} has no valid object 'model' ({type(error).__name__}: {error})."
      ' Export the model again, or download the file again.'
    ) from error
