"""Language-model objectives: windows of a document as (inputs, targets) pairs.

| name              | inputs                       | targets               |
|-------------------|------------------------------|-----------------------|
| causal_lm         | none                         | the window            |
| full_lm           | none                         | the window, of        |
|                   |                              | concatenated documents|
| prefix_lm         | its first half               | its second half       |
| prefix_lm_uniform | up to a uniform split        | after the split       |
| reverse_prefix_lm | after a uniform split        | up to the split       |

`prefix_lm` splits in half, as T5Gemma does (arXiv:2504.06225). The uniform
split is in [1, window), as in Wang et al. (arXiv:2204.05832). `full_lm` is
their full language modeling. With `concatenate`, successive uniform splits are
complementary, as in their packing of two examples into a row
(`UniformPrefixLM`).

Documents are cut into the longest windows that fit a row framed by
`objectives/framing.py`. Targets end in EOS only at the end of a document, or
always if the vocabulary frames like T5's
(`special_ids.SideIds.ends_with_eos`). With the option `concatenate`, the
documents of a shard are joined, each followed by EOS, before windows are cut;
held-out windows never cross documents. With `shortest=N`, the last window of a
document is dropped and counted if it follows others and has fewer than N
tokens; then no targets end in EOS.

Pure NumPy; must not import TensorFlow, SeqIO or JAX.
"""

import abc
import bisect
import collections
from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import itertools
from typing import Any

import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.objectives import (
  example_maker,
  framing,
  row_fields,
  two_vocabularies,
)
from encdec_adapt.tokenizers import vocabulary as vocabulary_lib

# `concatenate` joins the documents of a shard before windows are cut;
# `shortest` drops shorter last windows of documents.
OPTIONS = {
  'concatenate': example_maker.Option(
    lambda _: True,
    'concatenate',
    # Two vocabularies split text, and concatenated ids have none.
    one_vocabulary='concatenated documents are cut in the tokens of one',
  ),
  'shortest': example_maker.Option(int, 'shortest=TOKENS', lambda n: n >= 0),
}


@dataclasses.dataclass(frozen=True)
class WindowPlan:
  """Plan of a window.

  Attributes:
    inner: maximum tokens of a window before the last of its document.
    last: maximum tokens of a document's last window; its targets get EOS.
    task: denoiser, for mixtures; whether the split complements the preceding
      window's, for uniform splits; else None.
    weight: relative frequency of the plan.
  """

  inner: int
  last: int
  task: Any = None
  weight: float = 1.0


class WindowMaker(example_maker.ExampleMaker):
  """Cuts documents into windows and makes a pair of each.

  Targets of a document's last window end in EOS if a decoder predicts them.

  Attributes:
    draws: whether examples are random.
    concatenate: whether windows cross documents.
    inner_eos: number of ids around the targets of every window (EOS and
      opening) if the vocabulary frames like T5's, else 0.
    shortest: minimum tokens of a last window after others, else dropped.
    plans: possible plans of a window.
  """

  options = OPTIONS
  draws = False

  def __init__(
    self,
    name: str,
    lengths: framing.Lengths,
    vocabulary: vocabulary_lib.Vocabulary,
    *,
    concatenate: bool = False,
    shortest: int = 0,
  ):
    """Plans the windows.

    Args:
      name: name of the objective, for errors.
      lengths: row lengths; every pair must fit.
      vocabulary: vocabulary of the tokens.
      concatenate: whether windows cross documents.
      shortest: minimum tokens of a last window after others, else dropped.

    Raises:
      UserError: the lengths or the vocabulary do not suit the objective.
    """
    super().__init__(name, lengths)
    self.concatenate = concatenate
    self.shortest = shortest
    ids = vocabulary.ids
    is_framed = lengths.encoder and lengths.decoder and ids.ends_with_eos
    opening = ids.target_opening if is_framed else ()
    self.inner_eos = len(opening) + 1 if is_framed else 0
    self._opening = np.array(opening, np.int32)
    self._eos = np.array([ids.eos], np.int32)
    self.plans = self._make_plans()
    # Cumulative weights, to draw plans; a list, as `bisect` is faster on plain
    # numbers than on an array.
    self._bounds = np.cumsum([x.weight for x in self.plans]).tolist()
    if not self._have_windows(self.plans):
      shortest = self._shortest()
      raise errors.UserError(
        f'objective {name!r}: no window fits config.data.encoder_length='
        f'{lengths.encoder} and config.data.decoder_length={lengths.decoder};'
        f' they must be at least {shortest.encoder} and {shortest.decoder}'
      )

  def _have_windows(self, plans: Sequence[WindowPlan]) -> bool:
    return all(min(plan.inner, plan.last) >= 1 for plan in plans)

  def _shortest(self) -> framing.Lengths:
    """Returns the next larger row lengths that fit a window."""
    # By trial, as subclasses plan too differently for a formula. May overwrite
    # `lengths`, since the caller, `__init__`, then raises.
    encoder, decoder = self.lengths.encoder, self.lengths.decoder
    for size in range(2, 100):
      # An unused side stays 0.
      longer = encoder and max(encoder, size), decoder and max(decoder, size)
      # Tries single sides before both, so that the error asks for the smallest
      # change.
      for sides in ((longer[0], decoder), (encoder, longer[1]), longer):
        self.lengths = framing.Lengths(*sides, self.lengths.edges)
        with contextlib.suppress(errors.UserError):  # Targets do not fit yet.
          if self._have_windows(self._make_plans()):
            return self.lengths
    return self.lengths

  @abc.abstractmethod
  def _make_plans(self) -> Sequence[WindowPlan]:
    """Returns `plans`."""

  def _longest(
    self,
    sizes: Callable[[int], tuple[int, int]],
    task: Any = None,
    weight: float = 1.0,
  ) -> WindowPlan:
    """Returns the plan of the longest windows that fit a row.

    Args:
      sizes: function from window size to the maximum numbers of inputs and
        targets (without EOS), both non-decreasing.
      task: see `WindowPlan`.
      weight: see `WindowPlan`.
    """
    encoder, decoder = self.lengths.encoder, self.lengths.decoder

    def exceeds(window: int, eos: int) -> bool:
      inputs, targets = sizes(window)
      inputs += self.lengths.edges
      # A side of length 0 is unused and no limit.
      return 0 < encoder < inputs or 0 < decoder < targets + eos

    # Tries windows of up to four rows. Sizes never decrease: bisection finds
    # the first window that exceeds the lengths; its index, in a range from 1,
    # is the size before.
    sizes_to_try = range(1, 4 * (encoder + decoder) + 1)
    inner, last = (
      bisect.bisect_left(
        sizes_to_try, True, key=functools.partial(exceeds, eos=eos)
      )
      for eos in (self.inner_eos, max(self.inner_eos, int(decoder > 0)))
    )
    return WindowPlan(inner, last, task, weight)

  def _require_targets(self, targets: int, shorter: int, cause: str) -> None:
    """Raises an error if inputs that fill the encoder have too many targets.

    Args:
      targets: number of targets of a window that fills the encoder.
      shorter: encoder length at which the targets fit.
      cause: source of the targets, the subject of the error's sentence.

    Raises:
      UserError: the targets do not fit; names lengths that do.
    """
    targets += self.inner_eos
    if targets > self.lengths.decoder:
      raise errors.UserError(
        f'objective {self.name!r}: with config.data.encoder_length='
        f'{self.lengths.encoder} {cause} makes up to {targets} targets, more'
        f' than config.data.decoder_length={self.lengths.decoder}; set'
        f' decoder_length to at least {targets}, or encoder_length to at most'
        f' {shorter}'
      )

  def draw_plan(self, rng: np.random.Generator | None) -> WindowPlan:
    """Draws the plan of a document's next window by weight."""
    # Does not draw for a single plan: records depend on the number of draws.
    if len(self.plans) == 1:
      return self.plans[0]
    point = rng.random() * self._bounds[-1]
    return self.plans[bisect.bisect_right(self._bounds, point)]

  @abc.abstractmethod
  def split(
    self, window: np.ndarray, plan: WindowPlan, rng: np.random.Generator | None
  ) -> framing.Pair:
    """Returns the pair of a planned window [w], without EOS."""

  def examples(self, documents, generator, policy=example_maker.POLICY):
    if self.concatenate:
      yield from self._from_stream(documents, generator)
      return
    for name, content in documents:
      for pair in self.pairs(
        content, lambda i, name=name: generator(f'{name}#{i}')
      ):
        yield framing.Pair(*pair[:-1], (name,))

  def pairs(
    self, tokens: np.ndarray, generator: Callable[[int], np.random.Generator]
  ) -> Iterator[framing.Pair]:
    """Cuts a document into windows, in order, and makes a pair of each.

    Args:
      tokens: int32 [n], n > 0.
      generator: returns the generator of the i-th window.

    Yields:
      Pairs that fit the lengths; the last targets end in EOS.
    """
    remaining = tokens
    for i in itertools.count():
      # One generator per window, independent of the draws of earlier windows.
      rng = generator(i) if self.draws else None
      plan = self.draw_plan(rng)
      ends = len(remaining) <= plan.last
      if ends and i and len(remaining) < self.shortest:
        self.counts['short_windows'] += 1
        return
      # Leaves a token for the last window, which needs room for EOS.
      size = len(remaining) if ends else min(plan.inner, len(remaining) - 1)
      pair = self.split(remaining[:size], plan, rng)
      has_eos = self.inner_eos or (ends and self.lengths.decoder)
      yield self.with_eos(pair) if has_eos else pair
      if ends:
        return
      remaining = remaining[size:]

  def with_eos(self, pair: framing.Pair) -> framing.Pair:
    """Adds EOS and the vocabulary's opening to targets and aligned fields.

    Targets that already end in EOS (concatenated documents) get no second EOS.
    """
    head, tail = self._opening, self._eos
    tail = tail[int(pair.targets[-1] == tail[0]) :]
    decoder_inputs, weights = pair.decoder_inputs, pair.weights
    # EOS is never masked, so decoder inputs get it too.
    if decoder_inputs is not None:
      decoder_inputs = np.concatenate([head, decoder_inputs, tail])
    if weights is not None:
      weights = np.pad(weights, (len(head), len(tail)), 'edge')
    return pair._replace(
      targets=np.concatenate([head, pair.targets, tail]),
      decoder_inputs=decoder_inputs,
      weights=weights,
    )

  def _count_hidden(self, noise: str, tokens: int, hidden: int) -> None:
    """Counts a window, its tokens and its hidden tokens, by noise."""
    self.counts[f'{noise}: windows'] += 1
    self.counts[f'{noise}: tokens'] += tokens
    self.counts[f'{noise}: hidden'] += hidden

  def _draw_in_stream(
    self, index: int, generator: example_maker.Generator
  ) -> tuple[np.random.Generator | None, WindowPlan]:
    """Draws the plan of the `index`-th window of concatenated documents."""
    rng = generator(f'#{index}') if self.draws else None
    return rng, self.draw_plan(rng)

  def _from_stream(self, documents, generator) -> Iterator[framing.Pair]:
    """Cuts windows from concatenated documents, each followed by EOS."""
    documents = iter(documents)
    # Reads one document ahead: no window is drawn after the last token.
    following = next(documents, None)
    buffer = np.zeros(0, np.int32)
    # (id, tokens in the buffer) of the documents in the buffer, in order.
    spans: collections.deque[tuple[str, int]] = collections.deque()
    for i in itertools.count():
      if following is None and not len(buffer):
        return
      rng, plan = self._draw_in_stream(i, generator)
      chunks, size = [buffer], len(buffer)
      while size < plan.inner and following is not None:
        name, tokens = following
        chunks += [tokens, self._eos]
        spans.append((name, len(tokens) + 1))
        size += len(tokens) + 1
        following = next(documents, None)
      # Skipped inside a long document: each window would copy the rest of it.
      if len(chunks) > 1:
        buffer = np.concatenate(chunks)
      window, buffer = buffer[: plan.inner], buffer[plan.inner :]
      is_last = following is None and not len(buffer)
      # With several chunks, a document begins in the window.
      if is_last and len(chunks) == 1 and len(window) < self.shortest:
        self.counts['short_windows'] += 1
        return
      pair = self.split(window, plan, rng)
      if self.inner_eos:
        pair = self.with_eos(pair)
      names, size = [], len(window)
      while size > 0:
        name, count = spans.popleft()
        names.append(name)
        if count > size:  # The next window begins in this document.
          spans.appendleft((name, count - size))
        size -= count
      yield pair._replace(documents=tuple(names))


class CausalLM(WindowMaker):
  """Predicts the whole window."""

  one_vocabulary = 'it has no inputs for an encoder'

  @classmethod
  def rows(cls, options):
    return row_fields.TEXT

  def _make_plans(self):
    return (self._longest(lambda window: (0, window)),)

  def split(self, window, plan, rng):
    return framing.Pair(np.zeros(0, np.int32), window)


class PrefixLM(WindowMaker):
  """Predicts the second half from the first half, which is never longer.

  Attributes:
    reverse: whether targets are the part before the split.
  """

  one_vocabulary = ''
  teacher_reads = 'inputs'
  reverse = False

  @classmethod
  def build(
    cls, text, lengths, vocabulary, encoder_vocabulary, sentinel_policy, options
  ):
    maker = cls(text, lengths, vocabulary, **options)
    if encoder_vocabulary is None:
      return maker
    return two_vocabularies.TextSplit(maker, encoder_vocabulary, vocabulary)

  def _make_plans(self):
    return (self._longest(lambda window: (window // 2, window - window // 2)),)

  def draw_cut(self, rng: np.random.Generator | None) -> Callable[[int], int]:
    """Draws a split: returns a function from window size to first part's size.

    `two_vocabularies` may shorten a window after the draw.
    """
    return lambda size: size // 2

  def split(self, window, plan, rng):
    middle = self.draw_cut(rng)(len(window))
    parts = window[:middle], window[middle:]
    return framing.Pair(*(parts[::-1] if self.reverse else parts))


class UniformPrefixLM(PrefixLM):
  """Predicts the text after a uniformly drawn split.

  With `concatenate`, windows have w = min(S - 2, T) tokens, and windows 2k and
  2k + 1 share a draw i in [1, w): the first is split at i, the second at w - i.
  Together they have w + 2 inputs, with a BOS each, and w targets, and fill a
  row (Wang et al., arXiv:2204.05832, section 3.2).
  """

  draws = True

  @classmethod
  def revisions(cls, options):
    change = 'two windows that fill a row share the draw of their splits'
    return (change,) if 'concatenate' in options else ()

  def _make_plans(self):
    if self.concatenate:
      # T5's targets have an EOS each, and perhaps an opening.
      decoder = self.lengths.decoder - 2 * self.inner_eos
      window = min(self.lengths.encoder - 2 * self.lengths.edges, decoder)
      # A window of a single token has no complement.
      size = window if window > 1 else 0
      return (WindowPlan(size, size),)
    # Inputs have at most window - 1 tokens; the row has room for another BOS.
    return (self._longest(lambda window: (window, max(window - 1, 1))),)

  def draw_cut(self, rng):
    return functools.partial(uniform_split, rng.random())

  def _draw_in_stream(self, index, generator):
    # Both windows draw from the generator of the even window.
    rng, plan = super()._draw_in_stream(index - index % 2, generator)
    return rng, WindowPlan(plan.inner, plan.last, bool(index % 2))

  def split(self, window, plan, rng):
    if not plan.task:
      return super().split(window, plan, rng)
    middle = plan.inner - uniform_split(rng.random(), plan.inner)
    # The last window of a shard may be shorter, and keeps at least one target.
    middle = min(middle, len(window) - 1)
    return framing.Pair(window[:middle], window[middle:])


class ReversePrefixLM(PrefixLM):
  """Predicts the text before a uniform split from the text after it.

  Source: the objectives of t5/data/preprocessors.py.
  """

  draws = True
  teacher_reads = ''
  reverse = True

  def _make_plans(self):
    return (self._longest(lambda window: (window, window)),)

  def draw_cut(self, rng):
    share = rng.random()
    return lambda size: max(uniform_split(share, size), 1)


def uniform_split(share: float, size: int) -> int:
  """Returns a split in [1, size) at a share in [0, 1); 0 for a single token."""
  return 1 + int(share * (size - 1)) if size > 1 else 0


_Name = example_maker.Name
OBJECTIVES = {
  'causal_lm': _Name(CausalLM, 'next token, documents apart'),
  'full_lm': _Name(
    CausalLM,
    'next token, documents concatenated (Wang et al.)',
    {'concatenate': True},
  ),
  'prefix_lm': _Name(PrefixLM, 'second half from the first (T5Gemma)'),
  'prefix_lm_uniform': _Name(
    UniformPrefixLM, 'the text after a uniform split (Wang et al.)'
  ),
  'reverse_prefix_lm': _Name(
    ReversePrefixLM, 'the text before a uniform split'
  ),
}
