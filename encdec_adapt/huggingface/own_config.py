"""config.json of our own layout, for models that transformers has no class for.

`model_type` is 'encdec_adapt'; `kind` is 'decoder_only' or 'encoder_decoder';
every stack is an object with all fields of `models.model_config.StackConfig`.
The tensors of the folder have the layout `weights.OWN`.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

from encdec_adapt.cli import errors
from encdec_adapt.models import model_config

MODEL_TYPE = 'encdec_adapt'
_VERSION = 1
_KINDS = {
  'decoder_only': model_config.DecoderOnlyConfig,
  'encoder_decoder': model_config.EncoderDecoderConfig,
}


def raw_from_model(config: model_config.ModelConfig) -> dict[str, Any]:
  """Returns the content of config.json for a model."""
  kind = next(k for k, made in _KINDS.items() if isinstance(config, made))
  return {
    'model_type': MODEL_TYPE,
    'format_version': _VERSION,
    'kind': kind,
    **dataclasses.asdict(config),
  }


def model_from_raw(
  raw: Mapping[str, Any], file: str
) -> model_config.ModelConfig:
  """Returns the model that a config.json describes.

  Args:
    raw: parsed file; other keys, such as token ids, are ignored.
    file: name of the file, for error messages.

  Raises:
    UserError: another version, or a field that is missing, unknown or has a
      value that no model has.
  """
  if raw.get('format_version') != _VERSION or raw.get('kind') not in _KINDS:
    raise errors.UserError(
      f'{file} has format_version = {raw.get("format_version")!r} and kind ='
      f' {raw.get("kind")!r}; they must be {_VERSION} and one of'
      f' {", ".join(_KINDS)}.'
    )
  kind = _KINDS[raw['kind']]
  try:
    fields = {field.name: raw[field.name] for field in dataclasses.fields(kind)}
    for field in dataclasses.fields(kind):
      if field.type is model_config.StackConfig:
        fields[field.name] = _stack(raw[field.name])
    return kind(**fields)
  except KeyError as error:
    raise errors.UserError(f'{file} has no field {error}.') from error
  except (errors.UserError, TypeError) as error:
    raise errors.UserError(f'{file}: {error}') from error


def _stack(raw: Mapping[str, Any]) -> model_config.StackConfig:
  known = {field.name for field in dataclasses.fields(model_config.StackConfig)}
  if not isinstance(raw, Mapping) or raw.keys() != known:
    wrong = ', '.join(sorted(known ^ set(raw)))
    raise TypeError(f'these fields of a stack are missing or unknown: {wrong}')
  return model_config.StackConfig(**{**raw, 'pattern': tuple(raw['pattern'])})
