"""Noising objectives other than span corruption: T5 by token, BART, BERT, MEAP.

M is the mask token. The default share of hidden tokens is in parentheses; the
option `share` sets it, as in `bart_masking:share=0.3`.

T5 (arXiv:1910.10683, section 3.3; t5/data/preprocessors.py), noise by token:

| name               | inputs                             | targets            |
|--------------------|------------------------------------|--------------------|
| iid_denoising      | a sentinel per run of hidden tokens| each sentinel, then|
| (0.15)             | (a fixed number of tokens)         | its tokens         |
| mask_tokens (0.15) | each hidden token is M             | the window         |
| drop_tokens (0.15) | without the hidden tokens          | the hidden tokens  |
| replace_tokens     | random tokens replace hidden tokens| the window         |
| (0.15)             |                                    |                    |

BART (arXiv:1910.13461, section 2.2); targets are the window:

| name               | inputs                                                  |
|--------------------|---------------------------------------------------------|
| bart_masking (0.15)| hidden tokens are M                                     |
| bart_deletion      | hidden tokens are deleted (0.15)                        |
| bart_infilling     | an M for each span of Poisson(3) tokens, empty spans    |
| (0.3)              | included                                                |
| bart_permutation   | sentences in random order; a token ending in . ! ? or a |
|                    | newline ends a sentence                                 |
| bart_rotation      | rotated to begin with a random token                    |
| bart (0.3)         | the published mixture: permutation, then infilling      |

Others:

| name               | inputs                             | targets            |
|--------------------|------------------------------------|--------------------|
| bert (0.15)        | 80% of the chosen tokens are M, 10%| the window, with   |
|                    | random, 10% kept (arXiv:1810.04805)| weight on the      |
|                    |                                    | chosen tokens      |

`bert` trains encoder-only models, with new masks in every pass and without
next-sentence prediction (RoBERTa, arXiv:1907.11692).

The longest windows fill the encoder with inputs. If their targets exceed the
decoder's length, the error names lengths that fit.

MEAP (arXiv:2502.07490) is next-token prediction with 15% of the inputs replaced
by M; targets are never masked, and all have weight:

| name               | masked tokens                                           |
|--------------------|---------------------------------------------------------|
| meap (0.15)        | 0.15 n of the n tokens, stochastically rounded, in runs |
|                    | of `span` tokens (1; the paper tried 5 and 50); drawn   |
|                    | per window                                              |
| meap_shared (0.15) | the same positions in all rows of a batch, as in the    |
|                    | published code (`objectives/shared_noise.py`)           |
| meap_prefix_lm     | as `meap`, in the first half of the window (the inputs);|
| (0.15)             | targets are the second half                             |

Pure NumPy; must not import TensorFlow, SeqIO or JAX.
"""

from typing import Any

import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.objectives import (
  denoising,
  example_maker,
  framing,
  row_fields,
  windows,
)
from encdec_adapt.tokenizers import vocabulary as vocabulary_lib

_POISSON = 3.0  # Mean length of BART's spans.
_KEPT, _RANDOM = 0.1, 0.1  # BERT's shares of the chosen tokens.


SHARE = 0.15  # Share of hidden tokens where no option or name sets it.
_SHARE_OPTION = example_maker.Option(
  float, 'share=NUMBER between 0 and 1', lambda share: 0 < share < 1
)


class Noising(windows.WindowMaker):
  """Base class of objectives that noise whole windows.

  Attributes:
    needs_mask: whether the vocabulary must have a mask token.
  """

  draws = True
  options = {**windows.OPTIONS, 'share': _SHARE_OPTION}
  needs_mask = True

  @classmethod
  def hidden_shares(cls, text, options):
    return {text: (1.0, options.get('share', SHARE))}

  def __init__(
    self,
    name: str,
    lengths: framing.Lengths,
    vocabulary: vocabulary_lib.Vocabulary,
    *,
    share: float = SHARE,
    **options: Any,
  ):
    """Plans the windows.

    Args:
      name: name of the objective, for errors.
      lengths: row lengths; every pair must fit.
      vocabulary: vocabulary with a mask token, or sentinels.
      share: share of hidden tokens, in (0, 1).
      **options: see `windows.WindowMaker`.

    Raises:
      UserError: the lengths do not suit the objective, or the vocabulary has no
        mask token.
    """
    self._share = share
    self._vocabulary = vocabulary
    if self.needs_mask:
      self._mask = mask_token(name, vocabulary)
    super().__init__(name, lengths, vocabulary, **options)

  def _make_plans(self):
    plan = self._longest(lambda window: (window, self._targets(window)))
    # Otherwise, too many targets would silently shorten the windows.
    if self.lengths.encoder and self.lengths.decoder:
      targets = self._targets(self.lengths.encoder - self.lengths.edges)
      self._require_targets(targets, plan.inner + 1, 'it')
    return (plan,)

  def _targets(self, window: int) -> int:
    """Returns the maximum number of targets of a window."""
    return window

  def _count(self, size: int) -> int:
    """Returns the number of hidden tokens of a window, at least 1."""
    return max(round(size * self._share), 1)

  def _hide(self, size: int) -> int:
    """Returns the number of hidden tokens of a window, and counts them."""
    # Not in `_count`, which planning calls for windows that are never made.
    count = self._count(size)
    self._count_hidden(self.name, size, count)
    return count

  def _hidden(self, size: int, rng: np.random.Generator) -> np.ndarray:
    """Draws the hidden tokens of a window, bool [size]."""
    hidden = np.zeros(size, bool)
    hidden[rng.choice(size, self._hide(size), replace=False)] = True
    return hidden


def mask_token(name: str, vocabulary: vocabulary_lib.Vocabulary) -> int:
  """Returns the mask token: <mask> or else the last sentinel.

  Raises:
    UserError: the vocabulary has neither.
  """
  if vocabulary.mask is not None:
    return vocabulary.mask
  if not len(vocabulary.sentinels):
    raise errors.UserError(
      f'objective {name!r}: the vocabulary {vocabulary.path!r} has neither a'
      ' mask token nor sentinels; set config.data.add_sentinels=1, whose last'
      ' sentinel then is the mask'
    )
  return vocabulary.sentinels[-1]


class MaskTokens(Noising):
  """Replaces hidden tokens with the mask token; predicts the window."""

  def split(self, window, plan, rng):
    hidden = self._hidden(len(window), rng)
    return framing.Pair(np.where(hidden, np.int32(self._mask), window), window)


class DeleteTokens(Noising):
  """Deletes hidden tokens; predicts the window."""

  needs_mask = False

  def split(self, window, plan, rng):
    return framing.Pair(window[~self._hidden(len(window), rng)], window)


class DropTokens(Noising):
  """Drops hidden tokens from the inputs; predicts the dropped tokens."""

  needs_mask = False

  def _targets(self, window):
    return self._count(window)

  def split(self, window, plan, rng):
    hidden = self._hidden(len(window), rng)
    return framing.Pair(window[~hidden], window[hidden])


class ReplaceTokens(Noising):
  """Replaces hidden tokens with random text tokens; predicts the window."""

  needs_mask = False

  def split(self, window, plan, rng):
    hidden = self._hidden(len(window), rng)
    inputs = window.copy()
    inputs[hidden] = random_text(self._vocabulary, int(hidden.sum()), rng)
    return framing.Pair(inputs, window)


class IidDenoising(Noising):
  """Hides tokens at random positions, with one sentinel per run.

  The number of hidden tokens is fixed, so that the longest windows fill a row;
  T5 draws each token independently.
  """

  needs_mask = False
  one_vocabulary = denoising.Denoising.one_vocabulary

  def _make_plans(self):
    (plan,) = super()._make_plans()
    # Worst case: no hidden tokens are adjacent, and each needs a sentinel.
    required = self._count(plan.inner)
    available = len(self._vocabulary.sentinels)
    if required > available:
      raise errors.UserError(
        f'objective {self.name!r}: windows have up to {required} hidden tokens'
        f' and the vocabulary {self._vocabulary.path!r} {available} sentinels;'
        ' shorten config.data.encoder_length, or set'
        f' config.data.add_sentinels to {required}'
      )
    return (plan,)

  def _targets(self, window):
    # Worst case: as many runs as the visible tokens can separate.
    hidden = self._count(window)
    return hidden + min(hidden, window - hidden + 1)

  def split(self, window, plan, rng):
    hidden = self._hidden(len(window), rng)
    starts = np.flatnonzero(np.diff(hidden, prepend=False) & hidden)
    stops = np.flatnonzero(np.diff(hidden, append=False) & hidden) + 1
    sentinels = np.array(self._vocabulary.sentinels[: len(starts)], np.int32)
    # `insert` takes indices into the visible, or the hidden, tokens alone.
    hidden_before = np.cumsum(stops - starts) - (stops - starts)
    return framing.Pair(
      denoising.insert(window[~hidden], starts - hidden_before, sentinels),
      denoising.insert(window[hidden], hidden_before, sentinels),
    )


class Infilling(Noising):
  """Replaces spans of Poisson length with a mask each; predicts the window."""

  def split(self, window, plan, rng):
    return framing.Pair(self._infill(window, rng), window)

  def _infill(self, window: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Replaces random spans with a mask each.

    Draws spans until they cover the share of hidden tokens, truncates the last
    span, and places spans in random order between the visible tokens.
    """
    count = self._hide(len(window))
    drawn = rng.poisson(_POISSON, count + 8)  # Nearly always more than enough.
    while drawn.sum() < count:
      drawn = np.append(drawn, rng.poisson(_POISSON, count))
    last = int(np.searchsorted(np.cumsum(drawn), count))
    lengths = drawn[: last + 1]
    lengths[-1] -= lengths.sum() - count
    # At most as many masks as hidden tokens, so that inputs are never longer
    # than the window: drops surplus empty spans.
    empty = np.flatnonzero(lengths == 0)
    lengths = np.delete(lengths, empty[: max(len(lengths) - count, 0)])
    # The truncated span must not always be the last.
    rng.shuffle(lengths)
    # Visible tokens before each span. Adjacent spans keep a mask each.
    visible_before = np.sort(
      rng.integers(len(window) - count + 1, size=len(lengths))
    )
    starts = visible_before + np.cumsum(lengths) - lengths
    # `add.at`, not `+=`: an empty span starts at the same index as the next.
    hidden = np.zeros(len(window) + 1, np.int64)
    np.add.at(hidden, starts, 1)
    np.add.at(hidden, starts + lengths, -1)
    visible = window[np.cumsum(hidden[:-1]) == 0]
    masks = np.full(len(lengths), self._mask, np.int32)
    return denoising.insert(visible, visible_before, masks)


class PermuteSentences(Infilling):
  """Shuffles sentences; predicts the window."""

  options = windows.OPTIONS
  needs_mask = False

  def split(self, window, plan, rng):
    return framing.Pair(self._permute(window, rng), window)

  def _permute(
    self, window: np.ndarray, rng: np.random.Generator
  ) -> np.ndarray:
    ends = np.flatnonzero(self._vocabulary.sentence_ends[window]) + 1
    # A split at the end of the window would add an empty sentence and change
    # the permutation.
    sentences = np.split(window, ends[ends < len(window)])
    order = rng.permutation(len(sentences))
    return np.concatenate([sentences[i] for i in order])


class Bart(PermuteSentences):
  """Permutes sentences, then infills; predicts the window."""

  options = Noising.options
  needs_mask = True

  def split(self, window, plan, rng):
    return framing.Pair(self._infill(self._permute(window, rng), rng), window)


class Rotate(Noising):
  """Rotates the window to begin with a random token; predicts the window."""

  options = windows.OPTIONS
  needs_mask = False

  def split(self, window, plan, rng):
    start = int(rng.integers(len(window)))
    return framing.Pair(np.roll(window, -start), window)


class Bert(Noising):
  """Masked language modelling for encoder-only models."""

  one_vocabulary = 'it has no decoder'

  @classmethod
  def rows(cls, options):
    return row_fields.ENCODED

  def split(self, window, plan, rng):
    chosen = np.flatnonzero(self._hidden(len(window), rng))
    # One uniform draw per token selects mask, random or kept.
    uniform = rng.random(len(chosen))
    inputs = window.copy()
    inputs[chosen[uniform >= _KEPT]] = self._mask
    replaced = chosen[uniform >= 1 - _RANDOM]
    inputs[replaced] = random_text(self._vocabulary, len(replaced), rng)
    weights = np.zeros(len(window), np.float32)
    weights[chosen] = 1
    return framing.Pair(inputs, window, weights=weights)


class NextToken(Noising):
  """Next-token prediction from partly masked inputs.

  Attributes:
    plain: the same objective without masks.
  """

  plain = 'causal_lm'
  one_vocabulary = windows.CausalLM.one_vocabulary

  @classmethod
  def rows(cls, options):
    return row_fields.TEXT

  @classmethod
  def without_masks(cls, text, options):
    entries = ['concatenate'] if options.get('concatenate') else []
    if shortest := options.get('shortest'):
      entries.append(f'shortest={shortest}')
    return ':'.join(filter(None, [cls.plain, ','.join(entries)]))

  _make_plans = windows.CausalLM._make_plans


class Meap(NextToken):
  """Next-token prediction from a partly masked window."""

  options = {
    **Noising.options,
    'span': example_maker.Option(
      int, 'span=NUMBER of at least 1', lambda span: span >= 1
    ),
  }

  @classmethod
  def revisions(cls, options):
    return ('windows mask their share of tokens on average, not rounded down',)

  def __init__(self, *args, span: int = 1, **options):
    """Plans the windows; see `Noising`.

    Args:
      *args: positional arguments of `Noising`.
      span: length of a masked run in tokens, at least 1.
      **options: keyword arguments of `Noising`.
    """
    super().__init__(*args, **options)
    self._span = span

  def split(self, window, plan, rng):
    inputs = self._read(window, rng)
    return framing.Pair(np.zeros(0, np.int32), window, decoder_inputs=inputs)

  def _read(self, tokens: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    masked = self._masked(len(tokens), rng)
    self._count_hidden(self.name, len(tokens), int(masked.sum()))
    return np.where(masked, np.int32(self._mask), tokens)

  def _masked(self, size: int, rng: np.random.Generator) -> np.ndarray:
    """Draws masked tokens in runs of `span`, bool [size]; see the module."""
    # The published code rounds down, for rows of thousands of tokens; that
    # would mask far fewer tokens of short windows.
    count, remainder = divmod(size * self._share, 1)
    count = int(count) + (rng.random() < remainder)
    runs = -(-count // self._span)
    masked = np.zeros(size, bool)
    if not runs:
      return masked
    if self._span == 1:
      masked[rng.choice(size, count, replace=False)] = True
      return masked
    # Runs lie anywhere between the visible tokens; the last may be shorter.
    visible_before = np.sort(rng.integers(size - count + 1, size=runs))
    for i, visible in enumerate(visible_before):
      start = visible + i * self._span
      masked[start : min(start + self._span, visible + count)] = True
    return masked


class MeapPrefixLM(Meap):
  """PrefixLM with partly masked inputs."""

  plain = 'prefix_lm'
  one_vocabulary = 'a masked share is one of the tokens that both sides read'
  _make_plans = windows.PrefixLM._make_plans

  @classmethod
  def rows(cls, options):
    return row_fields.PAIRS

  @classmethod
  def revisions(cls, options):
    return ()

  def split(self, window, plan, rng):
    middle = len(window) // 2
    return framing.Pair(self._read(window[:middle], rng), window[middle:])


def random_text(
  vocabulary: vocabulary_lib.Vocabulary, count: int, rng: np.random.Generator
) -> np.ndarray:
  """Draws ids of text tokens (not special ids), int32 [count]."""
  return rng.choice(vocabulary.text_ids, count)


_Name, _BART = example_maker.Name, {'share': 0.3}
OBJECTIVES = {
  'meap': _Name(Meap, 'next token, 15% of what is read masked (MEAP)'),
  'meap_prefix_lm': _Name(
    MeapPrefixLM, 'second half from the first, 15% of it masked'
  ),
  'iid_denoising': _Name(IidDenoising, 'hidden tokens, 15%'),
  'mask_tokens': _Name(MaskTokens, 'the text from 85% of its tokens'),
  'drop_tokens': _Name(DropTokens, 'the dropped tokens, 15%'),
  'replace_tokens': _Name(ReplaceTokens, 'the text, 15% of it replaced'),
  'bart_masking': _Name(MaskTokens, 'the text from 85% of its tokens'),
  'bart_deletion': _Name(DeleteTokens, 'the text without 15% of its tokens'),
  'bart_infilling': _Name(
    Infilling, 'the text from spans of one mask each, 30%', _BART
  ),
  'bart_permutation': _Name(
    PermuteSentences, 'the text from its shuffled sentences'
  ),
  'bart_rotation': _Name(Rotate, 'the text from its rotation'),
  'bart': _Name(Bart, 'permutation and infilling', _BART),
  'bert': _Name(Bert, 'masked tokens in place, 15%'),
}
