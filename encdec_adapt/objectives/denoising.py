"""Span corruption: denoisers as data, and sentinels for hidden spans.

A denoiser hides part of a window. It is written MODE:MEAN:DENSITY, where MODE
is a mode token (R, S, X, or - for none), MEAN the mean length of a span and
DENSITY the share of hidden tokens; a mixture is denoisers with weights:

    R:3:0.15 + X:32:0.15@2 + S:uniform@4

| denoiser             | hides                                            |
|----------------------|--------------------------------------------------|
| MODE:3:0.15          | spans of random lengths, mean 3, 15% of tokens   |
| MODE:3:0.15:normal   | the same with normally distributed lengths       |
| MODE:suffix:0.25     | the last 25%, as one span                        |
| MODE:uniform         | the text after a uniform split; has no sentinels |

Objectives are such mixtures:

| name            | mixture                                               |
|-----------------|-------------------------------------------------------|
| span_corruption | T5 (arXiv:1910.10683): -:3:0.15                       |
| ul2             | the seven of table 1 of Tay et al. (arXiv:2205.05131),|
|                 | drawn uniformly; S hides the last quarter             |
| ul2_published   | the same as their code (appendix 9.2) ran it: S is a  |
|                 | uniform split without a sentinel, and documents are   |
|                 | concatenated                                          |
| ul2r            | U-PaLM (arXiv:2210.11399): 50% S, 25% R, 25% X, where |
|                 | X is half (32, 0.15) and half (3, 0.5), as in Levanter|
| t5gemma2        | the five of T5Gemma 2 (arXiv:2512.14856), 1:1:1:1:4   |
| denoise:MIXTURE | any other                                             |

Spans are drawn as T5 draws them: a fixed number of spans, random partitions
of hidden and visible tokens, alternating, a hidden span last. The inputs of the
longest windows of such a denoiser fill the encoder (T5's
`random_spans_helper`); targets that do not fit the decoder are an error, which
names the lengths that would do. Windows of `suffix` and `uniform` are the
longest that fit both sides.

Inputs need a sentinel for every span. With 8192 inputs, (3, 0.5) has about
2,040 spans and (3, 0.15) about 455, and Gemma has 96 sentinels; so there are
policies (the papers do not say which one Google used):

| policy            | spans beyond the vocabulary's sentinels               |
|-------------------|-------------------------------------------------------|
| unique            | are refused: an error names the sentinels needed      |
| recycle           | repeat the ids in order, 21 times for (3, 0.5)        |
| extend_vocabulary | all spans use new ids at the end of the vocabulary,   |
|                   | which the model's tables have to cover (2,047 at 8192)|
| single            | all spans have the first sentinel; their order tells  |
|                   | them apart                                            |
| limit_segment     | do not occur: windows end before their sentinels run  |
|                   | out (at 576 tokens for (3, 0.5)) and share rows       |

Pure numpy; this module imports neither TensorFlow nor SeqIO nor jax.
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
# Count of the spans that share their sentinel with another of their window.
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
    normal: whether lengths of spans are normally distributed.
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
    """The setting as a mixture names it, without the weight."""
    setting = self.kind if self.kind != 'spans' else f'{self.mean:g}'
    share = f':{self.density:g}' if self.density else ''
    return f'{self.mode or "-"}:{setting}{share}' + (
      ':normal' if self.normal else ''
    )

  def counts(self, length: int) -> tuple[int, int]:
    """Returns hidden tokens and spans of a window, at least one of each."""
    # As in T5 (`random_spans_noise_mask`): a token stays visible, unless the
    # window has no other.
    noise = min(max(round(length * self.density), 1), max(length - 1, 1))
    if self.kind == 'suffix':
      return noise, 1
    spans = max(round(noise / self.mean), 1)
    # Spans alternate with visible runs, and neither may be empty.
    return noise, min(spans, noise, max(length - noise, 1))

  def sizes(self, window: int) -> tuple[int, int]:
    """Returns the most tokens of inputs (with the mode token) and targets."""
    mode = bool(self.mode)
    # The split is drawn later: either side may have all tokens but one.
    if self.kind == 'uniform':
      return mode + window - 1, max(window - 1, 1)
    noise, spans = self.counts(window)
    return mode + window - noise + spans, noise + spans


def parse_mixture(text: str) -> tuple[Denoiser, ...]:
  """Parses a mixture of denoisers (the module's first table).

  Raises:
    UserError: names the denoiser that cannot be parsed.
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
  """A mixture of denoisers: every window draws a denoiser by the weights."""

  draws = True
  teacher_reads = 'text'
  one_vocabulary = 'a sentinel stands for the same span on both sides'

  @classmethod
  def hidden_shares(cls, text, options):
    mixture = options['mixture']
    total = sum(denoiser.weight for denoiser in mixture)
    # A uniform split has no density: its share is drawn for every window.
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
      lengths: row lengths that every pair has to fit.
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
    # Arrays, to be concatenated with a window without a conversion for each.
    self._modes = {
      mode: np.array([i], np.int32) for mode, i in vocabulary.mode_ids.items()
    }
    self._modes[''] = np.zeros(0, np.int32)
    self._sentinels = np.array(vocabulary.sentinels, np.int32)
    if policy == 'extend_vocabulary':
      # New sentinels follow those of the vocabulary, which this policy leaves
      # alone.
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
    # A table by id: counting shared spans looks up every target of a shard.
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
      UserError: targets do not fit for inputs that fill the encoder.
    """
    plan = self._longest(denoiser.sizes, denoiser, denoiser.weight)
    if denoiser.kind != 'spans':
      return plan
    # Targets that do not fit would shorten the windows, which would leave part
    # of the encoder empty: refused, as it would go unnoticed.
    by_inputs = _window_of_inputs(denoiser, self.lengths)
    targets = denoiser.sizes(by_inputs)[1]
    shorter = denoiser.sizes(plan.inner + 1)[0]
    self._require_targets(targets, shorter, f'the denoiser {denoiser.label}')
    if self._policy != 'limit_segment':
      return plan

    def exceeds(window: int) -> bool:
      return denoiser.counts(window)[1] > len(self._sentinels)

    # Spans never decrease with the window, so that a bisection finds the first
    # window with too many; its index in this range is the size before it.
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
      # Arguments are evaluated in order: visible runs are drawn first, and
      # records depend on it.
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
    if spans <= len(self._sentinels):  # A view, which most windows need.
      return self._sentinels[:spans]
    return np.resize(self._sentinels, spans)

  def _shared_spans(self, pair: framing.Pair) -> int:
    """Returns the number of spans that share their sentinel with another."""
    if self._policy not in ('recycle', 'single'):
      return 0
    if self._policy == 'recycle' and len(pair.targets) <= len(self._sentinels):
      return 0  # There is a sentinel for every target.
    # Ids beyond the table are not sentinels, and would be errors as indices.
    candidates = pair.targets[pair.targets < len(self._is_sentinel)]
    counts = np.bincount(candidates[self._is_sentinel[candidates]])
    return int(counts[counts > 1].sum())


def modes(options: Mapping[str, Any]) -> tuple[str, ...]:
  """Returns the mode tokens that inputs of an objective begin with, in order.

  Args:
    options: options of any objective.
  """
  names = {denoiser.mode for denoiser in options.get('mixture', ())}
  return tuple(mode for mode in vocabulary_lib.MODES if mode in names)


def added_sentinels(
  options: Mapping[str, Any], policy: str, lengths: framing.Lengths
) -> int:
  """Returns the new sentinels that 'extend_vocabulary' needs, else 0.

  Args:
    options: options of any objective.
    policy: one of `POLICIES`.
    lengths: row lengths.
  """
  if policy != 'extend_vocabulary' or 'mixture' not in options:
    return 0
  return most_spans(options['mixture'], lengths)


def most_spans(mixture: Sequence[Denoiser], lengths: framing.Lengths) -> int:
  """Returns the most spans of a window, and so the sentinels that it needs."""
  return max(
    0
    if denoiser.kind == 'uniform'
    else denoiser.counts(_window_of_inputs(denoiser, lengths))[1]
    for denoiser in mixture
  )


@functools.cache
def _window_of_inputs(denoiser: Denoiser, lengths: framing.Lengths) -> int:
  # Visible tokens alone fill the encoder at encoder / (1 - density): twice that
  # is beyond every window that fits, with room for rounding.
  return bisect.bisect_left(
    range(1, 1 + int(2 * lengths.encoder / (1 - denoiser.density))),
    True,
    key=lambda window: (
      denoiser.sizes(window)[0] + lengths.edges > lengths.encoder
    ),
  )


def partition(total: int, parts: int, rng: np.random.Generator) -> np.ndarray:
  """Divides `total` into parts of at least 1, uniformly.

  Args:
    total: at least `parts`; or any number for one part.
    parts: number of parts, at least 1.
    rng: used only if there is a choice.

  Returns:
    The end of every part, int64 [parts]; the last is `total`.
  """
  ends = np.empty(parts, np.int64)
  ends[-1] = total
  if parts == 1:
    return ends
  # Distinct bounds between neighbours: every partition is equally likely (T5
  # shuffles a row of marks, to the same effect).
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
  """Divides `total` into normally distributed parts of at least 1.

  Their standard deviation is half of the mean before lengths below 1 become 1
  and all are scaled to the sum.

  Args:
    total: at least `parts`.
    parts: number of parts, at least 1.
    rng: draws the lengths.

  Returns:
    The end of every part, int64 [parts]; the last is `total`.
  """
  mean = total / parts
  # Lengths beyond 1, which every part has: rounding cannot make a part empty.
  excess = np.maximum(rng.normal(mean - 1, mean / 2, parts), 0)
  # All draws may be 0 where the mean is near 1.
  share = excess / excess.sum() if excess.any() else np.full(parts, 1 / parts)
  # Rounded ends and not lengths, which would not sum to the total.
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
  """Replaces spans by sentinels.

  Args:
    window: int32 [w].
    visible: int [k], visible tokens before each span.
    hidden: int [k], hidden tokens up to the end of each span; the last numbers
      of visible and hidden sum to w.
    sentinels: int32 [k], a sentinel per span.
    mode: int32 [0] or [1], mode token before the inputs.

  Returns:
    Inputs mode visible_0 sentinel_0 visible_1 sentinel_1 .., and targets
    sentinel_0 hidden_0 sentinel_1 hidden_1 ...
  """
  # Cumulative counts: the v visible and h hidden tokens before a position make
  # it v + h in the window, v in the inputs and h in the targets, so that no
  # branch below has to sum lengths again.
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
  # +1 where a span starts and -1 behind its end; their sum is 1 within spans.
  # The last end is w, for which the array has an element more.
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
  """`np.insert` before non-decreasing indices, three times as fast."""
  # Each insertion moves all later ones by a position.
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
  # Plus signs divide noises, where commas divide the options of others.
  'denoise': example_maker.Name(
    Denoising,
    'any mixture: `denoise:R:3:0.15 + S:uniform@4`',
    parse=lambda text: {'mixture': parse_mixture(text)},
  ),
}
