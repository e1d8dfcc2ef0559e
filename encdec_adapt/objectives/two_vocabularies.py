"""PrefixLM for an encoder and a decoder with different vocabularies.

Documents are cut into windows, and windows split, in tokens of the decoder's
vocabulary; the text of the inputs (before the split, or after it in
`reverse_prefix_lm`) is then encoded with the encoder's vocabulary. Both sides
see the same characters as with a shared vocabulary, and a teacher, which has
the decoder's vocabulary, reads the prefix in the split tokens.

Windows and splits end at character boundaries: a split inside a character moves
back, and a window that cannot (a character with more tokens than a row) has no
inputs. A window too long for the encoder, in its tokens, or for the decoder is
shortened until it fits both.

Must not import TensorFlow, SeqIO or JAX.
"""

from collections.abc import Callable, Iterator
import itertools
from typing import Any, NamedTuple

import numpy as np

from encdec_adapt.objectives import example_maker, framing
from encdec_adapt.tokenizers import vocabulary as vocabulary_lib


class _Document(NamedTuple):
  """A document in the decoder's tokens.

  Attributes:
    text: text of the document.
    tokens: int32 [n].
    characters: int32 [n + 1], number of characters before each token, -1
      inside a character.
    nearest: int [n + 1], the last character boundary up to each index.
  """

  text: str
  tokens: np.ndarray
  characters: np.ndarray
  nearest: np.ndarray


class _Window(NamedTuple):
  """A window of a document, in token indices.

  Attributes:
    prefix: range of the inputs.
    predicted: range of the targets.
    stop: end of the window.
    inputs: inputs in the encoder's tokens.
    ends: whether it is the last window of the document.
  """

  prefix: slice
  predicted: slice
  stop: int
  inputs: np.ndarray
  ends: bool


class TextSplit(example_maker.ExampleMaker):
  """Makes the examples of a PrefixLM objective with two vocabularies."""

  reads = 'text'

  def __init__(
    self,
    maker: Any,
    encoder: vocabulary_lib.Vocabulary,
    decoder: vocabulary_lib.Vocabulary,
  ):
    """Wraps a maker.

    Args:
      maker: `windows.PrefixLM` for the decoder's vocabulary, without
        `concatenate` (untyped, as `windows` imports this module).
      encoder: vocabulary of the encoder.
      decoder: vocabulary of the decoder.
    """
    super().__init__(maker.name, maker.lengths)
    self._maker = maker
    self._encoder, self._decoder = encoder, decoder

  def examples(self, documents, generator, policy=example_maker.POLICY):
    for name, text in documents:
      for pair in self.pairs(
        text, lambda i, name=name: generator(f'{name}#{i}')
      ):
        yield pair._replace(documents=(name,))

  def pairs(
    self, text: str, generator: Callable[[int], np.random.Generator]
  ) -> Iterator[framing.Pair]:
    """Cuts a document into windows, in order, and makes a pair of each.

    Args:
      text: text of the document.
      generator: see `windows.WindowMaker.pairs`.

    Yields:
      Pairs with a prefix that fit the lengths; the last targets end in EOS.
    """
    document = self._read(text)
    start = 0
    for i in itertools.count():
      rng = generator(i) if self._maker.draws else None
      plan = self._maker.draw_plan(rng)
      cut = self._maker.draw_cut(rng)
      remaining = len(document.tokens) - start
      ends = remaining <= plan.last
      if ends and i and remaining < self._maker.shortest:
        self.counts['short_windows'] += 1
        return
      # Leaves a token for the last window, which needs room for EOS.
      size = remaining if ends else min(plan.inner, remaining - 1)
      window = self._fit(document, start, size, ends, cut)
      targets = document.tokens[window.predicted]
      pair = framing.Pair(
        window.inputs, targets, document.tokens[window.prefix]
      )
      has_eos = window.ends or self._maker.inner_eos
      yield self._maker.with_eos(pair) if has_eos else pair
      if window.ends:
        return
      start = window.stop  # Shortened windows end earlier.

  def _read(self, text: str) -> _Document:
    tokens, characters = self._decoder.encode_with_boundaries(text)
    # Computed once per document: windows look up their bounds.
    ends = np.where(characters >= 0, np.arange(len(characters)), 0)
    return _Document(text, tokens, characters, np.maximum.accumulate(ends))

  def _fit(
    self,
    document: _Document,
    start: int,
    size: int,
    ends: bool,
    cut: Callable[[int], int],
  ) -> _Window:
    """Returns a window of at most `size` tokens that fits a row.

    Args:
      document: the document.
      start: first token of the window.
      size: maximum number of tokens.
      ends: whether the document ends after `size` tokens.
      cut: function from window size to first part's size.
    """
    while True:
      window = self._window(document, start, size, ends, cut)
      inputs = max(len(window.inputs), _size(window.prefix))
      encoder = inputs + self.lengths.edges
      eos = max(int(ends), self._maker.inner_eos)
      decoder = _size(window.predicted) + eos
      share = min(
        self.lengths.encoder / encoder, self.lengths.decoder / decoder
      )
      if share >= 1:
        return window
      # Shrinks to the share that fits, as lengths in both vocabularies are
      # roughly proportional, and by at least one token. Terminates, as a window
      # of one token has no inputs and fits.
      size = max(min(int(size * share), window.stop - start - 1), 1)
      ends = False

  def _window(self, document, start, size, ends, cut) -> _Window:
    """Returns the window of up to `size` tokens, even if it does not fit."""
    stop = start + size
    # Splits a character with more tokens than the window, which must advance.
    if not ends and document.nearest[stop] > start:
      stop = int(document.nearest[stop])
    middle = max(start, int(document.nearest[start + cut(stop - start)]))
    prefix, predicted = slice(start, middle), slice(middle, stop)
    if self._maker.reverse:
      prefix, predicted = predicted, prefix
    first, end = document.characters[[prefix.start, prefix.stop]]
    # Part of a character has no text for the encoder, and a pair needs targets:
    # then all tokens are targets, without inputs.
    if first < 0 or end < 0 or not _size(predicted):
      prefix, predicted = slice(start, start), slice(start, stop)
      first = end = 0
    inputs = self._encoder.encode(document.text[first:end])
    return _Window(prefix, predicted, stop, inputs, ends)


def _size(tokens: slice) -> int:
  return tokens.stop - tokens.start
