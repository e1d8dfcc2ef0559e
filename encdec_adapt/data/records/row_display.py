"""Rows of records as text, for people to read.

Each example of a row is shown with the ids of its documents and its fields as
the model reads them. Colours of a terminal: cyan for special tokens (sentinels,
modes, masks), dim for targets of weight 0; without colours special tokens
have their names, and targets of weight 0 are in braces.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Sequence
import itertools
from typing import Any

import numpy as np

from encdec_adapt.data.records import record_sets
from encdec_adapt.objectives import example_maker
from encdec_adapt.tokenizers import vocabulary as vocabulary_lib
from encdec_adapt.tokenizers import vocabulary_pair

_SPECIAL, _UNWEIGHTED, _RESET = '\033[36m', '\033[2m', '\033[0m'


def describe(
  record_set: record_sets.RecordSet,
  opened: vocabulary_pair.Opened,
  rows: Sequence[int],
  *,
  colour: bool,
) -> str:
  """Describes rows of a record set.

  Args:
    record_set: the records.
    opened: vocabularies of the two sides.
    rows: numbers of the rows.
    colour: whether to use colours of a terminal.
  """
  lines, objective = [], record_set.spec.objectives[0]
  for number, row in zip(rows, record_set.read(rows), strict=True):
    lines.append(f'row {number}: {len(row)} examples')
    for segment, pair in enumerate(row, start=1):
      lines += _example(segment, pair, objective, opened, colour)
  return '\n'.join(lines)


def _example(
  segment: int,
  example: Any,
  objective: example_maker.Objective,
  opened: vocabulary_pair.Opened,
  colour: bool,
) -> list[str]:
  names = ', '.join(example.documents) or 'unknown'
  lines = [f' segment {segment}, of {names}']
  # Targets come last, after the fields that the model reads.
  for field in sorted(
    objective.maker.fields, key=lambda f: f.name == 'targets'
  ):
    ids = getattr(example, field.name)
    if field.dtype == 'json' and ids:
      lines.append(f'  {field.name:<8}{"":>6}  {ids}')
    if ids is None or not len(ids) or field.dtype != 'int32':
      continue
    weights = None
    if field.name == 'targets':
      # An objective may have examples of a class without weights.
      weights = getattr(example, 'weights', None)
      if objective.labels:
        # Numbers at other tokens are padding and not the label 0.
        labels = [objective.labels[i] for i in ids[weights > 0]]
        lines.append(f'  labels  {len(labels):>6}  {" ".join(labels)}')
        continue
    text = _text(ids, opened.sides[field.side], weights, colour)
    # A model reads `decoder_inputs` in place of the targets.
    name = {'decoder_inputs': 'reads'}.get(field.name, field.name)
    lines.append(f'  {name:<8}{len(ids):>6}  {text}')
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
  # Decoded by runs of a kind: decoding token by token would break characters
  # that several tokens spell.
  for (is_special, unweighted), run in itertools.groupby(kinds):
    stop = start + len(list(run))
    # Llama 2 puts a space before a text, which only its first run may lose.
    text = vocabulary.decode(
      ids[start:stop], show_special=True, start=start == 0
    ).replace('\n', '\\n')
    if colour and (is_special or unweighted):
      style = _SPECIAL * is_special + _UNWEIGHTED * unweighted
      text = f'{style}{text}{_RESET}'
    elif unweighted:
      text = f'{{{text}}}'
    parts.append(text)
    start = stop
  return ''.join(parts)
