"""Objectives: a document's tokens become (inputs, targets) pairs.

| name              | inputs                       | targets               |
|-------------------|------------------------------|-----------------------|
| causal_lm         | none                         | the window            |
| prefix_lm         | its first half               | its second half       |
| prefix_lm_uniform | up to a uniform split        | what follows          |
| ul2               | mode token, the window with  | per span its sentinel |
|                   | a sentinel for every span    | and its tokens        |

`prefix_lm` splits exactly in half, as T5Gemma does (arXiv:2504.06225). The
uniform split is in [1, window), as in Wang et al. (arXiv:2204.05832). `ul2`
has the seven published denoisers (Tay et al., arXiv:2205.05131, table 1), one
drawn uniformly per window, with spans drawn as T5 does (arXiv:1910.10683:
random partitions of noise and of the rest, alternating, noise last); so the S
denoiser, with its one span, hides exactly the last quarter. The papers say
neither what mixture rates nor what sentinels Google used for T5Gemma.

A document is cut into windows that fit whatever is drawn, with the framing of
`data/batch.py` (m + 1 encoder and n decoder positions). Targets end in EOS
where, and only where, the document ends.

Pure numpy; this module imports neither TensorFlow nor SeqIO nor jax.
"""

import abc
import bisect
from collections.abc import Iterator, Mapping, Sequence
import dataclasses
from typing import Protocol

import numpy as np

from encdec_adapt.data import batch
from encdec_adapt.runtime import errors

SENTINEL_POLICIES = ('unique', 'recycle')


class SpecialIds(Protocol):
  """What objectives need to know of a vocabulary."""

  path: str
  eos: int
  sentinels: Sequence[int]
  mode_ids: Mapping[str, int]


class Objective(abc.ABC):
  """Cuts documents into windows and makes a pair of each.

  Attributes:
    name: as in the module's table.
    lengths: row lengths that every pair fits.
    largest: size in tokens of the largest window.
    draws: whether anything is random.
  """

  name: str
  draws = False

  def __init__(self, lengths: batch.Lengths, eos: int):
    self.lengths = lengths
    self._eos = np.array([eos], np.int32)
    self._check_lengths()
    self.largest = self._capacity(False)
    self._largest_at_end = self._capacity(True)
    if self._largest_at_end < 1:
      raise errors.UserError(
        f'objective {self.name!r}: no window fits encoder length'
        f' {lengths.encoder} and decoder length {lengths.decoder}; make them'
        ' longer'
      )

  def _check_lengths(self) -> None:
    if self.lengths.encoder < 1:
      raise errors.UserError(
        f'objective {self.name!r} has inputs, but the encoder length is'
        f' {self.lengths.encoder}; give one, or use causal_lm'
      )

  @abc.abstractmethod
  def sizes(self, window: int) -> tuple[int, int]:
    """Most tokens of inputs and of targets (no EOS) for a window's size."""

  def _capacity(self, ends_document: bool) -> int:
    """The largest window that fits whatever is drawn."""

    # `sizes` does not decrease with the window, so bisection finds it.
    def exceeds(window: int) -> bool:
      inputs, targets = self.sizes(window)
      encoder = inputs + 1 if self.lengths.encoder else 0
      return (
        encoder > self.lengths.encoder
        or targets + ends_document > self.lengths.decoder
      )

    most = 2 * (self.lengths.encoder + self.lengths.decoder) + 1
    return bisect.bisect_left(range(1, most), True, key=exceeds)

  def segments(self, tokens: np.ndarray) -> Iterator[tuple[np.ndarray, bool]]:
    """Cuts a document into windows, all of it, in order.

    Args:
      tokens: int32 [n], n > 0.

    Yields:
      A window of at least one token, and whether the document ends there.
    """
    left = tokens
    while len(left) > self._largest_at_end:
      # EOS needs room in the last window, so something is left for it.
      size = min(self.largest, len(left) - 1)
      yield left[:size], False
      left = left[size:]
    yield left, True

  @abc.abstractmethod
  def split(
    self, window: np.ndarray, rng: np.random.Generator | None
  ) -> batch.Pair:
    """Inputs and targets of a window, without EOS."""

  def __call__(
    self,
    window: np.ndarray,
    ends_document: bool,
    rng: np.random.Generator | None,
  ) -> batch.Pair:
    """Makes the pair of a window.

    Args:
      window: int32 [w], as `segments` gives it.
      ends_document: whether the targets get an EOS.
      rng: the window's own generator; all that is drawn comes from it. None
        will do for an objective that draws nothing.

    Returns:
      Inputs and targets, int32, that fit the lengths.
    """
    inputs, targets = self.split(window, rng)
    if ends_document:
      targets = np.concatenate([targets, self._eos])
    return batch.Pair(inputs, targets)

  def span_counts(self, pair: batch.Pair) -> tuple[int, int]:
    """Spans of a pair, and how many of them share an id with another."""
    del pair
    return 0, 0


class CausalLM(Objective):
  """All of the window is predicted."""

  name = 'causal_lm'

  def _check_lengths(self):
    if self.lengths.encoder:
      raise errors.UserError(
        f'objective {self.name!r} has no inputs, but the encoder length is'
        f' {self.lengths.encoder}; it has to be 0'
      )

  def sizes(self, window):
    return 0, window

  def split(self, window, rng):
    return batch.Pair(np.zeros(0, np.int32), window)


class PrefixLM(Objective):
  """The second half is predicted from the first, the shorter one if odd."""

  name = 'prefix_lm'

  def sizes(self, window):
    return window // 2, window - window // 2

  def split(self, window, rng):
    middle = len(window) // 2
    return batch.Pair(window[:middle], window[middle:])


class UniformPrefixLM(Objective):
  """What follows a uniformly drawn split is predicted."""

  name = 'prefix_lm_uniform'
  draws = True

  def sizes(self, window):
    # An input is at most window - 1 tokens. One less than would fit, so that
    # two windows with complementary splits fill a row, the second BOS too.
    return window, max(window - 1, 1)

  def split(self, window, rng):
    middle = int(rng.integers(1, len(window))) if len(window) > 1 else 0
    return batch.Pair(window[:middle], window[middle:])


@dataclasses.dataclass(frozen=True)
class Denoiser:
  """A setting of span corruption.

  Attributes:
    mode: 'R', 'S' or 'X', the mode token it is announced by.
    mean: mu, mean length of a span in tokens; None for one span.
    density: r, share of the tokens that are hidden.
  """

  mode: str
  mean: float | None
  density: float

  def counts(self, length: int) -> tuple[int, int]:
    """Hidden tokens and spans in `length` tokens; at least one of each."""
    noise = min(max(round(length * self.density), 1), max(length - 1, 1))
    if self.mean is None:
      return noise, 1
    spans = max(round(noise / self.mean), 1)
    return noise, min(spans, noise, max(length - noise, 1))


# (mu, r) of the paper; S is (L/4, 0.25) with one span.
UL2_DENOISERS = (
  Denoiser('R', 3, 0.15),
  Denoiser('R', 8, 0.15),
  Denoiser('S', None, 0.25),
  Denoiser('X', 3, 0.5),
  Denoiser('X', 8, 0.5),
  Denoiser('X', 64, 0.15),
  Denoiser('X', 64, 0.5),
)


class UL2(Objective):
  """A mixture of denoisers, one drawn uniformly per window."""

  name = 'ul2'
  draws = True

  def __init__(
    self, lengths: batch.Lengths, vocabulary: SpecialIds, policy: str
  ):
    self.denoisers = UL2_DENOISERS
    self.policy = policy
    self._sentinels = np.array(vocabulary.sentinels, np.int32)
    self._modes = {
      mode: np.array([i], np.int32) for mode, i in vocabulary.mode_ids.items()
    }
    if policy not in SENTINEL_POLICIES:
      raise errors.UserError(
        f'sentinel policy {policy!r}: it is one of {SENTINEL_POLICIES}'
      )
    if not len(self._sentinels) or set(self._modes) != {'R', 'S', 'X'}:
      raise errors.UserError(
        f'objective {self.name!r}: the vocabulary {vocabulary.path!r} has no'
        ' pieces <unused0> .. <unused98>, which sentinels and mode tokens'
        ' are taken from; use one that has them'
      )
    self._is_sentinel = np.zeros(self._sentinels.max() + 1, bool)
    self._is_sentinel[self._sentinels] = True
    super().__init__(lengths, vocabulary.eos)
    spans = max(denoiser.counts(self.largest)[1] for denoiser in self.denoisers)
    if policy == 'unique' and spans > len(self._sentinels):
      raise errors.UserError(
        f'objective {self.name!r}: a window of {self.largest} tokens has up to'
        f' {spans} spans and the vocabulary {vocabulary.path!r} only'
        f' {len(self._sentinels)} sentinels. Make the lengths shorter (they'
        f' are {lengths.encoder} and {lengths.decoder}), set the sentinel'
        ' policy to "recycle", which uses the ids again in order, or use a'
        ' vocabulary with more <unused> pieces'
      )

  def sizes(self, window):
    inputs = targets = 0
    for denoiser in self.denoisers:
      noise, spans = denoiser.counts(window)
      # One more input for the mode token.
      inputs = max(inputs, 1 + window - noise + spans)
      targets = max(targets, noise + spans)
    return inputs, targets

  def split(self, window, rng):
    denoiser = self.denoisers[int(rng.integers(len(self.denoisers)))]
    noise, spans = denoiser.counts(len(window))
    sentinels = self._sentinels[np.arange(spans) % len(self._sentinels)]
    pair = corrupt_spans(
      window,
      partition(len(window) - noise, spans, rng),
      partition(noise, spans, rng),
      sentinels,
    )
    inputs = np.concatenate([self._modes[denoiser.mode], pair.inputs])
    return batch.Pair(inputs, pair.targets)

  def span_counts(self, pair):
    low = pair.targets[pair.targets < len(self._is_sentinel)]
    times = np.bincount(low[self._is_sentinel[low]])
    return int(times.sum()), int(times[times > 1].sum())


def partition(total: int, parts: int, rng: np.random.Generator) -> np.ndarray:
  """Uniformly random lengths, each at least 1, with the sum `total`.

  Args:
    total: at least `parts`; or any number for one part.
    parts: at least 1.
    rng: drawn from only if there is a choice.

  Returns:
    int64 [parts].
  """
  if parts == 1:
    return np.array([total])
  bounds = np.empty(parts + 1, np.int64)
  bounds[0], bounds[-1] = 0, total
  bounds[1:-1] = np.sort(rng.choice(total - 1, parts - 1, replace=False)) + 1
  return bounds[1:] - bounds[:-1]


def corrupt_spans(
  window: np.ndarray,
  kept: np.ndarray,
  hidden: np.ndarray,
  sentinels: np.ndarray,
) -> batch.Pair:
  """Replaces spans by sentinels.

  Args:
    window: int32 [w].
    kept: int [k], lengths of the runs that stay, each before its span.
    hidden: int [k], lengths of the spans; kept and hidden sum to w.
    sentinels: int32 [k], one per span.

  Returns:
    Inputs, kept_0 sentinel_0 kept_1 sentinel_1 .., and targets, sentinel_0
    hidden_0 sentinel_1 hidden_1 ...
  """
  kept_before, hidden_after = np.cumsum(kept), np.cumsum(hidden)
  hidden_before = hidden_after - hidden
  step = np.zeros(len(window) + 1, np.int8)
  step[kept_before + hidden_before] = 1
  step[kept_before + hidden_after] = -1
  is_hidden = np.cumsum(step[:-1]).astype(bool)
  return batch.Pair(
    _insert(window[~is_hidden], kept_before, sentinels),
    _insert(window[is_hidden], hidden_before, sentinels),
  )


def _insert(
  tokens: np.ndarray, places: np.ndarray, sentinels: np.ndarray
) -> np.ndarray:
  """`np.insert` before rising places of `tokens`, three times as fast."""
  at = places + np.arange(len(places))
  result = np.empty(len(tokens) + len(places), np.int32)
  is_token = np.ones(len(result), bool)
  is_token[at] = False
  result[at] = sentinels
  result[is_token] = tokens
  return result


OBJECTIVES = ('causal_lm', 'prefix_lm', 'prefix_lm_uniform', 'ul2')


def make_objective(
  name: str,
  lengths: batch.Lengths,
  vocabulary: SpecialIds,
  *,
  sentinel_policy: str = 'unique',
) -> Objective:
  """Makes an objective by its name (the module's table).

  Args:
    name: one of `OBJECTIVES`.
    lengths: row lengths that every pair has to fit.
    vocabulary: gives EOS, sentinels and mode tokens.
    sentinel_policy: 'unique', every span of a window has an id of its own, or
      'recycle', the ids are used again in order where there are more spans.

  Raises:
    UserError: there is no such objective or policy, the lengths do not suit
      it, or the vocabulary has too few sentinels for it.
  """
  if name == 'ul2':
    return UL2(lengths, vocabulary, sentinel_policy)
  for kind in (CausalLM, PrefixLM, UniformPrefixLM):
    if kind.name == name:
      return kind(lengths, vocabulary.eos)
  raise errors.UserError(f'objective {name!r}: it is one of {OBJECTIVES}')
