"""Texts to embed: queries, their positives and negatives (`embed:..` sources).

| name  | reads                               | learns                         |
|-------|-------------------------------------|--------------------------------|
| embed | a query, a positive and, if any,    | to find the positive by the    |
|       | negatives                           | query's vector                 |

An embedding model (`config.model.embedding`) reads every text by itself: BOS
and the text, behind the prefix of its role (`query`, `document`). A row holds
several texts, each a segment, of one or several examples; `texts` (8) is the
most of a row. Of an example with more negatives the first are kept, and one
that is longer than a row is dropped, or with `too_long=truncate` its longest
texts are cut; the manifest counts all of these. Fields of a row, besides the
encoder's tokens, for M texts and Q = M / 2 queries:

| field     | content                                                          |
|-----------|------------------------------------------------------------------|
| queries   | [Q] index of the text that is the query, 0 without one           |
| positives | [Q] index of its positive                                        |
| weights   | [Q] 1 for each query, else 0                                     |
| roles     | [M] NONE, QUERY, POSITIVE or NEGATIVE                            |
| owners    | [M] index of the text's query in `queries`                       |
| keys      | [M] checksum of its tokens: equal texts have equal ones          |
| relevance | [M] softmax of the teacher's scores over the positive and        |
|           | negatives of the example; 0 without scores                       |
| vectors   | [M, E] the given vectors (`vectors=E`), else 0                   |

Scores and vectors are stored in float16. Pure numpy; this module imports
neither TensorFlow nor SeqIO nor jax.
"""

import collections
from collections.abc import Sequence
import json
from typing import Any, NamedTuple
import zlib

import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.objectives import example_maker, framing, supervised
from encdec_adapt.tokenizers import vocabulary as vocabulary_lib

NONE, QUERY, POSITIVE, NEGATIVE = range(4)


class Texts(NamedTuple):
  """A query, its positive and negatives.

  Attributes:
    inputs: their tokens in this order, concatenated.
    counts: number of tokens of each.
    scores: [texts - 1], of the positive and negatives; None without.
    vectors: [texts * E], the vectors in a row; None without.
    documents: id of the document.
  """

  inputs: np.ndarray
  counts: np.ndarray
  scores: np.ndarray | None = None
  vectors: np.ndarray | None = None
  documents: tuple[str, ...] = ()

  @property
  def targets(self) -> np.ndarray:
    """What the manifest counts as targets: the texts."""
    return self.counts

  @property
  def target_tokens(self) -> int:
    """Number of texts."""
    return len(self.counts)

  def positions(self, lengths: framing.Lengths) -> tuple[int, int]:
    """Returns positions with BOS, and texts; see `Embed.capacity`."""
    del lengths
    return len(self.inputs) + len(self.counts), len(self.counts)


def _number(name: str, least: int) -> example_maker.Option:
  def parse(text: str) -> int:
    if int(text) < least:
      raise ValueError
    return int(text)

  return example_maker.Option(parse, f'{name}=N, at least {least}')


class Embed(example_maker.ExampleMaker):
  """Queries with positives and negatives; see the module's docstring."""

  options = {
    'texts': _number('texts', 2),
    'vectors': _number('vectors', 1),
    'too_long': supervised.Supervised.options['too_long'],
    'query': supervised.text_option('query'),
    'document': supervised.text_option('document'),
  }
  reads = 'text'
  documents = 'embed'
  feeds = 'encoder'
  rows = 'texts'
  one_vocabulary = 'it has no decoder'
  fields = (
    example_maker.RowField('inputs', side='encoder'),
    example_maker.RowField('counts', 'count'),
    example_maker.RowField('scores', 'float32'),
    example_maker.RowField('vectors', 'float32'),
  )
  example = Texts
  axes = dict.fromkeys(
    ('queries', 'positives', 'weights', 'roles', 'owners', 'keys')
    + ('relevance',),
    ('batch', None),
  ) | {'vectors': ('batch', None, None)}

  def __init__(
    self,
    name: str,
    lengths: framing.Lengths,
    vocabulary: vocabulary_lib.Vocabulary,
    *,
    texts: int = 8,
    vectors: int = 0,
    too_long: str = 'drop',
    query: str = '',
    document: str = '',
  ):
    """Takes the options.

    Args:
      name: name of the objective, for errors.
      lengths: row lengths that every example has to fit.
      vocabulary: vocabulary of the texts.
      texts: most texts of a row.
      vectors: size of the given vectors; 0 without.
      too_long: 'drop' examples that are longer than a row, or 'truncate' them.
      query: text before queries.
      document: text before positives and negatives.
    """
    super().__init__(name, lengths)
    self._encode, self._texts, self._size = vocabulary.encode, texts, vectors
    self._truncates, self._prefixes = too_long == 'truncate', (query, document)
    names = ('dropped', 'truncated', 'negatives_left_out')
    self.counts = collections.Counter(dict.fromkeys(names, 0))

  @classmethod
  def capacity(cls, lengths, options):
    return framing.Lengths(lengths.encoder, options.get('texts', 8))

  @classmethod
  def frame_options(cls, options):
    return {k: options[k] for k in ('texts', 'vectors') if k in options}

  def examples(self, documents, generator):
    for name, content in documents:
      try:
        example = self._example(*json.loads(content))
      except errors.UserError as error:
        if not self.skips_bad:
          raise errors.UserError(
            f'example {self.locate(name)}: {error}; or leave such examples out:'
            " config.data.bad_documents='skip'"
          ) from error
        self.counts['bad_documents'] += 1
        continue
      if example is not None:
        yield example._replace(documents=(name,))

  def _example(
    self, texts: list[str], scores: list[Any], vectors: list[Any]
  ) -> Texts | None:
    """Returns the example of a document; None if it is dropped.

    Raises:
      UserError: a text is empty or no text, or there are not as many scores or
        vectors as texts, or vectors of another size.
    """
    roles = ['query', 'positive'] + ['negative'] * (len(texts) - 2)
    for role, text in zip(roles, texts, strict=True):
      if not isinstance(text, str) or not text.strip():
        raise errors.UserError(f'its {role} is {text!r:.60}, and has no text')
    scores = _numbers('scores', scores, (len(texts) - 1,))
    if (vectors is not None) != (self._size > 0):
      raise errors.UserError(
        f'it has {"" if vectors else "no "}vectors, and config.data.objective'
        f' {self.name!r} the option vectors={self._size}; name the field in'
        ' config.data.source, and their size in the option'
      )
    vectors = _numbers('vectors', vectors, (len(texts), self._size))
    self.counts['negatives_left_out'] += max(0, len(texts) - self._texts)
    tokens = [
      self._encode(self._prefixes[i > 0] + text)
      for i, text in enumerate(texts[: self._texts])
    ]
    room = self.lengths.encoder - len(tokens)  # Beside BOS of each.
    if sum(map(len, tokens)) > room:
      self.counts['truncated' if self._truncates else 'dropped'] += 1
      if not self._truncates or room < len(tokens):
        return None
      # The longest are cut to a common length.
      longest = max(map(len, tokens))
      while sum(min(len(x), longest) for x in tokens) > room:
        longest -= 1
      tokens = [x[:longest] for x in tokens]
    return Texts(
      np.concatenate(tokens),
      np.array([len(x) for x in tokens], np.int32),
      None if scores is None else scores[: len(tokens) - 1],
      None if vectors is None else vectors[: len(tokens)].reshape(-1),
    )

  @classmethod
  def frame(cls, examples, lengths, ids, *, teacher=False, texts=8, vectors=0):
    """Frames a row; see the module's docstring and `framing.frame_row`."""
    del teacher
    names = 'segments', 'positions'
    row = {f'encoder_{x}': np.zeros(lengths.encoder, np.int32) for x in names}
    row['encoder_tokens'] = np.full_like(
      row['encoder_segments'], ids.encoder.pad
    )
    for name in cls.axes:
      size = (
        texts // 2 if name in ('queries', 'positives', 'weights') else texts
      )
      dtype = np.float32 if name in ('weights', 'relevance') else np.int32
      row[name] = np.zeros(size, dtype)
    row['vectors'] = np.zeros((texts, vectors), np.float32)
    start = slot = 0
    for number, example in enumerate(examples):
      count = len(example.counts)
      row['queries'][number], row['positives'][number] = slot, slot + 1
      row['weights'][number] = 1
      of_example = slice(slot, slot + count)
      row['owners'][of_example] = number
      row['roles'][of_example] = np.minimum(np.arange(count) + 1, NEGATIVE)
      if example.scores is not None:
        weights = np.exp(example.scores - example.scores.max())
        row['relevance'][slot + 1 : slot + count] = weights / weights.sum()
      if example.vectors is not None:
        row['vectors'][of_example] = example.vectors.reshape(count, -1)
      ends = np.cumsum(example.counts)[:-1]
      for tokens in np.split(example.inputs, ends):
        stop = start + 1 + len(tokens)
        row['encoder_tokens'][start:stop] = [ids.encoder.bos, *tokens]
        row['encoder_segments'][start:stop] = slot + 1
        row['encoder_positions'][start:stop] = np.arange(stop - start)
        key = zlib.crc32(tokens.astype(np.int32).tobytes())
        row['keys'][slot] = key & 0x7FFFFFFF
        start, slot = stop, slot + 1
    return row

  @classmethod
  def check(cls, rows, ids, **options):
    """Checks that every text starts with BOS, and that padding has no query.

    Raises:
      ValueError: names the broken rule.
    """
    first = (rows['encoder_positions'] == 0) & (rows['encoder_segments'] > 0)
    if (rows['encoder_tokens'][first] != ids.encoder.bos).any():
      raise ValueError('batch framing: a text does not start with BOS')
    if (rows['weights'].sum(1) != (rows['roles'] == QUERY).sum(1)).any():
      raise ValueError('batch framing: weights are not those of the queries')


def _numbers(
  name: str, values: Sequence[Any] | None, shape: tuple[int, ...]
) -> np.ndarray | None:
  """Returns the numbers of a field, float32; None without the field.

  Raises:
    UserError: they are no finite numbers of this shape.
  """
  if values is None:
    return None
  try:
    array = np.array(values, np.float32)
  except ValueError:  # Lists of unequal lengths.
    array = np.zeros(0)
  if array.shape != shape or not np.isfinite(array).all():
    raise errors.UserError(
      f'its {name} are {str(values)[:60]}; they must be numbers of shape'
      f' {list(shape)}'
    )
  return array


OBJECTIVES = {
  'embed': example_maker.Name(
    Embed,
    'which text belongs to a query (`embed:` sources), by vectors of texts',
  ),
}
