"""Objectives turn a document's tokens into (inputs, targets) pairs.

| name              | inputs                       | targets               |
|-------------------|------------------------------|-----------------------|
| causal_lm         | none                         | the window            |
| prefix_lm         | its first half               | its second half       |
| prefix_lm_uniform | up to a uniform split        | what follows          |
| ul2               | mode token, the window with  | per span its sentinel |
|                   | a sentinel for every span    | and its tokens        |

`prefix_lm` splits in half, as T5Gemma does (arXiv:2504.06225). The uniform
split is in [1, window), as in Wang et al. (arXiv:2204.05832). `ul2` has the
seven published denoisers (Tay et al., arXiv:2205.05131, table 1), one drawn
uniformly per window, and draws spans as T5 does (arXiv:1910.10683: random
partitions of noise and of the rest, alternating, noise last); so the S
denoiser, with its one span, hides exactly the last quarter. The papers give
neither the mixture rates nor the sentinels that Google used for T5Gemma.

A document is cut into windows that fit a row with the framing of
`data/batch.py` (m + 1 encoder and n decoder positions). UL2's denoiser is
drawn before its window is cut, and the window is as long as this denoiser
allows, like T5's windows of fixed length after corruption; `UL2` describes
when it is shorter. Targets end in EOS if and only if the document ends.

Pure numpy; this module imports neither TensorFlow nor SeqIO nor jax.
"""

import abc
import bisect
from collections.abc import Callable, Iterator, Sequence
import dataclasses
import itertools

import numpy as np

from encdec_adapt.cli import errors
from encdec_adapt.data import batch
from encdec_adapt.tokenizers import vocabulary as vocabulary_lib

SENTINEL_POLICIES = ('unique', 'recycle')


@dataclasses.dataclass(frozen=True)
class Denoiser:
  """One setting of span corruption.

  Attributes:
    mode: mode token, 'R', 'S' or 'X'.
    mean: mu, mean length of a span in tokens; None for a single span.
    density: r, share of hidden tokens.
  """

  mode: str
  mean: float | None
  density: float

  def counts(self, length: int) -> tuple[int, int]:
    """Returns hidden tokens and spans of a window, at least one of each."""
    noise = min(max(round(length * self.density), 1), max(length - 1, 1))
    if self.mean is None:
      return noise, 1
    spans = max(round(noise / self.mean), 1)
    return noise, min(spans, noise, max(length - noise, 1))

  def sizes(self, window: int) -> tuple[int, int]:
    """Returns the tokens of inputs (with the mode token) and of targets."""
    noise, spans = self.counts(window)
    return 1 + window - noise + spans, noise + spans


@dataclasses.dataclass(frozen=True)
class Plan:
  """Decisions on a window before it is cut.

  Attributes:
    inside: most tokens of a window that does not end its document.
    last: most tokens of a document's last window, whose targets get EOS.
    denoiser: denoiser of UL2; None for other objectives.
  """

  inside: int
  last: int
  denoiser: Denoiser | None = None


class Objective(abc.ABC):
  """Cuts documents into windows and makes a pair of each.

  Attributes:
    name: name in the module's table.
    lengths: row lengths that every pair fits.
    plans: possible plans of a window.
    draws: whether anything is random.
    reads: argument of `pairs`, 'tokens' or 'text' (`text_split`).
  """

  name: str
  draws = False
  reads = 'tokens'
  plans: Sequence[Plan]

  def __init__(self, lengths: batch.Lengths, eos: int):
    self.lengths = lengths
    self._eos = np.array([eos], np.int32)
    self._check_lengths()
    self.plans = self._make_plans()
    if any(plan.last < 1 for plan in self.plans):
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
  def _make_plans(self) -> Sequence[Plan]:
    """Returns `plans`."""

  def _longest(
    self,
    sizes: Callable[[int], tuple[int, int]],
    denoiser: Denoiser | None = None,
  ) -> Plan:
    """Returns the plan of the longest windows that fit a row.

    Args:
      sizes: function from a window's size to the most tokens of inputs and of
        targets (without EOS), neither of which decreases.
      denoiser: denoiser of the plan.
    """

    def capacity(ends_document: bool) -> int:
      def exceeds(window: int) -> bool:
        inputs, targets = sizes(window)
        encoder = inputs + 1 if self.lengths.encoder else 0
        return (
          encoder > self.lengths.encoder
          or targets + ends_document > self.lengths.decoder
        )

      most = 2 * (self.lengths.encoder + self.lengths.decoder) + 1
      return bisect.bisect_left(range(1, most), True, key=exceeds)

    return Plan(capacity(False), capacity(True), denoiser)

  def draw_plan(self, rng: np.random.Generator | None) -> Plan:
    """Draws the plan of a document's next window."""
    del rng
    (plan,) = self.plans
    return plan

  def pairs(
    self,
    tokens: np.ndarray,
    generator: Callable[[int], np.random.Generator],
  ) -> Iterator[batch.Pair]:
    """Cuts a whole document into windows, in order, and pairs each.

    Args:
      tokens: int32 [n], n > 0.
      generator: returns the generator of the i-th window, which draws
        everything about it; not called if nothing is drawn.

    Yields:
      Inputs and targets, int32, that fit the lengths; the last targets end
      in EOS.
    """
    left = tokens
    for i in itertools.count():
      rng = generator(i) if self.draws else None
      plan = self.draw_plan(rng)
      ends = len(left) <= plan.last
      # A token is left for the last window, which needs room for EOS.
      size = len(left) if ends else min(plan.inside, len(left) - 1)
      pair = self.split(left[:size], plan, rng)
      if ends:
        targets = np.concatenate([pair.targets, self._eos])
        yield pair._replace(targets=targets)
        return
      yield pair
      left = left[size:]

  @abc.abstractmethod
  def split(
    self, window: np.ndarray, plan: Plan, rng: np.random.Generator | None
  ) -> batch.Pair:
    """Returns inputs and targets of a planned window [w], without EOS."""

  def shared_spans(self, pair: batch.Pair) -> int:
    """Returns the number of spans that share their sentinel with another."""
    del pair
    return 0


class CausalLM(Objective):
  """Predicts the whole window."""

  name = 'causal_lm'

  def _check_lengths(self):
    if self.lengths.encoder:
      raise errors.UserError(
        f'objective {self.name!r} has no inputs, but the encoder length is'
        f' {self.lengths.encoder}; it has to be 0'
      )

  def _make_plans(self):
    return (self._longest(lambda window: (0, window)),)

  def split(self, window, plan, rng):
    return batch.Pair(np.zeros(0, np.int32), window)


class PrefixLM(Objective):
  """Predicts the second half from the first, which is not the longer one."""

  name = 'prefix_lm'

  def _make_plans(self):
    return (self._longest(lambda window: (window // 2, window - window // 2)),)

  def draw_cut(self, rng: np.random.Generator | None) -> Callable[[int], int]:
    """Draws the split: a function from a window's size to its prefix's."""
    del rng
    return lambda size: size // 2

  def split(self, window, plan, rng):
    middle = self.draw_cut(rng)(len(window))
    return batch.Pair(window[:middle], window[middle:])


class UniformPrefixLM(PrefixLM):
  """Predicts the text after a uniformly drawn split."""

  name = 'prefix_lm_uniform'
  draws = True

  def _make_plans(self):
    # Inputs have at most window - 1 tokens, but the window is one shorter than
    # fits: two windows with complementary splits then fill a row, both BOS
    # included.
    return (self._longest(lambda window: (window, max(window - 1, 1))),)

  def draw_cut(self, rng):
    share = rng.random()
    return lambda size: 1 + int(share * (size - 1)) if size > 1 else 0


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


_SHARES = (0.25, 0.75)  # Shortened windows: bounds of their uniform share.
_FULL = 0.97  # Share of a side of a row that counts as full.


class UL2(Objective):
  """A mixture of denoisers, one drawn uniformly per window.

  If the longest window of every denoiser fills the same side of a row by
  itself (the encoder's, if both are equally long), windows are as long as
  their denoiser allows. With other lengths some denoisers fill the inputs and
  some the targets, and no two such windows could share a row, which would
  leave one side half empty. Windows then have a share of that length, drawn
  from `_SHARES`, so that windows of all sizes fill each other's gaps.
  """

  name = 'ul2'
  draws = True

  def __init__(
    self,
    lengths: batch.Lengths,
    vocabulary: vocabulary_lib.Vocabulary,
    policy: str,
  ):
    self._sentinels = np.array(vocabulary.sentinels, np.int32)
    self._modes = {
      mode: np.array([i], np.int32) for mode, i in vocabulary.mode_ids.items()
    }
    if not len(self._sentinels) or set(self._modes) != {'R', 'S', 'X'}:
      raise errors.UserError(
        f'objective {self.name!r}: the vocabulary {vocabulary.path!r} has no'
        ' sentinels and mode tokens (<unused0> .. of Gemma,'
        ' <|reserved_special_token_0|> .. of Llama 3); add some with'
        ' config.data.add_sentinels, or use one that has them'
      )
    self._is_sentinel = np.zeros(self._sentinels.max() + 1, bool)
    self._is_sentinel[self._sentinels] = True
    super().__init__(lengths, vocabulary.eos)
    self._shortened = not self._fills_one_side()
    if policy == 'unique':
      self._check_sentinels(vocabulary)

  def _make_plans(self):
    return tuple(
      self._longest(denoiser.sizes, denoiser) for denoiser in UL2_DENOISERS
    )

  def _fills_one_side(self) -> bool:
    """Returns whether all denoisers' longest windows fill the same side."""
    sizes = np.array([plan.denoiser.sizes(plan.inside) for plan in self.plans])
    used = (sizes + [1, 0]) / [self.lengths.encoder, self.lengths.decoder]
    return bool((used >= _FULL).all(axis=0).any())

  def _check_sentinels(self, vocabulary: vocabulary_lib.Vocabulary) -> None:
    share = _SHARES[1] if self._shortened else 1.0
    spans, window = max(
      (plan.denoiser.counts(int(share * plan.inside))[1], plan.inside)
      for plan in self.plans
    )
    if spans > len(self._sentinels):
      raise errors.UserError(
        f'objective {self.name!r}: a window of {int(share * window)} tokens'
        f' has up to {spans} spans and the vocabulary {vocabulary.path!r} only'
        f' {len(self._sentinels)} sentinels. Shorten the lengths'
        f' ({self.lengths.encoder} and {self.lengths.decoder}), set'
        ' config.data.sentinels to "recycle", or add some with'
        ' config.data.add_sentinels'
      )

  def draw_plan(self, rng):
    plan = self.plans[int(rng.integers(len(self.plans)))]
    if not self._shortened:
      return plan
    share = rng.uniform(*_SHARES)
    inside, last = (max(int(share * n), 1) for n in (plan.inside, plan.last))
    return dataclasses.replace(plan, inside=inside, last=last)

  def split(self, window, plan, rng):
    noise, spans = plan.denoiser.counts(len(window))
    sentinels = self._sentinels[np.arange(spans) % len(self._sentinels)]
    pair = corrupt_spans(
      window,
      partition(len(window) - noise, spans, rng),
      partition(noise, spans, rng),
      sentinels,
    )
    inputs = np.concatenate([self._modes[plan.denoiser.mode], pair.inputs])
    return batch.Pair(inputs, pair.targets)

  def shared_spans(self, pair):
    low = pair.targets[pair.targets < len(self._is_sentinel)]
    times = np.bincount(low[self._is_sentinel[low]])
    return int(times[times > 1].sum())


def partition(total: int, parts: int, rng: np.random.Generator) -> np.ndarray:
  """Draws lengths of at least 1 that sum to `total`, uniformly.

  Args:
    total: at least `parts`; or any number for one part.
    parts: number of lengths, at least 1.
    rng: used only if there is a choice.

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
    kept: int [k], lengths of the visible runs, each before its span.
    hidden: int [k], lengths of the spans; kept and hidden sum to w.
    sentinels: int32 [k], one per span.

  Returns:
    Inputs kept_0 sentinel_0 kept_1 sentinel_1 .., and targets sentinel_0
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
  """`np.insert` before increasing places, three times as fast."""
  at = places + np.arange(len(places))
  result = np.empty(len(tokens) + len(places), np.int32)
  is_token = np.ones(len(result), bool)
  is_token[at] = False
  result[at] = sentinels
  result[is_token] = tokens
  return result


_SIMPLE = {one.name: one for one in (CausalLM, PrefixLM, UniformPrefixLM)}
OBJECTIVES = (*_SIMPLE, UL2.name)


def make_objective(
  name: str,
  lengths: batch.Lengths,
  vocabulary: vocabulary_lib.Vocabulary,
  *,
  sentinel_policy: str = 'unique',
) -> Objective:
  """Makes an objective by its name (the module's table).

  Args:
    name: one of `OBJECTIVES`.
    lengths: row lengths that every pair has to fit.
    vocabulary: vocabulary with EOS, sentinels and mode tokens.
    sentinel_policy: one of `SENTINEL_POLICIES`: 'unique' refuses windows with
      more spans than sentinels, 'recycle' uses the ids again in order.

  Raises:
    UserError: the lengths do not suit the objective, or the vocabulary has
      too few sentinels.
  """
  if name == UL2.name:
    return UL2(lengths, vocabulary, sentinel_policy)
  return _SIMPLE[name](lengths, vocabulary.eos)
