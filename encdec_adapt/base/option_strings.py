r"""Option strings, shared by keys, flags and sources.

| reader       | reads                         | as in                |
|--------------|-------------------------------|----------------------|
| `things`     | things, perhaps with a weight | python@2 + text:a    |
| `phases`     | settings, each from a step on | rows:1,0; 9=rows:1,1 |
| `key_values` | keys and values               | size=2b,run=adapted  |

A thing has options after a colon (`Part.options`). Dividers in a quoted JSON
string are ignored, and a quoted part is read as its content (`Part.text`):
`pairs:prefix="Question, or: "`, `text:"/data/a + b/*"`. `quote` is the inverse.
`configs/option_strings.md` documents all strings for users.

Of the package, this module must import only user errors.
"""

from collections.abc import Callable, Mapping
import dataclasses
import json
import math
import re
from typing import Any, TypeVar

from encdec_adapt.base import errors

_QUOTED = r'"(?:[^"\\]|\\.)*"'  # A JSON string.

T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class Part:
  """A part of an option string, with its column for messages.

  Attributes:
    label: name of the string in messages, such as 'config.data.rates'.
    string: the full string.
    start: index of the first character of the part.
    stop: end index (exclusive); None for the string's end.
  """

  label: str
  string: str
  start: int = 0
  stop: int | None = None

  @property
  def raw(self) -> str:
    """The part's characters."""
    return self.string[self.start : self.stop]

  @property
  def text(self) -> str:
    """The part, unquoted if it is a JSON string.

    Raises:
      UserError: the part begins with a quote but is no JSON string.
    """
    try:
      return json.loads(self.raw) if self.raw.startswith('"') else self.raw
    except ValueError:
      raise self.error('must end with its quote, as a JSON string') from None

  def __bool__(self) -> bool:
    return bool(self.raw)

  def error(self, problem: str) -> errors.UserError:
    """Returns an error with the part and its 1-based column.

    Args:
      problem: verb and object for the part as subject: 'must be a number'.
    """
    return errors.UserError(
      f'{self.label} is {self.string!r}; {self.raw!r} at column'
      f' {self.start + 1} {problem}'
    )

  def strip(self) -> 'Part':
    """Returns the part without surrounding spaces."""
    text = self.raw
    start = self.start + len(text) - len(text.lstrip())
    return dataclasses.replace(
      self, start=start, stop=start + len(text.strip())
    )

  def divide(self, divider: str) -> list['Part']:
    """Splits the part at matches of a pattern outside of quotes."""
    # Match quotes first, so that the scan skips them.
    matches = re.finditer(f'{_QUOTED}|({divider})', self.raw)
    spans = [match.span() for match in matches if match[1]]
    starts = [0, *(stop for _, stop in spans)]
    stops = [*(start for start, _ in spans), len(self.raw)]
    return [
      dataclasses.replace(self, start=self.start + i, stop=self.start + j)
      for i, j in zip(starts, stops, strict=True)
    ]

  def partition(self, mark: str) -> tuple['Part', 'Part']:
    """Splits the part at the first mark; without it, the second is empty."""
    head = self.divide(re.escape(mark))[0]
    # Without a mark, the second part is empty at the end, so that an error
    # points to the column of the missing mark.
    start = min(head.stop + len(mark), self.start + len(self.raw))
    return head, dataclasses.replace(self, start=start)

  def options(self, divider: str = ',') -> list['Part']:
    """Splits the text after the first colon; [] without a colon."""
    options = self.partition(':')[1]
    return options.divide(divider) if options else []

  def key_values(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Reads keys and values; see the function `key_values`."""
    values = dict(defaults)
    for item in filter(None, self.divide(',')):
      key, value = item.partition('=')
      # An empty value is allowed; without '=', the key is the full item.
      if key.text not in defaults or key.stop == item.stop:
        pairs = ', '.join(f'{k}={v}' for k, v in defaults.items())
        hint = errors.nearest(key.text, defaults)
        raise item.error(f'must be KEY=VALUE of {pairs}{hint}')
      # Convert to the type of the default.
      kind = type(defaults[key.text])
      values[key.text] = value.read(kind, f'of type {kind.__name__}')
    return values

  def read(
    self,
    kind: Callable[[str], T],
    form: str,
    accepts: Callable[[T], bool] = lambda value: True,
  ) -> T:
    """Converts the part.

    Args:
      kind: converts text; raises ValueError.
      form: the accepted values, for the message: 'a number above 0'.
      accepts: returns whether a value is accepted.

    Raises:
      UserError: the part is not accepted.
    """
    try:
      value = kind(self.text)
      if accepts(value):
        return value
    except ValueError:
      pass
    raise self.error(f'must be {form}')


def quote(text: str) -> str:
  """Returns a text for an option string, quoted if it has dividers."""
  divides = re.search(r'[",;#]|^\s|\s[+|]\s|\s$|@[\d.]+$', text)
  return json.dumps(text, ensure_ascii=False) if divides else text


def things(
  label: str, string: str, divider: str, mark: str = '@'
) -> list[tuple[Part, float | None]]:
  """Parses a list of things with optional weights.

  Args:
    label: name of the string in messages.
    string: things and dividers.
    divider: pattern between two things.
    mark: precedes a weight. If no number follows, the mark belongs to the
      thing, such as a path.

  Returns:
    Each thing, and its weight or None.

  Raises:
    UserError: a weight is not positive and finite.
  """
  weighted: list[tuple[Part, float | None]] = []
  for part in Part(label, string).divide(divider):
    thing = part.strip()
    # The last mark, as names of folders and users may contain it.
    name, sign, number = thing.raw.rpartition(mark)
    try:
      weight = float(number if sign else 'none')
    except ValueError:
      weighted.append((thing, None))
      continue
    # float() also parses nan and inf.
    if not 0 < weight < math.inf:
      raise thing.error(
        f'has weight {weight:g} after the {mark}; it must be above 0'
      )
    stop = thing.start + len(name)
    weighted.append((dataclasses.replace(thing, stop=stop), weight))
  return weighted


def phases(label: str, string: str) -> list[tuple[int, Part]]:
  """Parses a schedule of settings: 'SETTING; STEP=SETTING; ..'.

  Args:
    label: name of the string in messages.
    string: settings with their first steps; 0 for the first setting.

  Returns:
    Step and setting of each phase; empty for ''.

  Raises:
    UserError: a step is missing, or steps do not increase.
  """
  settings: list[tuple[int, Part]] = []
  for part in Part(label, string).divide(';') if string else []:
    setting, step = part.strip(), 0
    if settings:
      # The first equals sign is the step's, as a setting begins with its name;
      # options have equals signs too.
      number, setting = setting.partition('=')
      last = settings[-1][0]
      step = number.read(
        int, f'STEP= with a step above {last}', lambda n, last=last: n > last
      )
    settings.append((step, setting.strip()))
  return settings


def key_values(
  label: str, string: str, defaults: Mapping[str, Any]
) -> dict[str, Any]:
  """Parses keys and values: 'KEY=VALUE,KEY=VALUE'.

  Args:
    label: name of the string in messages.
    string: keys and values.
    defaults: every key with its default, which sets the type.

  Raises:
    UserError: a key is unknown, or a value has the wrong type.
  """
  return Part(label, string).key_values(defaults)
