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

A document is cut into windows that fit a row, with the framing of
`data/batch.py` (m + 1 encoder and n decoder positions). UL2's denoiser is
drawn before its window is cut, which is then as long as this denoiser allows,
like T5's windows of a fixed length after corruption; `UL2` says where it is
shorter. Targets end in EOS where, and only where, the document ends.

Pure numpy; this module imports neither TensorFlow nor SeqIO nor jax.
"""

import abc
import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import itertools
from typing import Protocol

import numpy as np

from encdec_adapt.cli import errors
from encdec_adapt.data import batch

SENTINEL_POLICIES = ('unique', 'recycle')


class SpecialIds(Protocol):
  """What objectives need to know of a vocabulary."""

  path: str
  eos: int
  sentinels: Sequence[int]
  mode_ids: Mapping[str, int]


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

  def sizes(self, window: int) -> tuple[int, int]:
    """Tokens of inputs, with the mode token, and of targets."""
    noise, spans = self.counts(window)
    return 1 + window - noise + spans, noise + spans


@dataclasses.dataclass(frozen=True)
class Plan:
  """What is decided of a window before it is cut.

  Attributes:
    inside: most tokens of a window that its document goes on after.
    last: most tokens of a document's last window, whose targets get EOS.
    denoiser: of UL2; None for other objectives.
  """

  inside: int
  last: int
  denoiser: Denoiser | None = None


class Objective(abc.ABC):
  """Cuts documents into windows and makes a pair of each.

  Attributes:
    name: as in the module's table.
    lengths: row lengths that every pair fits.
    plans: what may be planned for a window.
    draws: whether anything is random.
    reads: what of a document `pairs` takes, 'tokens' or 'text'
      (`text_split`).
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
    """What `plans` is."""

  def _longest(
    self,
    sizes: Callable[[int], tuple[int, int]],
    denoiser: Denoiser | None = None,
  ) -> Plan:
    """The plan of the longest windows that fit a row.

    Args:
      sizes: most tokens of inputs and of targets (no EOS) for a window's
        size; neither decreases with the window, so bisection finds it.
      denoiser: of the plan.
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

  @property
  def largest(self) -> int:
    """Size in tokens of the largest window."""
    return max(plan.inside for plan in self.plans)

  def draw_plan(self, rng: np.random.Generator | None) -> Plan:
    """Decides on the next window of a document."""
    del rng
    (plan,) = self.plans
    return plan

  def pairs(
    self,
    tokens: np.ndarray,
    generator: Callable[[int], np.random.Generator],
  ) -> Iterator[batch.Pair]:
    """Cuts a document into windows, all of it, in order, and pairs each.

    Args:
      tokens: int32 [n], n > 0.
      generator: gives the generator of the document's i-th window, of which
        all is drawn that concerns it; not called if nothing is.

    Yields:
      Inputs and targets, int32, that fit the lengths; the last targets end
      in EOS.
    """
    left = tokens
    for i in itertools.count():
      rng = generator(i) if self.draws else None
      plan = self.draw_plan(rng)
      ends = len(left) <= plan.last
      # EOS needs room in the last window, so something is left for it.
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
    """Inputs and targets of a window [w] as planned, without EOS."""

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

  def _make_plans(self):
    return (self._longest(lambda window: (0, window)),)

  def split(self, window, plan, rng):
    return batch.Pair(np.zeros(0, np.int32), window)


class PrefixLM(Objective):
  """The second half is predicted from the first, the shorter one if odd."""

  name = 'prefix_lm'

  def _make_plans(self):
    return (self._longest(lambda window: (window // 2, window - window // 2)),)

  def draw_cut(self, rng: np.random.Generator | None) -> Callable[[int], int]:
    """Decides where a window is split: its size -> size of its prefix."""
    del rng
    return lambda size: size // 2

  def split(self, window, plan, rng):
    middle = self.draw_cut(rng)(len(window))
    return batch.Pair(window[:middle], window[middle:])


class UniformPrefixLM(PrefixLM):
  """What follows a uniformly drawn split is predicted."""

  name = 'prefix_lm_uniform'
  draws = True

  def _make_plans(self):
    # An input is at most window - 1 tokens. One less than would fit, so that
    # two windows with complementary splits fill a row, the second BOS too.
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


# Where windows are shortened: to a share drawn uniformly from these.
_SHARES = (0.25, 0.75)
_FULL = 0.97  # What counts as a full side of a row.


class UL2(Objective):
  """A mixture of denoisers, one drawn uniformly per window.

  A window is as long as its denoiser allows, where each one's then fills the
  same side of a row by itself: the encoder's, if both are equally long. With
  other lengths some denoisers fill the inputs and some the targets, and no
  two such windows could share a row, each with one side half empty. There
  the window is a share of that length, drawn from `_SHARES`, so that
  windows of every size fill each other's gaps.
  """

  name = 'ul2'
  draws = True

  def __init__(
    self, lengths: batch.Lengths, vocabulary: SpecialIds, policy: str
  ):
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
        ' tokens that serve as sentinels and modes (<unused0> .. of Gemma,'
        ' <|reserved_special_token_0|> .. of Llama 3); add some at its end'
        ' with config.data.add_sentinels, or use one that has them'
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
    """Whether the longest windows of all denoisers fill the same side."""
    sizes = np.array([plan.denoiser.sizes(plan.inside) for plan in self.plans])
    used = (sizes + [1, 0]) / [self.lengths.encoder, self.lengths.decoder]
    return bool((used >= _FULL).all(axis=0).any())

  def _check_sentinels(self, vocabulary: SpecialIds) -> None:
    share = _SHARES[1] if self._shortened else 1.0
    spans, window = max(
      (plan.denoiser.counts(int(share * plan.inside))[1], plan.inside)
      for plan in self.plans
    )
    if spans > len(self._sentinels):
      raise errors.UserError(
        f'objective {self.name!r}: a window of {int(share * window)} tokens'
        f' has up to {spans} spans and the vocabulary {vocabulary.path!r} only'
        f' {len(self._sentinels)} sentinels. Make the lengths shorter (they'
        f' are {self.lengths.encoder} and {self.lengths.decoder}), set the'
        ' sentinel policy to "recycle", which uses the ids again in order, or'
        ' add sentinels with config.data.add_sentinels'
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
