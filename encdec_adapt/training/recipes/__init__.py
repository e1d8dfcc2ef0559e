"""Recipes: one module for each kind of training, discovered automatically.

A recipe says in one place which rows a kind of training reads, where its
batches come from (records, or completions with rewards), the head of its model,
which frozen models it reads, its loss and its held-out metrics. It has no loop
over steps or rows: that is `train`'s. To add a kind of training, write a module
here with its class, a subclass of `recipe.Recipe`:

- `losses` is the base class of its losses (`training.losses`), whose names in
  `config.loss.kind` choose it;
- `of` makes it of the sections of a configuration, with all checks that need no
  file;
- `metrics` are its held-out metrics (`training.metrics`), one of which
  `keep_best` and `patience` follow.

Recipes lie below `config`, and import nothing that opens a model or records.
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
  """Returns the class of the recipe that trains with a loss."""
  return next(BY_LOSS[base] for base in loss.__mro__ if base in BY_LOSS)
