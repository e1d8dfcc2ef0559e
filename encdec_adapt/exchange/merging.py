"""`convert merge`: models of the same shape -> a work directory at step 0.

Averages models, or adds their task vectors (differences from the model they
were trained from) to that model.

The work directory is written atomically (`work_directory`).
"""

from collections.abc import Mapping, Sequence
import functools
import math

from absl import flags
import numpy as np

from encdec_adapt.base import errors, option_strings
from encdec_adapt.checkpoints import step_folders
from encdec_adapt.cli import command
from encdec_adapt.files import lazy_array
from encdec_adapt.huggingface import new_folder
from encdec_adapt.models import model_config
from encdec_adapt.stored import (
  model_on_disk,
  pretrained_files,
  source_vocabularies,
  work_directory,
)

_Stored = model_on_disk.StoredModel


def merge_models(values: flags.FlagValues, operands: list[str]) -> int:
  """Runs `convert merge`.

  Raises:
    UserError: the output exists, a run lacks the steps, the models differ in
      shape or vocabulary, or the weights do not match them.
  """
  command.require(values, 'output')
  new_folder.require_free(values.output)
  if values.last:
    operands = [step for run in operands for step in _last(run, values.last)]
  weights = _weights(values, operands)
  sources = [*operands, values.start] if values.start else operands
  first = model_on_disk.open_model(sources[0])
  # Folders are padded like the first model; runs keep their padding.
  multiple = first.model.decoder.vocab_multiple
  models = [first] + [
    model_on_disk.open_model(path, vocab_multiple=multiple)
    for path in sources[1:]
  ]
  for model in models[1:]:
    _require_same_model(first, model)
  made_by = {'command': 'merge', 'sources': sources, 'weights': weights}
  if values.start:
    made_by['start'] = values.start
  contents = work_directory.Contents(
    first.model,
    made_by,
    pretrained_files.folders(first.path),
    first.vocabularies,
    run=first.run,
    framing=first.framing,
  )
  if values.start:
    # Start plus weighted task vectors is a weighted average; the start has the
    # remaining weight.
    weights = [*weights, 1 - sum(weights)]
  merged = _merged(models, weights)
  work_directory.write(values.output, contents, merged, verb='averaged')
  return 0


def _last(run: str, count: int) -> list[str]:
  steps = step_folders.steps(step_folders.locate(run))
  if len(steps) < count:
    raise errors.UserError(
      f'--last={count}, and {run} has checkpoints of the steps'
      f' {", ".join(map(str, steps)) or "none"}; give the work directory of a'
      ' run that kept more (config.checkpoint.keep and .keep_every).'
    )
  return [f'{run}@{step}' for step in steps[-count:]]


def _weights(values: flags.FlagValues, operands: Sequence[str]) -> list[float]:
  """Parses --weights; the default is equal weights.

  Raises:
    UserError: the number of weights differs from that of models, or their sum
      without --start is not 1.
  """
  count = len(operands)
  if count < 2 and not values.start:
    raise errors.UserError(
      f'merge of {operands[0]} alone; give another model, --last=N for the last'
      ' N steps of the run, or --start to interpolate towards that model.'
    )
  if not values.weights:
    return [1 / count] * count
  string = option_strings.Part('--weights', values.weights)
  weights = [part.read(float, 'a number') for part in string.divide(',')]
  total, form = sum(weights), ''
  # Both comparisons are False for nan.
  if values.start:
    right = math.isfinite(total)
  else:  # The tolerance allows for rounded thirds.
    right, form = abs(total - 1) < 1e-6, ', that sum to 1'
  if len(weights) != count or not right:
    raise string.error(
      f'must be {count} numbers, one for each model{form}, separated by commas'
    )
  return weights


def _require_same_model(first: _Stored, model: _Stored) -> None:
  differences = model_config.differences(first.model, model.model)
  # `differences` ignores padding, but arrays of one shape are needed here.
  if not differences and model.model != first.model:
    differences = ['their tables are padded to other multiples']
  if differences:
    raise errors.UserError(
      f'{first.path} and {model.path} differ in shape:'
      f' {"; ".join(differences)}. Only models of one config can be merged;'
      ' `convert adapt` makes pairs of decoders.'
    )
  # The tokens of a model without a tokenizer are unknown.
  if first.vocabularies and model.vocabularies:
    for side in first.model.stacks:
      path = first.vocabularies.path(side)
      source_vocabularies.require_same_tokens(
        model, side, path, str(first.path)
      )


def _merged(
  models: Sequence[_Stored], weights: Sequence[float]
) -> dict[str, lazy_array.LazyArray]:
  """Returns the merged parameters, computed lazily."""
  sources: list[Mapping[str, lazy_array.LazyArray]]
  sources = [model.arrays() for model in models]

  def read(path: str, index: tuple[slice, ...]) -> np.ndarray:
    # In float32 for all sources: a bfloat16 sum would lose bits.
    return sum(
      np.float32(weight) * np.asarray(arrays[path].read_part(index), np.float32)
      for weight, arrays in zip(weights, sources, strict=True)
    )

  return {
    path: lazy_array.LazyArray(
      array.shape, np.dtype(np.float32), functools.partial(read, path)
    )
    for path, array in sources[0].items()
  }
