"""Questions with passages that an encoder reads one by one (Fusion-in-Decoder).

| name     | source                              | inputs       | targets     |
|----------|-------------------------------------|--------------|-------------|
| passages | pairs:GLOB#QUESTION,ANSWER,PASSAGES | its passages | answer, EOS |

Izacard and Grave 2020 (arXiv:2007.01282, section 3): each passage is read with
the question, as `question: QUESTION title: TITLE context: TEXT`, and without
the other passages (`ops.passage_segments`). A passage is a text, or an object
with `text` and optionally `title`. Its end is cut to the option `length`,
tokens with framing (250 as in the paper, section 4); the question never is.
`too_long` is of answers; passages that do not fit are an error.

The inputs of an example are its framed passages in order, so that the token
which frames inputs separates them, without its first and last edge.
`config.data.encoder_length` holds all passages of an example.

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
from encdec_adapt.tokenizers import special_ids
from encdec_adapt.tokenizers import vocabulary as vocabulary_lib


class Passages(supervised.Supervised):
  """Questions with passages; see the module's docstring."""

  options = {
    'too_long': supervised.Supervised.options['too_long'],
    'length': example_maker.Option(
      int, 'length=TOKENS, at least 8', lambda value: value >= 8
    ),
  }
  teacher_reads = ''

  @classmethod
  def rows(cls, options):
    check = functools.partial(framing.check_framing, passages=True)
    return row_fields.RowFields(
      'passages', check=check, passages=options['length']
    )

  def __init__(self, name, lengths, vocabulary, *encoder, length, **options):
    """Checks the options; see `supervised.Supervised`."""
    super().__init__(name, lengths, vocabulary, *encoder, **options)
    self._length = length

  def _pairs(self, question, answer, fields=None):
    if not fields:
      raise errors.UserError(
        'it has no passages; name them as the third field,'
        ' pairs:GLOB#QUESTION,ANSWER,PASSAGES'
      )
    ((pair, text),) = super()._pairs(question, answer)
    reader = self._encoder_vocabulary or self._vocabulary
    documents = next(iter(fields.values()))
    inputs = encode(reader, question, documents, self._length)
    tokens = len(inputs) + self.lengths.edges
    if tokens > self.lengths.encoder:
      raise errors.UserError(
        f'its {len(documents)} passages take {tokens} tokens, and'
        f' config.data.encoder_length is {self.lengths.encoder}; raise it, or'
        f' lower the option length={self._length}'
      )
    return [(pair._replace(inputs=inputs, prefix=None), text)]


def encode(
  vocabulary: vocabulary_lib.Vocabulary,
  question: str,
  documents: Sequence[Any],
  length: int,
) -> np.ndarray:
  """Returns the inputs of a question with passages, int32 [n], unframed.

  Args:
    vocabulary: vocabulary of the encoder.
    question: the question, whole in every passage.
    documents: the passages, texts or objects with `text` and, optionally,
      `title`; other keys are not read.
    length: most tokens of a passage, framing included.

  Raises:
    UserError: there are no passages, one is of another form, or the question
      leaves no room in a passage.
  """
  if not isinstance(documents, list) or not documents:
    raise errors.UserError(
      f'the passages are {documents!r:.60}; they must be a list of texts, or of'
      ' objects with text and title, and not empty'
    )
  head, tail = vocabulary.ids.edges('encoder')
  room = length - vocabulary.ids.frame_size
  start = f'question: {question}'
  if (size := len(vocabulary.encode(start))) >= room:
    raise errors.UserError(
      f'its question has {size} tokens, which leave none of a passage of'
      f' {length}; shorten it, or train with a larger option length'
    )
  tokens = []
  for number, document in enumerate(documents, start=1):
    ids = vocabulary.encode(f'{start} {_text(document, number)}')[:room]
    tokens += [*head, *ids, *tail]
  return np.array(tokens[len(head) : len(tokens) - len(tail)], np.int32)


def _text(document: Any, number: int) -> str:
  title, text = None, document
  if isinstance(document, dict):
    title, text = document.get('title'), document.get('text')
  if not isinstance(text, str) or not isinstance(title, str | None):
    raise errors.UserError(
      f'passage {number} is {document!r:.60}; it must be a text, or an object'
      ' with text and title'
    )
  return ('' if title is None else f'title: {title} ') + f'context: {text}'


def edge(ids: special_ids.SideIds) -> tuple[int, bool]:
  """Returns the token at the edge of every passage, and whether it ends it."""
  head, tail = ids.edges('encoder')
  return (head[0], False) if head else (tail[-1], True)


OBJECTIVES = {
  'passages': example_maker.Name(
    Passages,
    'answers to questions with passages, each read on its own (`pairs:`'
    ' sources)',
    {'length': 250},
  ),
}
