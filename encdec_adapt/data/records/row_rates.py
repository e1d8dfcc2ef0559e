"""Mixture rates: how often training draws rows of each part.

    tokens:1,3
    examples:sizes,temperature=2,cap=10000
    tokens:1,0; 9000=tokens:0,1

Semicolons separate phases; each but the first starts with its step and an
equals sign. A phase has a unit (rows, examples, target tokens, or batches, each
of which then has rows of one part) and a number for every part of the record
set, in order; `sizes` stands for the sizes of the parts in that unit. The
numbers are capped at `cap`, then raised to the power 1 / `temperature`, as in
T5 (Raffel et al. 2020, section 3.5.2). They need not sum to 1.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any

from encdec_adapt.base import errors, option_strings

# Unit -> the count of a part in the manifest of its record set.
UNITS = {'rows': 'rows', 'examples': 'pairs', 'tokens': 'target_tokens'}
# Rates of whole batches, each with rows of one part.
BATCHES = 'batches'
UNITS[BATCHES] = 'rows'
_SIZES = 'sizes'


@dataclasses.dataclass(frozen=True)
class Phase:
  """Rates from a step on.

  Attributes:
    step: first step.
    unit: key of `UNITS`.
    rates: rate of every part, at least 0; None for the parts' sizes.
    temperature: above 0; 1 leaves the rates as they are.
    cap: maximum rate, applied before the temperature.
  """

  step: int
  unit: str
  rates: tuple[float, ...] | None
  temperature: float = 1.0
  cap: float = math.inf

  def row_shares(self, parts: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns the share of rows of every part; they sum to 1.

    Args:
      parts: `parts` of a manifest.

    Raises:
      UserError: there are not as many rates as parts, or a part with a rate
        has no rows.
    """
    names = [f'{part["objective"]} of {part["source"]}' for part in parts]
    self.check_parts(names)
    sizes = [part[UNITS[self.unit]] for part in parts]
    rates = sizes if self.rates is None else self.rates
    capped = [min(rate, self.cap) for rate in rates]
    # Normalised by the largest: at a low temperature, the power of a count may
    # overflow.
    largest = max(capped) or 1.0
    mixed = [(rate / largest) ** (1 / self.temperature) for rate in capped]
    # Converts shares of the unit to shares of rows: rows of short examples hold
    # more examples.
    shares = [
      rate * part['rows'] / size if rate else 0.0
      for rate, part, size in zip(mixed, parts, sizes, strict=True)
      if size or not rate
    ]
    # Empty parts with a positive rate are missing from the list.
    if len(shares) < len(parts) or not any(shares):
      raise errors.UserError(
        f'config.data.rates draws from a part without {self.unit}; the parts'
        f' are {"; ".join(names)}, with {sizes}'
      )
    return [share / sum(shares) for share in shares]

  def check_parts(self, names: Sequence[str]) -> None:
    """Checks that every part has a rate.

    Raises:
      UserError: the number of rates differs.
    """
    if self.rates is not None and len(self.rates) != len(names):
      raise errors.UserError(
        f'config.data.rates has {len(self.rates)} rates for the'
        f' {len(names)} parts of the records: {"; ".join(names)}; state one'
        ' for each, in this order'
      )


def parse(text: str) -> tuple[Phase, ...]:
  """Returns the phases of `config.data.rates`; none for ''.

  Raises:
    UserError: names the malformed phase and the expected form.
  """
  return tuple(
    _phase(step, setting)
    for step, setting in option_strings.phases('config.data.rates', text)
  )


def _phase(step: int, setting: option_strings.Part) -> Phase:
  unit, _ = setting.partition(':')
  options, rates = {}, []
  for field in setting.options(r'\s*,\s*'):
    name, value = field.partition('=')
    if name.text in ('temperature', 'cap'):
      options[name.text] = value.read(float, 'above 0', lambda n: n > 0)
    else:
      rates.append(field)
  if unit.strip().text not in UNITS or not rates:
    raise setting.error(
      'must be UNIT:RATE,RATE or UNIT:sizes, where UNIT is one of'
      f' {", ".join(UNITS)}, then perhaps ,temperature=T or ,cap=N'
    )
  numbers = None
  if [rate.text.strip() for rate in rates] != [_SIZES]:
    numbers = tuple(
      rate.read(float, 'a rate of at least 0', lambda n: 0 <= n < math.inf)
      for rate in rates
    )
    if not any(numbers):
      raise setting.error('must have a rate above 0')
  return Phase(step, unit.strip().text, numbers, **options)
