"""Losses: formulas, one module each, discovered automatically.

A loss is a frozen dataclass, a subclass of `loss.Loss`; its `name` is a value
of `config.loss.kind`. Its keys (`keys.key`) form the section
`config.loss.NAME`; shared keys (`shared=True`) are in `config.loss`. To add a
loss over existing rows, write one module here with its class; the recipe of
its base class trains with it.

- `references` names the frozen models it reads;
- `predict` computes the hidden states of a model, by default with its
  architecture;
- `terms` computes sums over the batch, including `loss`, which is
  differentiated;
- `metrics` names the divisor of each term, and `divisors` computes them: by
  default the total weight of the targets;
- `objective` combines terms with different divisors.

Terms are sums so that microbatches, hosts and rows of unequal weight add up to
a large batch: the step divides them by the weight of the whole batch.

Losses import `models`, `objectives` and `ops`, but no step, phase or optimizer.
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
  """Returns the defaults of `config.loss`, with one section per loss."""
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
    # List keys shared by several losses once.
    for key in keys.shared(section):
      shared.pop(key, None)
  for name, section in BY_NAME.items():
    if full or name == values['kind']:
      options = values.get(name, {})
      lines += keys.page(section, options, f'{loss.SECTION}{name}.')
  return lines


def class_of(values: Mapping[str, Any]) -> type[loss.Loss]:
  """Returns the class of the loss selected by `config.loss`.

  Args:
    values: value of every key of the section.

  Raises:
    UserError: the loss does not exist, or does not read a key that is set.
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
  """Returns the value of every key of the loss selected by `config.loss`."""
  return {**values, **values.get(values['kind'], {})}
