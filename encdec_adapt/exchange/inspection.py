"""Describes a model on disk as text, from its config and headers.

`model_card` describes an exported folder in prose. No parameters are read here.
"""

from collections import Counter
from collections.abc import Iterator
import dataclasses

from flax import traverse_util

from encdec_adapt.base import errors
from encdec_adapt.files import disk, paths
from encdec_adapt.huggingface import config_json, torch_export
from encdec_adapt.models import parameters
from encdec_adapt.stored import model_on_disk, pretrained_files


def describe(stored: model_on_disk.StoredModel) -> str:
  """Returns kind, sizes, dtypes, step and config of a model as text."""
  return '\n'.join([*_head(stored), *_sizes(stored), *_config(stored)])


def transformers_class(stored: model_on_disk.StoredModel) -> str | None:
  """Returns the name of a model's class in transformers, or None."""
  # Try to write the config.json: only that code knows a family's limits.
  try:
    raw, _ = config_json.raw_from_model(stored.model)
  except errors.UserError:
    return None
  # The source distinguishes equal classes such as T5's and mT5's.
  sources = pretrained_files.folders(stored.path)
  raw = config_json.with_fields(raw, pretrained_files.config_fields(sources))
  return raw['architectures'][0]


def require_exported(stored: model_on_disk.StoredModel) -> None:
  """Checks that a model is an exported folder on this machine."""
  if stored.checkpoint or paths.is_bucket(stored.path):
    raise errors.UserError(
      f'{stored.path} is not an exported folder on this machine; give the'
      f' --output of `convert export --checkpoint={stored.path}`.'
    )


def _head(stored: model_on_disk.StoredModel) -> Iterator[str]:
  kind = 'Hugging Face folder'
  if stored.step is not None:
    kind = f'work directory, checkpoint of step {stored.step}'
  yield f'{stored.path}: {kind}'
  yield f'model: {stored.model.architecture.name}'
  if stored.adapters:
    yield f'adapters: {stored.adapters.options} over {stored.base.full_name}'
  name = transformers_class(stored)
  if name is None:
    name = 'none; export writes the layout of this project'
    if not torch_export.problem(stored.model):
      name += ', with code that transformers runs'
  yield f'class in transformers: {name}'
  choice = stored.vocabularies
  yield f'vocabulary: {choice.decoder if choice else "none"}'
  if choice and choice.encoder:
    yield f"the encoder's vocabulary: {choice.encoder}"


def _sizes(stored: model_on_disk.StoredModel) -> Iterator[str]:
  yield f'parameters: {parameters.count(stored.model):,}'
  for name, part in parameters.count_by_stack(stored.model).items():
    split = ', '.join(
      f'{getattr(part, field.name):,} {field.name}'
      for field in dataclasses.fields(part)
      if getattr(part, field.name)
    )
    yield f'  {name}: {part.total:,} ({split})'
  sizes = Counter()
  # Stored dtypes, possibly mixed and other than the dtype after reading.
  for array in stored.arrays().values():
    sizes[str(array.dtype)] += array.nbytes
  for dtype, nbytes in sizes.items():
    yield f'stored in {dtype}: {disk.format_bytes(nbytes)}'
  # Group by reason: a vision tower has hundreds of tensors.
  for reason, count in Counter(stored.unused.values()).items():
    yield f'{count} tensors unused: {reason}'


def _config(stored: model_on_disk.StoredModel) -> Iterator[str]:
  stacks = stored.model.stacks
  rows = [('config', *stacks)]
  fields = [
    traverse_util.flatten_dict(dataclasses.asdict(stack), sep='.')
    for stack in stacks.values()
  ]
  for name in dict.fromkeys(x for values in fields for x in values):
    rows.append((name, *(_text(values.get(name)) for values in fields)))
  for field in dataclasses.fields(stored.model):
    # Stacks are listed above; the other fields are the pair's.
    if field.name not in stacks:
      rows.append((field.name, str(getattr(stored.model, field.name))))
  width = max(len(row[0]) for row in rows)
  for name, *values in rows:
    yield f'{name:<{width}}  ' + '  '.join(f'{v:<20}' for v in values)


def _text(value: object) -> str:
  if isinstance(value, tuple):
    return ','.join(value)
  return 'none' if value is None else str(value)
