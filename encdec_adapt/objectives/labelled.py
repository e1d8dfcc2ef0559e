"""Labelled examples, for classifiers (`config.data.source=labels:..`).

| name     | reads                                | label                     |
|----------|--------------------------------------|---------------------------|
| classify | texts joined by line breaks          | at the last token         |
| tag      | words joined by spaces               | per word, at its first    |
|          |                                      | token                     |

Both need the label names, in index order: `classify:labels=no|yes`. They train
classifiers, a pretrained stack (of a pair, the encoder or both) with one head
row per label (Encoder-Decoder Gemma, arXiv:2504.06225, section 4: a head on the
last token).
Targets are label indices, aligned with the tokens read.

Pure NumPy; must not import TensorFlow, SeqIO or JAX.
"""

from collections.abc import Sequence
import functools
from typing import Any

import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.objectives import (
  example_maker,
  framing,
  row_fields,
  supervised,
)
from encdec_adapt.tokenizers import vocabulary as vocabulary_lib


class Classify(example_maker.ExampleMaker):
  """One label for one or more texts; see the module's docstring."""

  options = {
    'labels': example_maker.Option(
      lambda text: tuple(text.split('|')),
      'labels=LABEL|LABEL, in quotes where a label has a comma',
    ),
    'too_long': supervised.Supervised.options['too_long'],
  }
  reads = 'text'
  documents = 'labels'
  one_vocabulary = 'it has one text for all stacks'
  _counted = ('dropped', 'truncated')

  @classmethod
  def rows(cls, options):
    names = options.get('labels', ())
    field = row_fields.StoredField('targets', 'integers', 'labels', names)
    stored = tuple(
      field if x.name == field.name else x for x in row_fields.PAIR_FIELDS
    )
    check = functools.partial(framing.check_framing, labelled=True)
    return row_fields.RowFields('labels', ('encoder',), stored, check=check)

  def __init__(
    self,
    name: str,
    lengths: framing.Lengths,
    vocabulary: vocabulary_lib.Vocabulary,
    *,
    labels: Sequence[str] = (),
    too_long: str = 'drop',
  ):
    """Checks the labels.

    Args:
      name: name of the objective, for errors.
      lengths: row lengths; every example must fit.
      vocabulary: vocabulary of the texts.
      labels: the labels, at least two.
      too_long: whether to 'drop' or 'truncate' examples longer than a row.

    Raises:
      UserError: there are fewer than two labels.
    """
    super().__init__(name, lengths)
    if len(set(labels)) < max(2, len(labels)):
      raise errors.UserError(
        f'objective {name!r} has the labels {list(labels)}; give at least two,'
        ' all different, as in classify:labels=no|yes'
      )
    self._numbers = {label: i for i, label in enumerate(labels)}
    self._truncates = too_long == 'truncate'
    self._encode = vocabulary.encode

  def examples(self, documents, generator, policy=example_maker.POLICY):
    for name, pair in self._parsed(documents, policy, self._pair):
      yield pair._replace(documents=(name,))

  def _parts(self, texts, label) -> tuple[list[np.ndarray], list[int]]:
    """Returns the tokens of each labelled part, and the label indices."""
    if not all(isinstance(text, str) for text in texts):
      raise errors.UserError('its texts are lists of words; use `tag`')
    return [self._encode('\n'.join(texts))], [self._number(label)]

  def _number(self, label: str | int) -> int:
    # Labels are strings in options, but may be numbers in JSON.
    if str(label) not in self._numbers:
      raise errors.UserError(
        f'its label {label!r} is none of {list(self._numbers)}, the labels of'
        ' config.data.objective'
      )
    return self._numbers[str(label)]

  def _label_positions(self, lengths: np.ndarray) -> np.ndarray:
    """Returns the position of each part's label, given the parts' lengths."""
    # A causal stack sees the whole text only from its last token.
    return np.cumsum(lengths) - 1

  def _pair(self, texts: list, label: Any) -> framing.Pair | None:
    """Returns the example of a document; None if it is dropped.

    Raises:
      UserError: the document is bad.
    """
    parts, labels = self._parts(texts, label)
    counts = np.array([len(part) for part in parts])
    if not counts.all():
      raise errors.UserError('it has a text or a word without tokens')
    tokens, positions = np.concatenate(parts), self._label_positions(counts)
    longest = self.lengths.encoder - self.lengths.edges
    if len(tokens) > longest:
      self.counts['truncated' if self._truncates else 'dropped'] += 1
      if not self._truncates:
        return None
      tokens = tokens[:longest]
      positions = self._cut_positions(positions, longest)
    targets = np.zeros(len(tokens), np.int32)
    weights = np.zeros(len(tokens), np.float32)
    # Truncation may have removed the last words, and their labels with them.
    targets[positions], weights[positions] = labels[: len(positions)], 1
    return framing.Pair(tokens, targets, weights=weights)

  def _cut_positions(self, positions: np.ndarray, size: int) -> np.ndarray:
    """Returns the positions of labels after truncation to `size` tokens."""
    return np.minimum(positions, size - 1)


class Tag(Classify):
  """One label per word; see the module's docstring."""

  def _parts(self, texts, label):
    words = texts[0]
    if len(texts) > 1 or isinstance(words, str) or not isinstance(label, list):
      raise errors.UserError('it must have one list of words and one of labels')
    if len(words) != len(label) or not words:
      raise errors.UserError(
        f'it has {len(words)} words and {len(label)} labels; give a label for'
        ' each word'
      )
    # Word by word, as tokens must not cross words; with the preceding space,
    # which many vocabularies have in the word's token.
    encoded = [
      self._encode((' ' if i else '') + str(word))
      for i, word in enumerate(words)
    ]
    return encoded, [self._number(value) for value in label]

  def _label_positions(self, lengths):
    return np.cumsum(lengths) - lengths

  def _cut_positions(self, positions, size):
    return positions[positions < size]


OBJECTIVES = {
  'classify': example_maker.Name(
    Classify,
    'a label for one or several texts (`labels:` sources), at the last token',
  ),
  'tag': example_maker.Name(Tag, 'a label for each word, at its first token'),
}
