"""Configuration keys, each defined once as a field of a frozen dataclass.

A section of the configuration is a frozen dataclass. Its fields are declared
with `key` (default, documentation, bounds) or with `section` (a nested
section). A section is defined next to its user; `encdec_adapt.config` assembles
all sections.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import math
import operator
import textwrap
from typing import Any

from encdec_adapt.base import errors, intervals

_META = 'config_key'


@dataclasses.dataclass(frozen=True)
class Key:
  """Documentation and bounds of a configuration key.

  Attributes:
    doc: a sentence or two for the annotated page.
    at_least: lowest allowed value, or None.
    above: value that must be exceeded, or None.
    at_most: highest allowed value, or None.
    below: value that must not be reached, or None.
    one_of: allowed values, or None for any.
    name: name of the key, if different from the field's.
    none: value for None in a configuration, as values there cannot change their
      type; None if the field cannot be None.
    interval: whether the value is an interval of steps (`base.intervals`).
    names: whether the value is a tuple of names.
    shared: whether the key belongs to the section itself, if the dataclass is a
      choice among several with separate options.
    weights: whether the value is a tuple of weights.
  """

  doc: str
  at_least: float | None = None
  above: float | None = None
  at_most: float | None = None
  below: float | None = None
  one_of: tuple[Any, ...] | None = None
  name: str = ''
  none: Any = None
  interval: bool = False
  names: bool = False
  shared: bool = False
  weights: bool = False

  def problem(self, value: Any) -> str:
    """Returns the error in a value, or '' if it is valid."""
    # nan would pass the comparisons below, and no key uses inf.
    if isinstance(value, float) and not math.isfinite(value):
      return 'it must be a finite number'
    # Flags of tuples are repeated, with one name each.
    if self.names and not all(name and ',' not in name for name in value):
      names = [x for name in value for x in name.split(',') if x]
      return f'no name may be empty or contain a comma; write "{tuple(names)}"'
    if self.weights and not all(0 < weight < math.inf for weight in value):
      return 'weights must be above 0'
    if self.interval and (text := intervals.problem(value, self.above)):
      return text
    if self.one_of is not None and value not in self.one_of:
      return f'it must be one of {", ".join(map(str, self.one_of))}'
    for words, bound, holds in (
      ('at least', self.at_least, operator.ge),
      ('above', self.above, operator.gt),
      ('at most', self.at_most, operator.le),
      ('below', self.below, operator.lt),
    ):
      if bound is not None and not holds(value, bound):
        return f'it must be {words} {bound}'
    return ''


def key(default: Any, doc: str, **bounds: Any) -> Any:
  """Declares a dataclass field as a configuration key.

  Args:
    default: default value.
    doc: documentation of the key.
    **bounds: the other fields of `Key`.
  """
  return dataclasses.field(
    default=default, metadata={_META: Key(doc, **bounds)}
  )


@dataclasses.dataclass(frozen=True)
class Section:
  """A nested section of the configuration.

  Attributes:
    type: the section's dataclass; all fields must have defaults.
    switch: key whose default turns the section off, with all other keys at
      their defaults. '' for a section that is always on.
  """

  type: type
  switch: str = ''

  def is_off(self, values: Mapping[str, Any]) -> bool:
    """Returns whether the section is off.

    Args:
      values: value of every key of the section.
    """
    return (
      bool(self.switch)
      and values[self.switch] == defaults(self.type)[self.switch]
    )


def section(type_: type, switch: str = '') -> Any:
  """Declares a dataclass field as a nested section.

  Args:
    type_: dataclass of the section.
    switch: see `Section`.
  """
  return dataclasses.field(
    default_factory=type_, metadata={_META: Section(type_, switch)}
  )


def keys_of(section: Any) -> Iterator[tuple[str, str, Key, Any]]:
  """Yields (key name, field name, Key, default) of a section's keys."""
  for field in dataclasses.fields(section):
    info = field.metadata.get(_META)
    if isinstance(info, Key):
      yield info.name or field.name, field.name, info, field.default


def shared(section: type) -> list[str]:
  """Returns the names of the keys that are `shared`."""
  return [name for name, _, info, _ in keys_of(section) if info.shared]


def sections_of(section: Any) -> Iterator[tuple[str, Section]]:
  """Yields (name, Section) of the nested sections."""
  for field in dataclasses.fields(section):
    info = field.metadata.get(_META)
    if isinstance(info, Section):
      yield field.name, info


def check(section: Any, prefix: str, options: str = '') -> None:
  """Checks all keys of a section against their bounds.

  Args:
    section: frozen dataclass instance.
    prefix: prefix of keys in messages, such as 'config.train.'.
    options: further prefix of keys that are not `shared`, such as 'dpo.'.

  Raises:
    UserError: a value is out of bounds (names key, value and bound), or a
      section that is off has a non-default option.
  """
  for name, field, info, _ in keys_of(section):
    value = getattr(section, field)
    if value is not None and (problem := info.problem(value)):
      inner = '' if info.shared else options
      raise errors.UserError(f'{prefix}{inner}{name} is {value!r}; {problem}.')
  for name, info in sections_of(section):
    values = values_of(getattr(section, name))
    if info.is_off(values):
      inner, switch = f'{prefix}{name}.', info.switch
      reason = f'{inner}{switch} is {values[switch]!r}'
      require_defaults(values, defaults(info.type), inner, reason)


def defaults(section: type) -> dict[str, Any]:
  """Returns the default values of a section, by key name."""
  values = {
    name: info.none if default is None else default
    for name, _, info, default in keys_of(section)
  }
  inner = {name: defaults(info.type) for name, info in sections_of(section)}
  return values | inner


def values_of(section: Any) -> dict[str, Any]:
  """Returns the values of a section instance, by key name."""
  values = {
    name: info.none if (value := getattr(section, field)) is None else value
    for name, field, info, _ in keys_of(section)
  }
  inner = {
    name: values_of(getattr(section, name)) for name, _ in sections_of(section)
  }
  return values | inner


def make(section: type, values: Mapping[str, Any], **fields: Any) -> Any:
  """Builds a section from the values of its keys.

  Args:
    section: frozen dataclass.
    values: value of every key, by key name.
    **fields: values of the other fields.

  Raises:
    UserError: a value is out of bounds.
  """
  for name, info in sections_of(section):
    fields[name] = make(info.type, values[name])
  for name, field, info, _ in keys_of(section):
    value = values[name]
    # Sections must be hashable, but JSON has lists.
    if isinstance(value, list):
      value = tuple(value)
    if info.names:  # Flags parse a name such as 2024 as a number.
      value = tuple(map(str, value))
    if info.weights:
      value = tuple(map(float, value))
    unset = info.none is not None and value == info.none
    fields[field] = None if unset else value
  return section(**fields)


def require_defaults(
  values: Mapping[str, Any],
  standard: Mapping[str, Any],
  prefix: str,
  reason: str,
) -> None:
  """Checks that unused options have their defaults.

  Args:
    values: value of every key, by key name.
    standard: the default of each option.
    prefix: prefix of keys in messages, such as 'config.loss.dpo.'.
    reason: why the options are unused, as a clause.

  Raises:
    UserError: an option differs from its default.
  """
  for name, default in standard.items():
    value = values[name]
    if (tuple(value) if isinstance(value, list) else value) != default:
      raise errors.UserError(
        f'{prefix}{name} is {value!r}, which is not read: {reason}; leave it at'
        f' {default!r}, or choose what reads it.'
      )


def complete(
  saved: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = ''
) -> tuple[dict[str, Any], list[str]]:
  """Completes a saved configuration with the keys of this version.

  Args:
    saved: sections and values by key name; keys may be missing.
    defaults: every section and key with its default.
    prefix: full name of the section with a dot, such as 'train.'.

  Returns:
    All sections and values, and 'section.key = default' of missing keys.

  Raises:
    UserError: a key is unknown.
  """
  values, added = dict(defaults), []
  if unknown := sorted(saved.keys() - defaults.keys()):
    names = (f'{prefix}{x}{errors.nearest(x, defaults)}' for x in unknown)
    raise errors.UserError(
      f'the configuration has {", ".join(names)}, which this version has not.'
    )
  for name, default in defaults.items():
    if isinstance(default, Mapping):
      section = saved.get(name, {})
      values[name], entries = complete(section, default, f'{prefix}{name}.')
      added += entries
    elif name in saved:
      values[name] = saved[name]
    else:
      added.append(f'{prefix}{name} = {default!r}')
  return values, added


def page(
  section: type, values: Mapping[str, Any], prefix: str, *, full: bool = True
) -> list[str]:
  """Lists the keys of a section with their documentation.

  Args:
    section: frozen dataclass.
    values: value of every key, by key name.
    prefix: prefix of keys, such as 'config.train.'.
    full: whether to list all keys of sections that are off, or only their
      switch.

  Returns:
    Each key's documentation as comment lines, followed by `prefix.key = value`.
  """
  lines = []
  for name, _, info, _ in keys_of(section):
    if name in values:
      text = info.doc
      # Do not repeat values already explained in the documentation.
      if not all(str(choice) in text for choice in info.one_of or ()):
        text += f' One of {", ".join(map(str, info.one_of))}.'
      lines += [f'# {line}' for line in textwrap.wrap(text, 76)]
      lines.append(f'{prefix}{name} = {values[name]!r}')
  for name, info in sections_of(section):
    inner = values.get(name, {})
    if inner and info.is_off(inner) and not full:
      inner = {info.switch: inner[info.switch]}
    lines += page(info.type, inner, f'{prefix}{name}.', full=full)
  return lines
