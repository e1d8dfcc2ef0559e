"""config.json of our own layout, for models that transformers has no class for.

`model_type` is 'encdec_adapt'; `kind` is 'decoder_only' or 'encoder_decoder';
every stack is an object with the fields of `models.model_config.StackConfig`,
all of them. The tensors beside it: `weights.OWN`.
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
  """The object that says all of a model."""
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
  """The model that such an object describes.

  Args:
    raw: the parsed file; keys of other meaning, such as token ids, are let be.
    file: what errors call it.

  Raises:
    UserError: another version, or a field that is missing, unknown or of a
      value that no model has.
  """
  if raw.get('format_version') != _VERSION:
    raise errors.UserError(
      f'{file} has format_version {raw.get("format_version")!r}; this version'
      f' of the software reads {_VERSION}.'
    )
  if raw.get('kind') not in _KINDS:
    raise errors.UserError(
      f'{file} has kind {raw.get("kind")!r}; it is one of {", ".join(_KINDS)}.'
    )
  kind = _KINDS[raw['kind']]
  fields = {}
  for field in dataclasses.fields(kind):
    if field.name not in raw:
      raise errors.UserError(f'{file} has no {field.name!r}; it is damaged.')
    value = raw[field.name]
    is_stack = field.type is model_config.StackConfig
    fields[field.name] = (
      _stack(value, f'{field.name} of {file}') if is_stack else value
    )
  try:
    return kind(**fields)
  except errors.UserError as error:
    raise errors.UserError(f'{file}: {error}') from error


def _stack(raw: Mapping[str, Any], where: str) -> model_config.StackConfig:
  known = {field.name for field in dataclasses.fields(model_config.StackConfig)}
  if not isinstance(raw, Mapping) or raw.keys() != known:
    wrong = sorted(known ^ set(raw))
    raise errors.UserError(
      f'{where} has not exactly the fields of a stack: {", ".join(wrong)} on'
      ' one side only.'
    )
  try:
    return model_config.StackConfig(**{**raw, 'pattern': tuple(raw['pattern'])})
  except (errors.UserError, TypeError) as error:
    raise errors.UserError(f'{where}: {error}') from error
