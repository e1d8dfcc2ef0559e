"""PrefixLM for an encoder and a decoder with different vocabularies.

A document is cut into windows, and each window is split, in tokens of the
decoder's vocabulary; the text before the split, not its ids, is then encoded
with the encoder's vocabulary. So both sides read the same characters as with
one vocabulary, and a teacher, which has the decoder's vocabulary, reads the
prefix in the tokens that were split.

Windows and splits end at the end of a character: a split inside of one moves
back, and a window that cannot (a character of more tokens than a row) has no
prefix. A window that is too long for the encoder in its own tokens, or for the
decoder, is shortened until it fits both.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Callable, Iterator
import itertools
from typing import NamedTuple

import numpy as np

from encdec_adapt.cli import errors
from encdec_adapt.data import batch, objectives
from encdec_adapt.tokenizers import vocabularies


class _Document(NamedTuple):
  """A document in the decoder's tokens.

  Attributes:
    text: text of the document.
    tokens: int32 [n].
    characters: int32 [n + 1], characters before each token, -1 inside of one.
    nearest: int [n + 1], the last place up to this one that ends a character.
  """

  text: str
  tokens: np.ndarray
  characters: np.ndarray
  nearest: np.ndarray


class _Window(NamedTuple):
  """The split and the end of a window, and its inputs for the encoder."""

  middle: int
  stop: int
  inputs: np.ndarray
  ends: bool


class TextSplit(objectives.Objective):
  """A PrefixLM objective over two vocabularies.

  Attributes:
    plans: plans of the wrapped objective.
  """

  reads = 'text'

  def __init__(
    self, objective: objectives.Objective, opened: vocabularies.Opened
  ):
    """Wraps an objective.

    Args:
      objective: PrefixLM objective for the decoder's vocabulary.
      opened: the vocabularies.

    Raises:
      UserError: the objective has no split.
    """
    if not isinstance(objective, objectives.PrefixLM):
      raise errors.UserError(
        f'objective {objective.name!r} needs one vocabulary for both sides: it'
        ' hides tokens in what both sides read. Use prefix_lm or'
        ' prefix_lm_uniform, which split the text'
      )
    if objective.concatenate:
      raise errors.UserError(
        f'objective {objective.name!r} cannot concatenate documents with two'
        ' vocabularies; remove the option'
      )
    super().__init__(objective.name, objective.lengths)
    self._objective = objective
    self._encoder, self._decoder = opened.encoder, opened.decoder
    self.draws, self.plans = objective.draws, objective.plans
    self._eos = np.array([opened.decoder.eos], np.int32)

  def examples(self, documents, generator):
    for name, text in documents:
      for pair in self.pairs(
        text, lambda i, name=name: generator(f'{name}#{i}')
      ):
        yield pair._replace(documents=(name,))

  def pairs(
    self, text: str, generator: Callable[[int], np.random.Generator]
  ) -> Iterator[batch.Pair]:
    """Cuts a whole document into windows, in order, and pairs each.

    Args:
      text: text of the document.
      generator: see `objectives.WindowObjective.pairs`.

    Yields:
      Pairs with a prefix that fit the lengths; the last targets end in EOS.
    """
    document = self._read(text)
    at = 0
    for i in itertools.count():
      rng = generator(i) if self.draws else None
      plan = self._objective.draw_plan(rng)
      cut = self._objective.draw_cut(rng)
      left = len(document.tokens) - at
      ends = left <= plan.last
      # A token is left for the last window, which needs room for EOS.
      size = left if ends else min(plan.inside, left - 1)
      window = self._fit(document, at, size, ends, cut)
      targets = document.tokens[window.middle : window.stop]
      yield batch.Pair(
        window.inputs,
        np.concatenate([targets, self._eos]) if window.ends else targets,
        document.tokens[at : window.middle],
      )
      if window.ends:
        return
      at = window.stop

  def _read(self, text: str) -> _Document:
    tokens, characters = self._decoder.encode_with_boundaries(text)
    places = np.where(characters >= 0, np.arange(len(characters)), 0)
    return _Document(text, tokens, characters, np.maximum.accumulate(places))

  def _fit(
    self,
    document: _Document,
    at: int,
    size: int,
    ends: bool,
    cut: Callable[[int], int],
  ) -> _Window:
    """Returns a window of at most `size` tokens that fits a row.

    Args:
      document: the document.
      at: first token of the window.
      size: most tokens.
      ends: whether the document ends with this many tokens.
      cut: function from tokens of a window to tokens of its prefix.
    """
    while True:
      window = self._window(document, at, size, ends, cut)
      encoder = 1 + max(len(window.inputs), window.middle - at)
      decoder = window.stop - window.middle + ends
      share = min(
        self.lengths.encoder / encoder, self.lengths.decoder / decoder
      )
      if share >= 1:
        return window
      # A window of one token has no prefix, so this ends.
      size = max(min(int(size * share), window.stop - at - 1), 1)
      ends = False

  def _window(self, document, at, size, ends, cut) -> _Window:
    """Returns the window of up to `size` tokens, whether it fits or not."""
    stop = at + size
    if not ends and document.nearest[stop] > at:
      stop = int(document.nearest[stop])
    middle = max(at, int(document.nearest[at + cut(stop - at)]))
    if document.characters[at] < 0:
      middle = at
    text = ''
    if middle > at:
      start, end = document.characters[[at, middle]]
      text = document.text[start:end]
    return _Window(middle, stop, self._encoder.encode(text), ends)
