"""Recipes: one module per kind of training, discovered automatically.

A recipe declares the rows of a kind of training, the source of its batches
(records, or completions with rewards), the head of its model, its frozen
models, its loss and its held-out metrics. The loop over steps is in `train`. To
add a kind of training, write a module here with a subclass of `recipe.Recipe`:

- `losses` is the base class of its losses (`training.losses`); their names in
  `config.loss.kind` select the recipe;
- `of` makes it from the sections of a configuration, with all checks that need
  no file;
- `metrics` are its held-out metrics (`training.metrics`), including the metric
  of `keep_best` and `patience`.

Recipes do not import `config`, nor anything that opens a model or records.
"""

from collections.abc import Mapping
import sys

from encdec_adapt.base import discovery
from encdec_adapt.training.losses import loss as loss_lib
from encdec_adapt.training.recipes import recipe

BY_LOSS: Mapping[type[loss_lib.Loss], type[recipe.Recipe]] = {
  value.losses: value
  for module in discovery.modules_of(sys.modules[__name__])
  for value in vars(module).values()
  if isinstance(value, type)
  and issubclass(value, recipe.Recipe)
  and hasattr(value, 'losses')
  and value.__module__ == module.__name__
}


def class_of(loss: type[loss_lib.Loss]) -> type[recipe.Recipe]:
  """Returns the recipe class of a loss."""
  return next(BY_LOSS[base] for base in loss.__mro__ if base in BY_LOSS)
