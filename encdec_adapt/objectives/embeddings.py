"""Texts to embed: queries, their positives and negatives (`embed:..` sources).

| name  | reads                               | learns                         |
|-------|-------------------------------------|--------------------------------|
| embed | a query, a positive and, if any,    | to find the positive by the    |
|       | negatives                           | query's vector                 |

An embedding model (`config.model.head`) reads every text by itself: BOS, the
prefix of its role (`query`, `document`) and the text. A row holds up to `texts`
(8) texts, one segment each, of one or more examples. Surplus negatives of an
example are dropped. Examples longer than a row are dropped or, with
`too_long=truncate`, their longest texts truncated. The manifest counts all of
these. Fields of a row of M texts, besides the encoder's tokens, [M]:

| field     | content                                                          |
|-----------|------------------------------------------------------------------|
| roles     | NONE, QUERY, POSITIVE (the text after its query) or NEGATIVE     |
| owners    | index of the query of the text's example                         |
| weights   | 1 for each query, else 0                                         |
| keys      | checksum of the tokens, equal for equal texts                    |
| relevance | softmax of the teacher's scores over the example's positive and  |
|           | negatives; 0 without scores                                      |
| vectors   | [M, E] the given vectors (`vectors=E`), else 0                   |

Scores and vectors are stored in float16. Pure NumPy; must not import
TensorFlow, SeqIO or JAX.
"""

from collections.abc import Iterable, Mapping, Sequence
import functools
from typing import Any, NamedTuple
import zlib

import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.objectives import (
  example_maker,
  framing,
  row_fields,
  supervised,
)
from encdec_adapt.tokenizers import special_ids

NONE, QUERY, POSITIVE, NEGATIVE = range(4)
_MOST_TEXTS = 8  # Default maximum per row.
_ROLES = 'query', 'document'


class Texts(NamedTuple):
  """A query, its positive and negatives.

  Attributes:
    inputs: their tokens, concatenated in this order.
    targets: number of tokens of each.
    scores: [texts - 1], of the positive and negatives, or None.
    vectors: [texts * E], the concatenated vectors, or None.
    documents: document id.
  """

  inputs: np.ndarray
  targets: np.ndarray
  scores: np.ndarray | None = None
  vectors: np.ndarray | None = None
  documents: tuple[str, ...] = ()

  @property
  def target_tokens(self) -> int:
    """Number of texts, counted as targets in the manifest."""
    return len(self.targets)

  def positions(self, lengths: framing.Lengths) -> tuple[int, int]:
    """Returns the numbers of positions and texts; see `RowFields.capacity`."""
    count = len(self.targets)
    return len(self.inputs) + lengths.edges * count, count


_STORED = (
  row_fields.INPUTS,
  row_fields.StoredField('targets', 'integers'),
  row_fields.StoredField('scores', 'floats'),
  row_fields.StoredField('vectors', 'floats'),
)
_AXES = dict.fromkeys(
  ('roles', 'owners', 'weights', 'keys', 'relevance'), ('batch', None)
) | {'vectors': ('batch', None, None)}


class Embed(example_maker.ExampleMaker):
  """Queries with positives and negatives; see the module's docstring."""

  options = {
    'texts': example_maker.Option(
      int, 'texts=N of at least 2', lambda texts: texts >= 2
    ),
    'vectors': example_maker.Option(int, 'vectors=N', lambda size: size >= 0),
    'too_long': supervised.Supervised.options['too_long'],
    **{name: supervised.text_option(name) for name in _ROLES},
  }
  reads = 'text'
  documents = 'embed'
  one_vocabulary = 'it has no decoder'
  _counted = ('dropped', 'truncated', 'negatives_left_out')

  def __init__(
    self,
    name: str,
    lengths: framing.Lengths,
    vocabulary: Any,
    *,
    texts: int = _MOST_TEXTS,
    vectors: int = 0,
    too_long: str = 'drop',
    query: str = '',
    document: str = '',
  ):
    """Takes the options.

    Args:
      name: name of the objective, for errors.
      lengths: row lengths; every example must fit.
      vocabulary: vocabulary of the texts.
      texts: maximum number of texts per row, at least 2.
      vectors: size of the given vectors; 0 without.
      too_long: whether to 'drop' or 'truncate' examples longer than a row.
      query: prefix of queries.
      document: prefix of positives and negatives.
    """
    super().__init__(name, lengths)
    self._texts, self._vectors = texts, vectors
    self._encode, self._truncates = vocabulary.encode, too_long == 'truncate'
    self._prefixes = query, document

  @classmethod
  def rows(cls, options):
    texts = options.get('texts', _MOST_TEXTS)
    return row_fields.RowFields(
      'texts',
      ('encoder',),
      _STORED,
      Texts,
      functools.partial(_frame, texts, options.get('vectors', 0)),
      _check,
      _AXES,
      texts=texts,
    )

  def examples(self, documents, generator, policy=example_maker.POLICY):
    for name, example in self._parsed(documents, policy, self._example):
      yield example._replace(documents=(name,))

  def _example(
    self, texts: list[Any], scores: Any, vectors: Any
  ) -> Texts | None:
    """Returns the example of a document; None if it is dropped.

    Raises:
      UserError: a text is empty or not a text, or the numbers of scores,
        vectors and texts, or the vectors' sizes, differ.
    """
    for i, text in enumerate(texts):
      if not isinstance(text, str) or not text.strip():
        role = ('query', 'positive', 'negative')[min(i, 2)]
        raise errors.UserError(f'its {role} is {text!r:.60}, and has no text')
    scores = _numbers('scores', scores, (len(texts) - 1,))
    if vectors is not None or self._vectors:
      vectors = _numbers('vectors', vectors or [], (len(texts), self._vectors))
    self.counts['negatives_left_out'] += max(0, len(texts) - self._texts)
    tokens = [
      self._encode(self._prefixes[i > 0] + text)
      for i, text in enumerate(texts[: self._texts])
    ]
    count = len(tokens)
    room = self.lengths.encoder - self.lengths.edges * count
    if sum(map(len, tokens)) > room:
      self.counts['truncated' if self._truncates else 'dropped'] += 1
      if not self._truncates or room < count:
        return None
      longest = room
      while sum(min(len(x), longest) for x in tokens) > room:
        longest -= 1
      tokens = [x[:longest] for x in tokens]
    return Texts(
      np.concatenate(tokens),
      np.array([*map(len, tokens)], np.int32),
      None if scores is None else scores[: count - 1],
      None if vectors is None else vectors[:count].reshape(-1),
    )


def prompts(options: Mapping[str, Any]) -> dict[str, str]:
  """Returns the prefixes of queries and documents, by role.

  Args:
    options: options of `embed`.
  """
  return {role: options.get(role, '') for role in _ROLES}


def _frame(
  most: int,
  size: int,
  examples: Iterable[Texts],
  lengths: framing.Lengths,
  ids: special_ids.Framing,
  *,
  teacher: bool = False,
) -> framing.Batch:
  """Frames a row of at most `most` texts, with vectors of size `size`."""
  del teacher
  sizes = dict.fromkeys(('segments', 'positions', 'tokens'), lengths.encoder)
  row = {f'encoder_{x}': np.zeros(n, np.int32) for x, n in sizes.items()}
  row['encoder_tokens'] += ids.encoder.pad
  row |= {name: np.zeros(most, np.int32) for name in _AXES}
  row |= {x: np.zeros(most, np.float32) for x in ('weights', 'relevance')}
  row['vectors'] = np.zeros((most, size), np.float32)
  start = slot = 0
  for example in examples:
    query, count = slot, len(example.targets)
    of_example = slice(query, query + count)
    row['weights'][query], row['owners'][of_example] = 1, query
    row['roles'][of_example] = np.minimum(np.arange(count) + 1, NEGATIVE)
    if example.scores is not None:
      weights = np.exp(example.scores - example.scores.max())
      row['relevance'][query + 1 : query + count] = weights / weights.sum()
    if example.vectors is not None:
      row['vectors'][of_example] = example.vectors.reshape(count, -1)
    ends = np.cumsum(example.targets)[:-1]
    for slot, tokens in enumerate(np.split(example.inputs, ends), query):
      framed = ids.encoder.frame(tokens, 'encoder')
      stop = start + len(framed)
      row['encoder_tokens'][start:stop] = framed
      row['encoder_segments'][start:stop] = slot + 1
      row['encoder_positions'][start:stop] = np.arange(stop - start)
      # 31 bits, as fields are int32.
      row['keys'][slot] = zlib.crc32(tokens.astype('<i4').tobytes()) >> 1
      start = stop
    slot += 1
  return row


def _check(rows: framing.Batch, ids: special_ids.Framing, **rules: Any) -> None:
  """Checks that every text starts with BOS, or ends with EOS (T5's).

  Raises:
    ValueError: a text does not.
  """
  del rules  # Rules of targets.
  first = (rows['encoder_positions'] == 0) & (rows['encoder_segments'] > 0)
  rule, token, at = 'start with BOS', ids.encoder.bos, first
  if ids.encoder.ends_with_eos:
    rule, token = 'end with EOS', ids.encoder.eos
    at = framing.at_eos(rows['encoder_segments'], ids.encoder)
  if (rows['encoder_tokens'][at] != token).any():
    raise ValueError(f'batch framing: a text does not {rule}')


def _numbers(
  name: str, values: Sequence[Any] | None, shape: tuple[int, ...]
) -> np.ndarray | None:
  """Returns a field as float32; None without the field.

  Raises:
    UserError: the values are not numbers of this shape, finite in float16.
  """
  if values is None:
    return None
  try:
    # The records' dtype: larger numbers would be infinite.
    with np.errstate(over='ignore'):
      array = np.array(values, np.float16).astype(np.float32)
  except (TypeError, ValueError):  # Lists of unequal lengths, or texts.
    array = np.zeros(0)
  if array.shape != shape or not np.isfinite(array).all():
    raise errors.UserError(
      f'its {name} are {str(values)[:60]}; they must be numbers of shape'
      f' {list(shape)}, up to 65504 (config.data.objective)'
    )
  return array


OBJECTIVES = {
  'embed': example_maker.Name(
    Embed,
    'which text belongs to a query (`embed:` sources), by vectors of texts',
  ),
}
