"""Losses: formulas, one module each, discovered automatically.

A loss is a frozen dataclass, a subclass of `loss.Loss`, whose `name` is a value
of `config.loss.kind`. Its keys (`keys.key`) are those of the section
`config.loss.NAME`, and shared ones (`shared=True`) of `config.loss`. To add a
loss over rows that another loss reads, write a module here with its class, and
nothing else in the package: the recipe of its base class trains with it.

- `references` names the frozen models that it reads;
- `predict` computes the states of a model, by default as its architecture
  reads the batch;
- `terms` computes sums over the batch, `loss` with the gradient among them;
- `metrics` names the divisor of each, and `divisors` computes these: by default
  the weights of the targets;
- `objective` combines terms of several divisors.

Terms are sums so that microbatches, hosts and rows of unequal weight add up to
a large batch: the step divides them by the weight of the whole batch.

Losses import `models`, `objectives` and `ops`, and no step, phase or optimizer.
"""

from collections.abc import Mapping
import sys
import textwrap
from typing import Any

from encdec_adapt.base import discovery, errors, keys
from encdec_adapt.training.losses import cross_entropy, loss

BY_NAME: Mapping[str, type[loss.Loss]] = {
  value.name: value
  for module in discovery.modules_of(sys.modules[__name__])
  for value in vars(module).values()
  if isinstance(value, type)
  and issubclass(value, loss.Loss)
  and hasattr(value, 'name')  # Bases have none.
  # A loss that extends another imports its module, not the class.
  and value.__module__ == module.__name__
}
DEFAULT = cross_entropy.CrossEntropy.name


def defaults() -> dict[str, Any]:
  """Returns the default values of `config.loss`, with a section for options."""
  shared: dict[str, Any] = {}
  sections: dict[str, dict[str, Any]] = {}
  for name, section in BY_NAME.items():
    values, names = keys.defaults(section), keys.shared(section)
    shared |= {key: values.pop(key) for key in names}
    sections |= {name: values} if values else {}
  return {'kind': DEFAULT, **shared, **sections}


def page(values: Mapping[str, Any], *, full: bool = True) -> list[str]:
  """Lists the keys of `config.loss`; see `keys.page`."""
  lines = textwrap.wrap(f'The loss: {", ".join(BY_NAME)}.', 76)
  lines = [f'# {line}' for line in lines]
  lines += [f'{loss.KIND} = {values["kind"]!r}']
  shared = {k: v for k, v in values.items() if not isinstance(v, Mapping)}
  for section in BY_NAME.values():
    lines += keys.page(section, shared, loss.SECTION)
    # Losses share these keys, which are listed once.
    for key in keys.shared(section):
      shared.pop(key, None)
  for name, section in BY_NAME.items():
    if full or name == values['kind']:
      options = values.get(name, {})
      lines += keys.page(section, options, f'{loss.SECTION}{name}.')
  return lines


def class_of(values: Mapping[str, Any]) -> type[loss.Loss]:
  """Returns the class of the loss that `config.loss` chooses.

  Args:
    values: value of every key of the section.

  Raises:
    UserError: there is no such loss, or a key is set that it does not read.
  """
  kind = values['kind']
  if kind not in BY_NAME:
    raise errors.UserError(
      f'{loss.KIND} is {kind!r}; it must be one of'
      f' {", ".join(BY_NAME)}{errors.nearest(kind, BY_NAME)}.'
    )
  chosen, standard = BY_NAME[kind], defaults()
  reason = f'{loss.KIND} is {kind!r}'
  read = {*keys.shared(chosen)}
  for name, section in BY_NAME.items():
    if name != kind and name in values:
      inner = f'{loss.SECTION}{name}.'
      keys.require_defaults(values[name], standard[name], inner, reason)
    unread = {k: standard[k] for k in keys.shared(section) if k not in read}
    keys.require_defaults(values, unread, loss.SECTION, reason)
  return chosen


def options(values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the value of every key of the loss that `config.loss` chooses."""
  return {**values, **values.get(values['kind'], {})}
