"""Human-readable display of record rows.

Each example is shown with its document ids and its stored fields
(`row_fields.StoredField`) as the model reads them. With terminal colours,
special tokens (sentinels, modes, masks) are cyan and targets of weight 0 are
dim; without colours, special tokens are shown by name and targets of weight 0
in braces.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Callable, Sequence
import itertools
from typing import Any

import numpy as np

from encdec_adapt.data.records import record_sets
from encdec_adapt.objectives import row_fields
from encdec_adapt.tokenizers import vocabulary as vocabulary_lib
from encdec_adapt.tokenizers import vocabulary_pair

_SPECIAL, _UNWEIGHTED, _RESET = '\033[36m', '\033[2m', '\033[0m'


def describe(
  record_set: record_sets.RecordSet,
  opened: vocabulary_pair.Opened,
  rows: Sequence[int],
  *,
  colour: bool,
  locate: Callable[[str], str] = str,
) -> str:
  """Describes rows of a record set.

  Args:
    record_set: the records.
    opened: vocabularies of the two sides.
    rows: row numbers.
    colour: whether to use terminal colours.
    locate: returns the file and line of a document id.
  """
  lines, fields = [], record_set.spec.objectives[0].rows
  for number, row in zip(rows, record_set.read(rows), strict=True):
    lines.append(f'row {number}: {len(row)} examples')
    for segment, example in enumerate(row, start=1):
      places = ', '.join(map(locate, example.documents)) or 'unknown'
      lines.append(f' segment {segment}, of {places}')
      lines += _example(example, fields, opened, colour)
  return '\n'.join(lines)


def _example(
  example: Any,
  fields: row_fields.RowFields,
  opened: vocabulary_pair.Opened,
  colour: bool,
) -> list[str]:
  lines = []
  # Some classes of examples have no weights.
  weights = getattr(example, 'weights', None)
  # Targets come last, after the inputs.
  for field in sorted(fields.stored, key=lambda f: f.name == 'targets'):
    value, title = getattr(example, field.name), field.title or field.name
    if value is None or not len(value):
      continue
    count, is_target = len(value), field.name == 'targets'
    if field.form == 'json':
      count, text = '', value
    elif field.names:
      # Targets of weight 0 are padding and have no name.
      if is_target and weights is not None:
        value = value[weights > 0]
      count, text = len(value), ' '.join(field.names[i] for i in value)
    elif field.form == 'tokens':
      weighted = weights if is_target else None
      # Of several texts, targets are the lengths.
      *texts, value = np.split(
        value, np.cumsum(example.targets)[:-1] if fields.texts else []
      )
      vocabulary = opened.sides[field.side]
      for part in texts:
        text = _text(part, vocabulary, None, colour)
        lines.append(f'  {title:<8}{len(part):>6}  {text}')
      count, text = len(value), _text(value, vocabulary, weighted, colour)
    else:
      continue
    lines.append(f'  {title:<8}{count:>6}  {text}')
  return lines


def _text(
  ids: np.ndarray,
  vocabulary: vocabulary_lib.Vocabulary,
  weights: np.ndarray | None,
  colour: bool,
) -> str:
  special = set(vocabulary.specials.values())
  kinds = [
    (token in special, weights is not None and not weights[i])
    for i, token in enumerate(ids.tolist())
  ]
  parts, start = [], 0
  # Decoded in runs of one kind: decoding token by token would break characters
  # spelt by several tokens.
  for (is_special, unweighted), run in itertools.groupby(kinds):
    stop = start + len(list(run))
    # Llama 2 prepends a space to a text; only the first run may drop it.
    text = vocabulary.decode(
      ids[start:stop], show_special=True, start=start == 0
    ).replace('\n', '\\n')
    if colour and (is_special or unweighted):
      style = _SPECIAL if is_special else ''
      style += _UNWEIGHTED if unweighted else ''
      text = f'{style}{text}{_RESET}'
    elif unweighted:
      text = f'{{{text}}}'
    parts.append(text)
    start = stop
  return ''.join(parts)
