r"""Parses the objectives of a configuration.

A name may have options after a colon, separated by commas:

    prefix_lm
    causal_lm:concatenate
    bart:share=0.2,concatenate
    meap:share=0.15,span=5
    denoise:R:3:0.15 + S:uniform@4

    pairs:too_long=truncate,prefix=summarize:
    pairs:prefix="Question: ",separator="\n"
    classify:labels=no|yes

A text is taken verbatim, spaces included, or is a JSON string in quotes, which
may have commas and escapes. Several objectives, which then share the training
rows (`data/row_order.py`), are separated by ' | ': `prefix_lm | ul2`. The names
are those in `OBJECTIVES` of the modules of objectives, whose docstrings
describe them and their options.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Mapping
import functools

from encdec_adapt.cli import errors
from encdec_adapt.data import (
  definition,
  denoising,
  labelled,
  noising,
  objectives,
  option_text,
  supervised,
)

_MODULES = (objectives, noising, supervised, labelled, denoising)
NAMES: Mapping[str, definition.Name] = {
  name: entry
  for module in _MODULES
  for name, entry in module.OBJECTIVES.items()
}
_MIXTURE = 'denoise'


@functools.cache
def parse(text: str) -> tuple[definition.Objective, ...]:
  """Parses `config.data.objective`: one objective or several.

  Raises:
    UserError: one is not known or named twice, they fill other sides or have
      other fields, or one of several masks whole batches.
  """
  # Without options there is no space to keep.
  parts = [
    part.lstrip() if ':' in part else part.strip()
    for part in option_text.divide(text, ' | ')
  ]
  result = tuple(map(_parse_objective, parts))
  first = result[0]
  if len(set(parts)) < len(parts) or any(
    (part.feeds, part.maker.fields) != (first.feeds, first.maker.fields)
    for part in result
  ):
    sides = {str(part): part.feeds for part in result}
    raise errors.UserError(
      f'config.data.objective is {text!r}; several objectives must differ and'
      f' fill the same sides of a row, but these fill {sides}'
    )
  if len(result) > 1 and any(part.shared_mask_share for part in result):
    raise errors.UserError(
      f'config.data.objective is {text!r}; meap_shared masks the rows of a'
      ' whole step and stands alone; use meap'
    )
  return result


def parse_one(text: str) -> definition.Objective:
  """Parses an objective that stands alone.

  Raises:
    UserError: the name or an option is not known.
  """
  return _parse_objective(text.lstrip())


def for_evaluation(
  objective: definition.Objective,
) -> definition.Objective:
  """Returns the objective that makes its held-out rows."""
  maker, options = objective.maker, objective.options
  return parse_one(maker.evaluation_text(objective.text, options))


def _parse_objective(text: str) -> definition.Objective:
  """Parses one objective.

  Raises:
    UserError: the name or an option is not known, or a value has a wrong type.
  """
  name, _, rest = text.partition(':')
  if name not in NAMES:
    raise errors.UserError(
      f'config.data.objective is {text!r}; must be one of'
      f' {", ".join(NAMES)}, the last as {_MIXTURE}:MIXTURE'
    )
  maker, options = NAMES[name].maker, dict(NAMES[name].preset)
  if name == _MIXTURE:
    options['mixture'] = denoising.parse_mixture(rest)
    return definition.Objective(text, maker, options)
  for entry in filter(None, option_text.divide(rest, ',')):
    key, equals, value = entry.partition('=')
    try:
      option = maker.options[key]
      if ('=' in option.form) != bool(value) or (equals and not value):
        raise ValueError
      options[key] = option.read(value)
    except (KeyError, ValueError):
      forms = ', '.join(option.form for option in maker.options.values())
      raise errors.UserError(
        f'config.data.objective is {text!r}: {entry!r} is not an option of'
        f' {name}; it has {forms}'
      ) from None
  return definition.Objective(text, maker, options)
