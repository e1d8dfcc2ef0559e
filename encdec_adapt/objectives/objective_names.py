r"""Parses the objectives of a configuration.

A name may have options after a colon, separated by commas:

    prefix_lm
    causal_lm:concatenate
    bart:share=0.2,concatenate
    meap:share=0.15,span=5
    denoise:R:3:0.15 + S:uniform@4
    denoise:R:3:0.15 + S:uniform@4,shortest=16

    pairs:too_long=truncate,prefix=summarize:
    pairs:prefix="Question: ",separator="\n"
    classify:labels=no|yes

A text value is verbatim, spaces included, or a JSON string in quotes, which may
have commas and escapes. ' | ' separates several objectives, which share the
training rows (`data/records/row_order.py`): `prefix_lm | ul2`. Each module
lists its names in `OBJECTIVES`; its docstring describes them and their options.

Must not import TensorFlow, SeqIO or JAX.
"""

from collections.abc import Mapping
import functools

from encdec_adapt import objectives
from encdec_adapt.base import discovery, errors, option_strings
from encdec_adapt.objectives import example_maker, shared_noise

NAMES: Mapping[str, example_maker.Name] = {
  name: entry
  for module in discovery.modules_of(objectives)
  # Most modules, including this module, have no objectives.
  for name, entry in getattr(module, 'OBJECTIVES', {}).items()
}
_LABEL = 'config.data.objective'
# Removed objective -> last version of the package with it.
_REMOVED = dict.fromkeys(('deshuffle', 'mass', 'permuted_lm'), '0.1.0')


@functools.cache
def parse(text: str) -> tuple[example_maker.Objective, ...]:
  """Parses `config.data.objective`, one or more objectives.

  Raises:
    UserError: an objective is unknown or named twice, their rows have different
      fields, or one of several masks whole batches.
  """
  # A bar without spaces separates the labels of `classify`.
  divided = option_strings.Part(_LABEL, text).divide(r' \| ')
  parts = [_trim(part.text) for part in divided]
  result = tuple(map(_parse_objective, parts))
  # A batch has rows of several objectives, so they must have the same arrays.
  rows = {(part.rows.content, part.rows.stored) for part in result}
  if len(set(parts)) < len(parts) or len(rows) > 1:
    contents = {str(part): part.rows.content for part in result}
    raise errors.UserError(
      f'config.data.objective is {text!r}; several objectives must differ and'
      f' have rows of the same fields, but these have rows of {contents}'
    )
  # The pattern of a step would mask rows of the other objectives, too.
  if len(result) > 1 and any(map(shared_noise.share_of, result)):
    raise errors.UserError(
      f'config.data.objective is {text!r}; meap_shared masks the rows of a'
      ' whole step and stands alone; use meap'
    )
  return result


def parse_one(text: str) -> example_maker.Objective:
  """Parses a single objective.

  Raises:
    UserError: the name or an option is unknown.
  """
  return _parse_objective(_trim(text))


def for_evaluation(
  objective: example_maker.Objective,
) -> example_maker.Objective:
  """Returns the objective for held-out rows, of one document each."""
  maker, options = objective.maker, objective.options
  held_out = parse_one(maker.without_masks(objective.text, options))
  if not held_out.options.get('concatenate'):
    return held_out
  # Standard errors of held-out losses are over documents, so no row may have
  # two.
  options = {**held_out.options, 'concatenate': False}
  return example_maker.Objective(held_out.text, held_out.maker, options)


def _trim(text: str) -> str:
  name, _, options = text.strip().partition(':')
  # A quoted text with a comma ends in a quote: no space to keep.
  key = options.rpartition(',')[2].partition('=')[0]
  option = NAMES[name].maker.options.get(key) if name in NAMES else None
  return text.lstrip() if option and option.verbatim else text.strip()


def _parse_objective(text: str) -> example_maker.Objective:
  part = option_strings.Part(_LABEL, text)
  head = part.partition(':')[0]
  name = head.text
  if name in _REMOVED:
    raise head.error(
      f'was removed; encdec_adapt {_REMOVED[name]} is the last version that'
      ' reads its records and runs'
    )
  if name not in NAMES:
    hint = errors.nearest(name, NAMES)
    raise head.error(f'must be one of {", ".join(NAMES)}{hint}')
  maker, options = NAMES[name].maker, dict(NAMES[name].preset)
  entries = list(filter(None, part.options()))
  if NAMES[name].parse:  # Text before the options.
    options |= NAMES[name].parse(entries.pop(0).text if entries else '')
  for entry in entries:
    key, value = entry.partition('=')
    option = maker.options.get(key.text)
    # A flag, such as `concatenate`, has no value.
    if option is None or ('=' in option.form) != ('=' in entry.text):
      forms = ', '.join(option.form for option in maker.options.values())
      raise entry.error(f'is not an option of {name}; it has {forms}')
    options[key.text] = value.read(
      option.parse, f'as in {option.form}', option.accepts
    )
  return example_maker.Objective(text, maker, options)
