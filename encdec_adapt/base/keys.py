"""Configuration keys: each is stated once, as a field of a frozen dataclass.

A section of the configuration is a frozen dataclass whose fields are made by
`key`, with default, documentation and bounds. The section lives next to its
user; `encdec_adapt.config` assembles all of them. This module imports nothing
of ours but user errors.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import math
import operator
import textwrap
from typing import Any

from encdec_adapt.base import errors

_META = 'config_key'
# Keys of earlier versions by their full name, such as 'train.steps' -> the name
# in their section now. Saved configurations keep the names that they had.
RENAMED: Mapping[str, str] = {}


@dataclasses.dataclass(frozen=True)
class Key:
  """Documentation and bounds of one configuration key.

  Attributes:
    doc: one or two sentences for the annotated page.
    at_least: lowest allowed value, or None.
    above: value that must be exceeded, or None.
    at_most: highest allowed value, or None.
    below: value that must not be reached, or None.
    one_of: allowed values, or None for any.
    name: name of the key where it differs from the field's.
    none: value that stands for None in a configuration, whose values keep
      their type; None where the field cannot be None.
  """

  doc: str
  at_least: float | None = None
  above: float | None = None
  at_most: float | None = None
  below: float | None = None
  one_of: tuple[Any, ...] | None = None
  name: str = ''
  none: Any = None

  def problem(self, value: Any) -> str:
    """Returns what is wrong with a value, or '' if nothing is."""
    if isinstance(value, float) and not math.isfinite(value):
      return 'it must be a finite number'
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
  """Declares a dataclass field that is a configuration key.

  Args:
    default: value of the field unless a configuration changes it.
    doc: documentation of the key.
    **bounds: the other fields of `Key`.
  """
  return dataclasses.field(
    default=default, metadata={_META: Key(doc, **bounds)}
  )


def keys_of(section: Any) -> Iterator[tuple[str, str, Key, Any]]:
  """Yields (key name, field name, Key, default) of a section's dataclass."""
  for field in dataclasses.fields(section):
    found = field.metadata.get(_META)
    if found is not None:
      yield found.name or field.name, field.name, found, field.default


def check(section: Any, prefix: str) -> None:
  """Checks every key of a section instance against its bounds.

  Args:
    section: frozen dataclass instance.
    prefix: text before the key in messages, such as 'config.train.'.

  Raises:
    UserError: names the key, its value and what it must be.
  """
  for name, field, found, _ in keys_of(section):
    value = getattr(section, field)
    problem = '' if value is None else found.problem(value)
    if problem:
      raise errors.UserError(f'{prefix}{name} is {value!r}; {problem}.')


def defaults(section: type) -> dict[str, Any]:
  """Returns the default values of a section, by key name."""
  return {
    name: found.none if default is None else default
    for name, _, found, default in keys_of(section)
  }


def values_of(section: Any) -> dict[str, Any]:
  """Returns the values of a section instance, by key name."""
  return {
    name: found.none if (value := getattr(section, field)) is None else value
    for name, field, found, _ in keys_of(section)
  }


def make(section: type, values: Mapping[str, Any], **others: Any) -> Any:
  """Builds a section from the values of its keys.

  Args:
    section: frozen dataclass.
    values: value of every key, by key name.
    **others: values of the fields that are not keys.

  Raises:
    UserError: a value is out of bounds.
  """
  fields = {}
  for name, field, key_of_name, _ in keys_of(section):
    value = values[name]
    if isinstance(value, list):
      value = tuple(value)
    unset = key_of_name.none is not None and value == key_of_name.none
    fields[field] = None if unset else value
  return section(**fields, **others)


def complete(
  saved: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = ''
) -> tuple[dict[str, Any], list[str]]:
  """Returns a saved configuration with the keys of this version.

  Args:
    saved: sections and values by key name; the names may be earlier ones, and
      keys may be missing.
    defaults: every section and key with its default.
    prefix: full name of the section with a point, such as 'train.'.

  Returns:
    All sections and values, and 'section.key = default' of missing keys.

  Raises:
    UserError: a key is unknown.
  """
  values, added = dict(defaults), []
  saved = {RENAMED.get(prefix + name, name): saved[name] for name in saved}
  if unknown := sorted(saved.keys() - defaults.keys()):
    raise errors.UserError(
      'the configuration was saved by another version: this one has no'
      f' {", ".join(prefix + name for name in unknown)}.'
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


def page(section: type, values: Mapping[str, Any], prefix: str) -> list[str]:
  """Lists the keys of a section with their documentation.

  Args:
    section: frozen dataclass.
    values: value of every key, by key name.
    prefix: text before the key, such as 'config.train.'.

  Returns:
    For each key its documentation as comment lines, then `prefix.key = value`.
  """
  lines = []
  for name, _, found, _ in keys_of(section):
    if name in values:
      text = ' '.join([found.doc, _choices(found)]).strip()
      lines += [f'# {line}' for line in textwrap.wrap(text, 76)]
      lines.append(f'{prefix}{name} = {values[name]!r}')
  return lines


def _choices(found: Key) -> str:
  if found.one_of is None or all(str(o) in found.doc for o in found.one_of):
    return ''
  return f'One of {", ".join(map(str, found.one_of))}.'
