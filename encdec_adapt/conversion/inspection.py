"""What a model on disk is, as text."""

from collections.abc import Iterator
import dataclasses

from encdec_adapt.cli import errors
from encdec_adapt.conversion import stored_model
from encdec_adapt.files import disk
from encdec_adapt.huggingface import config_json
from encdec_adapt.models import model_config, parameters


def describe(source: stored_model.StoredModel) -> str:
  """Kind, sizes, dtypes, step and config of a model.

  Args:
    source: reads nothing but what was read when it was opened.
  """
  return '\n'.join([*_head(source), *_sizes(source), *_config(source)])


def exported_as(model: model_config.ModelConfig) -> str:
  """The class of transformers for a model, or that there is none."""
  try:
    raw, _ = config_json.raw_from_model(model)
  except errors.UserError:
    return 'none; export writes the layout of this project'
  return raw['architectures'][0]


def kind_of(model: model_config.ModelConfig) -> str:
  """'encoder-decoder' or 'decoder-only'."""
  is_pair = isinstance(model, model_config.EncoderDecoderConfig)
  return 'encoder-decoder' if is_pair else 'decoder-only'


def _head(source: stored_model.StoredModel) -> Iterator[str]:
  if source.is_run:
    yield f'{source.path}: work directory, checkpoint of step {source.step}'
  else:
    yield f'{source.path}: Hugging Face folder'
  yield f'model: {kind_of(source.model)}'
  yield f'class in transformers: {exported_as(source.model)}'
  choice = source.vocabularies
  yield f'vocabulary: {choice.decoder if choice else "none beside it"}'
  if choice and choice.encoder:
    yield f"the encoder's vocabulary: {choice.encoder}"


def _sizes(source: stored_model.StoredModel) -> Iterator[str]:
  yield f'parameters: {parameters.count(source.model):,}'
  for name, part in parameters.count_by_stack(source.model).items():
    split = ', '.join(
      f'{getattr(part, field.name):,} {field.name}'
      for field in dataclasses.fields(part)
      if getattr(part, field.name)
    )
    yield f'  {name}: {part.total:,} ({split})'
  stored: dict[str, int] = {}
  for array in source.arrays():
    stored[str(array.dtype)] = stored.get(str(array.dtype), 0) + array.nbytes
  for dtype, nbytes in stored.items():
    yield f'stored in {dtype}: {disk.format_bytes(nbytes)}'
  reasons: dict[str, int] = {}
  for reason in source.unused.values():
    reasons[reason] = reasons.get(reason, 0) + 1
  for reason, count in reasons.items():
    yield f'{count} tensors unused: {reason}'


def _config(source: stored_model.StoredModel) -> Iterator[str]:
  stacks = source.model.stacks
  width = max(len(field.name) for field in _fields())
  yield f'{"config":<{width}}  ' + '  '.join(f'{n:<20}' for n in stacks)
  for field in _fields():
    values = [_text(getattr(stack, field.name)) for stack in stacks.values()]
    yield f'{field.name:<{width}}  ' + '  '.join(f'{v:<20}' for v in values)
  if isinstance(source.model, model_config.EncoderDecoderConfig):
    yield f'shared_table: {source.model.shared_table}'


def _fields() -> tuple[dataclasses.Field, ...]:
  return dataclasses.fields(model_config.StackConfig)


def _text(value: object) -> str:
  if isinstance(value, tuple):
    return ','.join(value)
  return 'none' if value is None else str(value)
