"""Span corruption: mixtures of denoisers, and sentinel policies.

A denoiser hides part of a window. It is written MODE:MEAN:DENSITY, where MODE
is a mode token (R, S, X, or - for none), MEAN the mean length of a span and
DENSITY the share of hidden tokens. A mixture lists denoisers with weights:

    R:3:0.15 + X:32:0.15@2 + S:uniform@4

| denoiser             | hides                                            |
|----------------------|--------------------------------------------------|
| MODE:3:0.15          | spans of random lengths, mean 3, 15% of tokens   |
| MODE:3:0.15:normal   | the same with normally distributed lengths       |
| MODE:suffix:0.25     | the last 25%, as one span                        |
| MODE:uniform         | the text after a uniform split; has no sentinels |

Objectives:

| name            | mixture                                               |
|-----------------|-------------------------------------------------------|
| span_corruption | T5 (arXiv:1910.10683): -:3:0.15                       |
| ul2             | the seven of table 1 of Tay et al. (arXiv:2205.05131),|
|                 | drawn uniformly; S hides the last quarter             |
| ul2_published   | `ul2` as in their code (appendix 9.2): S is a uniform |
|                 | split without a sentinel, and documents are           |
|                 | concatenated                                          |
| ul2r            | U-PaLM (arXiv:2210.11399): 50% S, 25% R, 25% X, where |
|                 | X is half (32, 0.15) and half (3, 0.5), as in Levanter|
| t5gemma2        | the five of T5Gemma 2 (arXiv:2512.14856), 1:1:1:1:4   |
| denoise:MIXTURE | any other                                             |

Spans are drawn as in T5: hidden and visible tokens are each partitioned at
random into a fixed number of alternating spans, a hidden span last. The longest
windows fill the encoder with inputs (T5's `random_spans_helper`); if their
targets exceed the decoder's length, the error names lengths that fit. Windows
of `suffix` and `uniform` are the longest that fit both sides.

Every span needs a sentinel. Gemma has 96, and windows of 8192 inputs have about
2,040 spans for (3, 0.5) and 455 for (3, 0.15). Hence these policies (the papers
do not say which Google used):

| policy            | spans beyond the vocabulary's sentinels               |
|-------------------|-------------------------------------------------------|
| unique            | raise an error with the number of sentinels needed    |
| recycle           | reuse the ids in order, 21 times for (3, 0.5)         |
| extend_vocabulary | all spans use new ids at the end of the vocabulary,   |
|                   | which the model's tables must cover (2,047 at 8192)   |
| single            | all spans share the first sentinel; their order       |
|                   | distinguishes them                                    |
| limit_segment     | do not occur: windows end before sentinels run out (at|
|                   | 576 tokens for (3, 0.5)) and share rows               |

Pure NumPy; must not import TensorFlow, SeqIO or JAX.
"""

import bisect
from collections.abc import Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any

import numpy as np

from encdec_adapt.base import errors, option_strings
from encdec_adapt.objectives import example_maker, framing, windows
from encdec_adapt.tokenizers import vocabulary as vocabulary_lib

_FEW = 1000  # Up to this many, a permutation is faster than a choice.
_FEW_SPANS = 12  # Up to this many, slices are faster than masks.
# Count of spans with the same sentinel as another span of their window.
SHARED_SPANS = 'shared_sentinel_spans'
POLICIES = ('unique', 'recycle', 'extend_vocabulary', 'single', 'limit_segment')


@dataclasses.dataclass(frozen=True)
class Denoiser:
  """A setting of span corruption.

  Attributes:
    mode: mode token, 'R', 'S' or 'X'; '' for none.
    kind: 'spans', 'suffix' or 'uniform'.
    mean: mean length of a span in tokens, at least 1; for 'spans'.
    density: share of hidden tokens, in (0, 1); for 'spans' and 'suffix'.
    normal: whether span lengths are normally distributed.
    weight: relative frequency, above 0.
  """

  mode: str
  kind: str
  mean: float = 0.0
  density: float = 0.0
  normal: bool = False
  weight: float = 1.0

  @functools.cached_property
  def label(self) -> str:
    """Spelling in a mixture, without the weight."""
    setting = self.kind if self.kind != 'spans' else f'{self.mean:g}'
    share = f':{self.density:g}' if self.density else ''
    return f'{self.mode or "-"}:{setting}{share}' + (
      ':normal' if self.normal else ''
    )

  def counts(self, length: int) -> tuple[int, int]:
    """Returns the numbers of hidden tokens and spans, each at least 1."""
    # As in T5 (`random_spans_noise_mask`): a token stays visible, except in a
    # window of one.
    noise = min(max(round(length * self.density), 1), max(length - 1, 1))
    if self.kind == 'suffix':
      return noise, 1
    spans = max(round(noise / self.mean), 1)
    # Spans alternate with visible runs, and neither may be empty.
    return noise, min(spans, noise, max(length - noise, 1))

  def sizes(self, window: int) -> tuple[int, int]:
    """Returns the maximum sizes of inputs (with mode token) and targets."""
    mode = bool(self.mode)
    # The split is drawn later: either side may have all tokens but one.
    if self.kind == 'uniform':
      return mode + window - 1, max(window - 1, 1)
    noise, spans = self.counts(window)
    return mode + window - noise + spans, noise + spans


def parse_mixture(text: str) -> tuple[Denoiser, ...]:
  """Parses a mixture of denoisers (the module's first table).

  Raises:
    UserError: a denoiser is invalid; names it.
  """
  return tuple(
    _denoiser(part, weight or 1.0)
    for part, weight in option_strings.things(
      'the mixture of denoisers', text, r'\+'
    )
  )


def _denoiser(part: option_strings.Part, weight: float) -> Denoiser:
  mode, *settings = part.divide(':')

  def density(share: option_strings.Part) -> float:
    return share.read(float, 'a DENSITY between 0 and 1', lambda n: 0 < n < 1)

  if mode.text in ('-', *vocabulary_lib.MODES):
    common = dict(mode=mode.text.strip('-'), weight=weight)
    match [setting.text for setting in settings]:
      case ['uniform']:
        return Denoiser(kind='uniform', **common)
      case ['suffix', _]:
        return Denoiser(kind='suffix', density=density(settings[1]), **common)
      case [_, _, *normal] if normal in ([], ['normal']):
        return Denoiser(
          kind='spans',
          mean=settings[0].read(
            float, 'a MEAN of at least 1', lambda n: 1 <= n < math.inf
          ),
          density=density(settings[1]),
          normal=bool(normal),
          **common,
        )
  raise part.error(
    'must be MODE:MEAN:DENSITY[:normal], MODE:suffix:DENSITY or MODE:uniform,'
    ' with [@WEIGHT]; MODE is R, S, X or -'
  )


class Denoising(windows.WindowMaker):
  """A mixture of denoisers, drawn per window by weight."""

  draws = True
  teacher_reads = 'text'
  one_vocabulary = 'a sentinel stands for the same span on both sides'

  @classmethod
  def hidden_shares(cls, text, options):
    mixture = options['mixture']
    total = sum(denoiser.weight for denoiser in mixture)
    # A uniform split has no density: its share is drawn per window.
    return {
      denoiser.label: (denoiser.weight / total, denoiser.density or None)
      for denoiser in mixture
    }

  @classmethod
  def build(
    cls, text, lengths, vocabulary, encoder_vocabulary, sentinel_policy, options
  ):
    return cls(text, lengths, vocabulary, policy=sentinel_policy, **options)

  def __init__(
    self,
    name: str,
    lengths: framing.Lengths,
    vocabulary: vocabulary_lib.Vocabulary,
    *,
    mixture: Sequence[Denoiser],
    policy: str,
    **options: Any,
  ):
    """Plans the windows of every denoiser.

    Args:
      name: name of the objective, for errors.
      lengths: row lengths; every pair must fit.
      vocabulary: vocabulary with sentinels and mode tokens.
      mixture: denoisers.
      policy: one of `POLICIES`.
      **options: see `windows.WindowMaker`.

    Raises:
      UserError: the lengths do not suit the mixture, or the vocabulary lacks
        sentinels or mode tokens.
    """
    self._mixture = tuple(mixture)
    self._policy = policy
    # Arrays, so that concatenation with a window needs no conversion.
    self._modes = {
      mode: np.array([i], np.int32) for mode, i in vocabulary.mode_ids.items()
    }
    self._modes[''] = np.zeros(0, np.int32)
    self._sentinels = np.array(vocabulary.sentinels, np.int32)
    if policy == 'extend_vocabulary':
      # The new sentinels come last; this policy uses no others.
      count = most_spans(self._mixture, lengths)
      self._sentinels = self._sentinels[-count:]
    masks = any(denoiser.kind != 'uniform' for denoiser in mixture)
    modes = {denoiser.mode for denoiser in mixture} <= set(self._modes)
    if (masks and not len(self._sentinels)) or not modes:
      raise errors.UserError(
        f'objective {name!r}: the vocabulary {vocabulary.path!r} has no'
        ' sentinels and mode tokens (<unused0> .. of Gemma,'
        ' <|reserved_special_token_0|> .. of Llama 3; T5 has <extra_id_0> ..,'
        ' and no mode tokens); add some with config.data.add_sentinels, or use'
        ' one that has them'
      )
    # Lookup table by id: `_shared_spans` tests every target of a shard.
    self._is_sentinel = np.zeros(self._sentinels.max(initial=0) + 1, bool)
    self._is_sentinel[self._sentinels] = True
    super().__init__(name, lengths, vocabulary, **options)
    if policy in ('unique', 'extend_vocabulary'):
      self._check_sentinels(vocabulary)

  def _make_plans(self):
    return tuple(self._plan(denoiser) for denoiser in self._mixture)

  def _plan(self, denoiser: Denoiser) -> windows.WindowPlan:
    """Plans the windows of a denoiser.

    Raises:
      UserError: inputs that fill the encoder have too many targets.
    """
    plan = self._longest(denoiser.sizes, denoiser, denoiser.weight)
    if denoiser.kind != 'spans':
      return plan
    # Refused: too many targets would silently shorten the windows and leave
    # part of the encoder empty.
    by_inputs = _window_of_inputs(denoiser, self.lengths)
    targets = denoiser.sizes(by_inputs)[1]
    shorter = denoiser.sizes(plan.inner + 1)[0]
    self._require_targets(targets, shorter, f'the denoiser {denoiser.label}')
    if self._policy != 'limit_segment':
      return plan

    def exceeds(window: int) -> bool:
      return denoiser.counts(window)[1] > len(self._sentinels)

    # The number of spans never decreases with the window: bisection finds the
    # first window with too many; its index in this range is the size before.
    longest = bisect.bisect_left(range(1, plan.inner + 1), True, key=exceeds)
    last = min(longest, plan.last)
    return windows.WindowPlan(longest, last, denoiser, denoiser.weight)

  def _check_sentinels(self, vocabulary: vocabulary_lib.Vocabulary) -> None:
    spans = most_spans(self._mixture, self.lengths)
    if spans > len(self._sentinels):
      raise errors.UserError(
        f'objective {self.name!r}: windows of {self.lengths.encoder} inputs'
        f' have up to {spans} spans and the vocabulary {vocabulary.path!r} only'
        f' {len(self._sentinels)} sentinels; choose another policy'
        f' (config.data.sentinels: {", ".join(POLICIES[1:])}), shorten'
        ' config.data.encoder_length, or set config.data.add_sentinels'
      )

  def split(self, window, plan, rng):
    denoiser = plan.task
    mode = self._modes[denoiser.mode]
    if denoiser.kind == 'uniform':
      middle = windows.uniform_split(rng.random(), len(window))
      inputs = np.concatenate([mode, window[:middle]])
      pair = framing.Pair(inputs, window[middle:])
      noise = len(window) - middle
    else:
      noise, spans = denoiser.counts(len(window))
      hide = normal_partition if denoiser.normal else partition
      # Visible runs must be drawn first: records depend on the order of draws.
      pair = corrupt_spans(
        window,
        partition(len(window) - noise, spans, rng),
        hide(noise, spans, rng),
        self._sentinels_of(spans),
        mode,
      )
    self._count_hidden(denoiser.label, len(window), noise)
    self.counts[SHARED_SPANS] += self._shared_spans(pair)
    return pair

  def _sentinels_of(self, spans: int) -> np.ndarray:
    if self._policy == 'single':
      return np.full(spans, self._sentinels[0])
    if spans <= len(self._sentinels):  # A view, for most windows.
      return self._sentinels[:spans]
    return np.resize(self._sentinels, spans)

  def _shared_spans(self, pair: framing.Pair) -> int:
    """Returns the number of spans without a unique sentinel."""
    if self._policy not in ('recycle', 'single'):
      return 0
    if self._policy == 'recycle' and len(pair.targets) <= len(self._sentinels):
      return 0  # There is a sentinel for every target.
    # Larger ids are not sentinels and would be out of range.
    candidates = pair.targets[pair.targets < len(self._is_sentinel)]
    counts = np.bincount(candidates[self._is_sentinel[candidates]])
    return int(counts[counts > 1].sum())


def modes(options: Mapping[str, Any]) -> tuple[str, ...]:
  """Returns the mode tokens of an objective's inputs, in order.

  Args:
    options: options of any objective.
  """
  names = {denoiser.mode for denoiser in options.get('mixture', ())}
  return tuple(mode for mode in vocabulary_lib.MODES if mode in names)


def added_sentinels(
  options: Mapping[str, Any], policy: str, lengths: framing.Lengths
) -> int:
  """Returns the number of new sentinels for 'extend_vocabulary', else 0.

  Args:
    options: options of any objective.
    policy: one of `POLICIES`.
    lengths: row lengths.
  """
  if policy != 'extend_vocabulary' or 'mixture' not in options:
    return 0
  return most_spans(options['mixture'], lengths)


def most_spans(mixture: Sequence[Denoiser], lengths: framing.Lengths) -> int:
  """Returns the maximum number of spans, and so of sentinels, of a window."""
  return max(
    0
    if denoiser.kind == 'uniform'
    else denoiser.counts(_window_of_inputs(denoiser, lengths))[1]
    for denoiser in mixture
  )


@functools.cache
def _window_of_inputs(denoiser: Denoiser, lengths: framing.Lengths) -> int:
  # Visible tokens alone fill the encoder at encoder / (1 - density); twice that
  # is an upper bound, with room for rounding.
  return bisect.bisect_left(
    range(1, 1 + int(2 * lengths.encoder / (1 - denoiser.density))),
    True,
    key=lambda window: (
      denoiser.sizes(window)[0] + lengths.edges > lengths.encoder
    ),
  )


def partition(total: int, parts: int, rng: np.random.Generator) -> np.ndarray:
  """Draws a uniform partition of `total` into parts of at least 1.

  Args:
    total: at least `parts`; or any number for one part.
    parts: number of parts, at least 1.
    rng: used only for more than one part.

  Returns:
    The end of every part, int64 [parts]; the last is `total`.
  """
  ends = np.empty(parts, np.int64)
  ends[-1] = total
  if parts == 1:
    return ends
  # Distinct bounds make every partition equally likely; T5 shuffles a mask, to
  # the same effect.
  if total < _FEW:
    bounds = rng.permutation(total - 1)[: parts - 1]
  else:
    bounds = rng.choice(total - 1, parts - 1, replace=False)
  bounds.sort()
  np.add(bounds, 1, out=ends[:-1])
  return ends


def normal_partition(
  total: int, parts: int, rng: np.random.Generator
) -> np.ndarray:
  """Draws normally distributed parts of at least 1 that sum to `total`.

  The standard deviation is half the mean, before parts are clipped to 1 and
  scaled to the sum.

  Args:
    total: at least `parts`.
    parts: number of parts, at least 1.
    rng: draws the lengths.

  Returns:
    The end of every part, int64 [parts]; the last is `total`.
  """
  mean = total / parts
  # Excess over 1, so that rounding cannot make a part empty.
  excess = np.maximum(rng.normal(mean - 1, mean / 2, parts), 0)
  # All draws may be 0 where the mean is near 1.
  share = excess / excess.sum() if excess.any() else np.full(parts, 1 / parts)
  # Rounds ends, as rounded lengths would not sum to the total.
  ends = np.round(np.cumsum(share) * (total - parts)).astype(np.int64)
  ends[-1] = total - parts
  return ends + np.arange(1, parts + 1)


def corrupt_spans(
  window: np.ndarray,
  visible: np.ndarray,
  hidden: np.ndarray,
  sentinels: np.ndarray,
  mode: np.ndarray,
) -> framing.Pair:
  """Replaces spans with sentinels.

  Args:
    window: int32 [w].
    visible: int [k], cumulative visible tokens before each span.
    hidden: int [k], cumulative hidden tokens at the end of each span; the last
      elements of visible and hidden sum to w.
    sentinels: int32 [k], a sentinel per span.
    mode: int32 [0] or [1], mode token before the inputs.

  Returns:
    Inputs mode visible_0 sentinel_0 visible_1 sentinel_1 .., and targets
    sentinel_0 hidden_0 sentinel_1 hidden_1 ...
  """
  # A position after v visible and h hidden tokens is v + h in the window, v in
  # the inputs and h in the targets.
  if len(visible) <= _FEW_SPANS:
    inputs, targets, start, hidden_before = [mode], [], 0, 0
    spans = zip(visible.tolist(), hidden.tolist(), strict=True)
    for i, (visible_count, hidden_count) in enumerate(spans):
      sentinel = sentinels[i : i + 1]
      middle = visible_count + hidden_before
      end = visible_count + hidden_count
      inputs += window[start:middle], sentinel
      targets += sentinel, window[middle:end]
      start, hidden_before = end, hidden_count
    return framing.Pair(np.concatenate(inputs), np.concatenate(targets))
  hidden_before = np.concatenate([[0], hidden[:-1]])
  # +1 at the start of a span and -1 after its end: the cumulative sum is 1
  # within spans. The last end is w, hence the extra element.
  step = np.zeros(len(window) + 1, np.int8)
  step[visible + hidden_before] = 1
  step[visible + hidden] = -1
  is_hidden = step[:-1].cumsum().astype(bool)
  inputs = insert(window[~is_hidden], visible, sentinels)
  return framing.Pair(
    np.concatenate([mode, inputs]),
    insert(window[is_hidden], hidden_before, sentinels),
  )


def insert(
  tokens: np.ndarray, indices: np.ndarray, new: np.ndarray
) -> np.ndarray:
  """Equals `np.insert` at non-decreasing indices, three times as fast."""
  # Each insertion shifts all later insertions by a position.
  slots = indices + np.arange(len(indices))
  result = np.empty(len(tokens) + len(indices), np.int32)
  is_token = np.ones(len(result), bool)
  is_token[slots] = False
  result[slots] = new
  result[is_token] = tokens
  return result


def _preset(mixture: str, predicts: str, **preset: Any) -> example_maker.Name:
  preset |= {'mixture': parse_mixture(mixture)}
  return example_maker.Name(Denoising, predicts, preset)


_UL2_SPANS = 'R:3:0.15 + R:8:0.15 + X:3:0.5 + X:8:0.5 + X:64:0.15 + X:64:0.5'
OBJECTIVES = {
  'span_corruption': _preset('-:3:0.15', "T5's spans, 15%, mean 3"),
  'ul2': _preset(
    f'{_UL2_SPANS} + S:suffix:0.25', "UL2's seven denoisers, as its table"
  ),
  'ul2_published': _preset(
    f'{_UL2_SPANS} + S:uniform', 'the same as its code ran', concatenate=True
  ),
  'ul2r': _preset(
    'R:3:0.15@2 + X:32:0.15 + X:3:0.5 + S:uniform@4',
    'U-PaLM: 50% S, 25% R, 25% X',
  ),
  't5gemma2': _preset(
    'R:3:0.15 + X:12:0.5 + X:32:0.15 + X:32:0.5 + S:suffix:0.75@4',
    "T5Gemma 2's five denoisers",
  ),
  # The text before the options is the mixture.
  'denoise': example_maker.Name(
    Denoising,
    'any mixture: `denoise:R:3:0.15 + S:uniform@4`',
    parse=lambda text: {'mixture': parse_mixture(text)},
  ),
}
