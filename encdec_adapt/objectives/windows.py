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
their full language modeling. With `concatenate`, two successive uniform splits
are complementary, which is their packing of two examples into a row
(`UniformPrefixLM`).

A document is cut into windows that fit a row with the framing of
`objectives/framing.py`, as long as the row allows. Targets end in EOS if and
only if the document ends, or the vocabulary frames as T5's
(`special_ids.SideIds.ends_with_eos`). With the option `concatenate`, the
documents of a shard are joined first, each with an EOS at its end, and windows
are cut from the result; held-out windows never cross documents. With
`shortest=N`, a last window of fewer than N tokens that ends a longer document
is dropped and counted; then no targets end in EOS.

Pure numpy; this module imports neither TensorFlow nor SeqIO nor jax.
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


def _tokens(text: str) -> int:
  if int(text) < 0:
    raise ValueError
  return int(text)


# The first joins the documents of a shard before windows are cut; the second
# drops shorter ends of documents.
OPTIONS = {
  'concatenate': example_maker.Option(
    lambda _: True,
    'concatenate',
    # Two vocabularies are split in text, which concatenated ids do not have.
    one_vocabulary='concatenated documents are cut in the tokens of one',
  ),
  'shortest': example_maker.Option(_tokens, 'shortest=TOKENS'),
}


@dataclasses.dataclass(frozen=True)
class WindowPlan:
  """Decisions on a window before it is cut.

  Attributes:
    inner: largest size of a window that does not end its document, in tokens.
    last: largest size of a document's last window; its targets get EOS.
    task: denoiser of the window, for mixtures of denoisers; whether its split
      complements that of the preceding window, for uniform splits; else None.
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
    draws: whether anything is random.
    concatenate: whether windows cross documents.
    inner_eos: ids around the targets of all windows: EOS and the opening if the
      vocabulary frames as T5's, else 0.
    shortest: last windows of fewer tokens, after others, are dropped.
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
      lengths: row lengths that every pair has to fit.
      vocabulary: vocabulary of the tokens.
      concatenate: whether windows cross documents.
      shortest: last windows of fewer tokens are dropped.

    Raises:
      UserError: the lengths or the vocabulary do not suit the objective.
    """
    super().__init__(name, lengths)
    self.concatenate = concatenate
    self.shortest = shortest
    ids = vocabulary.ids
    is_framed = lengths.encoder and lengths.decoder and ids.ends_with_eos
    self.inner_eos = ids.frame_size if is_framed else 0
    self._opening = np.array(ids.opening if is_framed else (), np.int32)
    self._eos = np.array([ids.eos], np.int32)
    self.plans = self._make_plans()
    # Upper bounds of the plans' shares of a uniform draw; a list, as `bisect`
    # in plain numbers is faster than a search in an array.
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
    """Returns the next larger row lengths that a window fits."""
    # By trial, as the classes plan too differently for a formula. This changes
    # `lengths`, as it is called only by an `__init__` that then fails.
    encoder, decoder = self.lengths.encoder, self.lengths.decoder
    for size in range(2, 100):
      # A side that is not filled stays 0.
      longer = encoder and max(encoder, size), decoder and max(decoder, size)
      # A single side if that suffices, before both: the error is to ask for
      # the least change.
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
      sizes: function from a window's size to the largest numbers of inputs and
        of targets (without EOS); both are non-decreasing.
      task: see `WindowPlan`.
      weight: see `WindowPlan`.
    """
    encoder, decoder = self.lengths.encoder, self.lengths.decoder

    def exceeds(window: int, eos: int) -> bool:
      inputs, targets = sizes(window)
      inputs += self.lengths.edges
      # A side of length 0 is not filled, and limits nothing.
      return 0 < encoder < inputs or 0 < decoder < targets + eos

    # Windows longer than four rows are not tried. As sizes never decrease, a
    # bisection finds the first window that exceeds; its index in a range from 1
    # is the size before it.
    sizes_to_try = range(1, 4 * (encoder + decoder) + 1)
    inner, last = (
      bisect.bisect_left(
        sizes_to_try, True, key=functools.partial(exceeds, eos=eos)
      )
      for eos in (self.inner_eos, max(self.inner_eos, int(decoder > 0)))
    )
    return WindowPlan(inner, last, task, weight)

  def _require_targets(self, targets: int, shorter: int, cause: str) -> None:
    """Refuses lengths at which inputs that fill the encoder are not used.

    Args:
      targets: number of targets of a window that fills the encoder.
      shorter: encoder length at which the targets fit.
      cause: subject of the error's sentence, which makes the targets.

    Raises:
      UserError: the targets do not fit; names the lengths that would do.
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
    """Draws the plan of a document's next window, by the weights."""
    # No draw without a choice: records depend on the number of draws.
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
    """Cuts a whole document into windows, in order, and pairs each.

    Args:
      tokens: int32 [n], n > 0.
      generator: returns the generator of the i-th window.

    Yields:
      Pairs that fit the lengths; the last targets end in EOS.
    """
    remaining = tokens
    for i in itertools.count():
      # A generator for each window, so that a window draws the same whatever
      # number of draws the windows before it made.
      rng = generator(i) if self.draws else None
      plan = self.draw_plan(rng)
      ends = len(remaining) <= plan.last
      if ends and i and len(remaining) < self.shortest:
        self.counts['short_windows'] += 1
        return
      # A token is left for the last window, which needs room for EOS.
      size = len(remaining) if ends else min(plan.inner, len(remaining) - 1)
      pair = self.split(remaining[:size], plan, rng)
      has_eos = self.inner_eos or (ends and self.lengths.decoder)
      yield self.with_eos(pair) if has_eos else pair
      if ends:
        return
      remaining = remaining[size:]

  def with_eos(self, pair: framing.Pair) -> framing.Pair:
    """Ends targets, and the fields aligned with them, with EOS.

    They also get the opening of the vocabulary. Targets of concatenated
    documents may have an EOS at their end already.
    """
    head, tail = self._opening, self._eos
    tail = tail[int(pair.targets[-1] == tail[0]) :]
    decoder_inputs, weights = pair.decoder_inputs, pair.weights
    # EOS is never masked: its place in the decoder's inputs holds EOS too.
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
    """Counts a window of a noise, its tokens, and those that were hidden."""
    self.counts[f'{noise}: windows'] += 1
    self.counts[f'{noise}: tokens'] += tokens
    self.counts[f'{noise}: hidden'] += hidden

  def _draw_in_stream(
    self, index: int, generator: example_maker.Generator
  ) -> tuple[np.random.Generator | None, WindowPlan]:
    """Draws the plan of a window of concatenated documents, by its number."""
    rng = generator(f'#{index}') if self.draws else None
    return rng, self.draw_plan(rng)

  def _from_stream(self, documents, generator) -> Iterator[framing.Pair]:
    """Cuts windows from concatenated documents, which each end with EOS."""
    documents = iter(documents)
    # Read ahead by a document: no window, and no draw, follows the last token.
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
      # Skipped for windows of a long document: each would copy the rest of it.
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
    reverse: whether the part before the split is the targets.
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
    """Returns a drawn split: a function from window size to first part's size.

    A function, as `two_vocabularies` may shorten a window after the draw.
    """
    return lambda size: size // 2

  def split(self, window, plan, rng):
    middle = self.draw_cut(rng)(len(window))
    parts = window[:middle], window[middle:]
    return framing.Pair(*(parts[::-1] if self.reverse else parts))


class UniformPrefixLM(PrefixLM):
  """Predicts the text after a uniformly drawn split.

  Of concatenated documents, windows have w = min(S - 2, T) tokens, and windows
  2k and 2k + 1 share a draw i in [1, w): the first is split at i, the second at
  w - i. Their inputs, with a BOS each, are w + 2 tokens and their targets w, so
  that both fill a row (Wang et al., arXiv:2204.05832, section 3.2).
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
    # The generator of the even window, so that both draw the same split.
    rng, plan = super()._draw_in_stream(index - index % 2, generator)
    return rng, WindowPlan(plan.inner, plan.last, bool(index % 2))

  def split(self, window, plan, rng):
    if not plan.task:
      return super().split(window, plan, rng)
    middle = plan.inner - uniform_split(rng.random(), plan.inner)
    # Only the last window of a shard is shorter; then a single token is left as
    # its target.
    middle = min(middle, len(window) - 1)
    return framing.Pair(window[:middle], window[middle:])


class ReversePrefixLM(PrefixLM):
  """Predicts the text before a uniformly drawn split from the text after it.

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
