"""Language-model objectives: windows of a document as (inputs, targets) pairs.

| name              | inputs                       | targets               |
|-------------------|------------------------------|-----------------------|
| causal_lm         | none                         | the window            |
| full_lm           | none                         | the window, of        |
|                   |                              | concatenated documents|
| prefix_lm         | its first half               | its second half       |
| prefix_lm_uniform | up to a uniform split        | what follows          |
| reverse_prefix_lm | what follows a uniform split | what precedes it      |

`prefix_lm` splits in half, as T5Gemma does (arXiv:2504.06225). The uniform
split is in [1, window), as in Wang et al. (arXiv:2204.05832). `full_lm` is
their full language modeling. With `concatenate`, two uniform splits in a row
are complementary, which is their packing of two examples into one
(`UniformPrefixLM`).

A document is cut into windows that fit a row with the framing of
`objectives/framing.py` (m + 1 encoder and n decoder positions), as long as the
row allows. Targets end in EOS if and only if the document ends. With the option
`concatenate`, the documents of a shard are joined first, each with an EOS at
its end, and windows are cut from the whole.

Pure numpy; this module imports neither TensorFlow nor SeqIO nor jax.
"""

import abc
import bisect
from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import itertools
from typing import Any

import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.objectives import (
  definition,
  framing,
  two_vocabularies,
)
from encdec_adapt.tokenizers import vocabulary as vocabulary_lib

# Joins the documents of a shard before windows are cut.
CONCATENATE = {'concatenate': definition.Option(lambda _: True, 'concatenate')}


@dataclasses.dataclass(frozen=True)
class Plan:
  """Decisions on a window before it is cut.

  Attributes:
    inside: most tokens of a window that does not end its document.
    last: most tokens of a document's last window, whose targets get EOS.
    task: denoiser of the window, for mixtures of denoisers; whether its split
      is the complement of the one before, for uniform splits; else None.
  """

  inside: int
  last: int
  task: Any = None


class WindowMaker(definition.ExampleMaker):
  """Cuts documents into windows and makes a pair of each.

  Attributes:
    adds_eos: whether the targets of a document's last window end in EOS.
    plans: possible plans of a window.
  """

  options = CONCATENATE
  adds_eos = True
  plans: Sequence[Plan]

  def __init__(
    self,
    name: str,
    lengths: framing.Lengths,
    vocabulary: vocabulary_lib.Vocabulary,
    *,
    concatenate: bool = False,
  ):
    """Plans the windows.

    Args:
      name: name of the objective, for errors.
      lengths: row lengths that every pair has to fit.
      vocabulary: vocabulary of the tokens.
      concatenate: whether windows cross documents.

    Raises:
      UserError: the lengths or the vocabulary do not suit the objective.
    """
    super().__init__(name, lengths)
    self.concatenate = concatenate
    self._eos = np.array([vocabulary.eos], np.int32)
    self.plans = self._make_plans()
    if not self._have_windows(self.plans):
      shortest = self._shortest()
      raise errors.UserError(
        f'objective {name!r}: no window fits config.data.encoder_length='
        f'{lengths.encoder} and config.data.decoder_length={lengths.decoder};'
        f' they must be at least {shortest.encoder} and {shortest.decoder}'
      )

  def _have_windows(self, plans: Sequence[Plan]) -> bool:
    return all(min(plan.inside, plan.last) >= 1 for plan in plans)

  def _shortest(self) -> framing.Lengths:
    """Returns the next longer row lengths that a window fits."""
    encoder, decoder = self.lengths.encoder, self.lengths.decoder
    for size in range(2, 100):
      # A side that is not filled stays 0.
      longer = encoder and max(encoder, size), decoder and max(decoder, size)
      # One side alone where that is enough, before both.
      for sides in ((longer[0], decoder), (encoder, longer[1]), longer):
        self.lengths = framing.Lengths(*sides)
        with contextlib.suppress(errors.UserError):  # Targets do not fit yet.
          if self._have_windows(self._make_plans()):
            return self.lengths
    return self.lengths

  @abc.abstractmethod
  def _make_plans(self) -> Sequence[Plan]:
    """Returns `plans`."""

  def _longest(
    self, sizes: Callable[[int], tuple[int, int]], task: Any = None
  ) -> Plan:
    """Returns the plan of the longest windows that fit a row.

    Args:
      sizes: function from a window's size to the most tokens of inputs and of
        targets (without EOS), neither of which decreases.
      task: see `Plan`.
    """

    def capacity(eos: int) -> int:
      """Returns the longest window whose targets have room for EOS (0, 1)."""

      def exceeds(window: int) -> bool:
        """Returns whether a window of this size may not fit a row."""
        inputs, targets = sizes(window)
        too_long = bool(self.lengths.encoder) and (
          inputs + 1 > self.lengths.encoder
        )
        return too_long or (
          self.feeds != 'encoder' and targets + eos > self.lengths.decoder
        )

      most = 4 * (self.lengths.encoder + self.lengths.decoder) + 1
      return bisect.bisect_left(range(1, most), True, key=exceeds)

    return Plan(capacity(0), capacity(int(self.adds_eos)), task)

  def require_targets(self, most: int, shorter: int, what: str) -> None:
    """Refuses lengths at which inputs that fill the encoder are not used.

    Args:
      most: targets of a window whose inputs fill the encoder.
      shorter: encoder length whose windows have targets that fit.
      what: what makes the targets.

    Raises:
      UserError: the targets do not fit; names the lengths that would do.
    """
    if most > self.lengths.decoder:
      raise errors.UserError(
        f'objective {self.name!r}: with config.data.encoder_length='
        f'{self.lengths.encoder} {what} makes up to {most} targets, more than'
        f' config.data.decoder_length={self.lengths.decoder}; set'
        f' decoder_length to at least {most}, or encoder_length to at most'
        f' {shorter}'
      )

  def draw_plan(self, rng: np.random.Generator | None) -> Plan:
    """Draws the plan of a document's next window."""
    del rng
    (plan,) = self.plans
    return plan

  @abc.abstractmethod
  def split(
    self, window: np.ndarray, plan: Plan, rng: np.random.Generator | None
  ) -> framing.Pair:
    """Returns the pair of a planned window [w], without EOS."""

  def examples(self, documents, generator):
    if self.concatenate:
      yield from self._from_stream(documents, generator)
      return
    for name, content in documents:
      for pair in self.pairs(
        content, lambda i, name=name: generator(f'{name}#{i}')
      ):
        yield framing.Pair(*pair[:-1], (name,))

  def pairs(
    self,
    tokens: np.ndarray,
    generator: Callable[[int], np.random.Generator],
  ) -> Iterator[framing.Pair]:
    """Cuts a whole document into windows, in order, and pairs each.

    Args:
      tokens: int32 [n], n > 0.
      generator: returns the generator of the i-th window.

    Yields:
      Pairs that fit the lengths; the last targets end in EOS.
    """
    left = tokens
    for i in itertools.count():
      rng = generator(i) if self.draws else None
      plan = self.draw_plan(rng)
      ends = len(left) <= plan.last
      # A token is left for the last window, which needs room for EOS.
      size = len(left) if ends else min(plan.inside, len(left) - 1)
      pair = self.split(left[:size], plan, rng)
      yield self._with_eos(pair) if ends and self.adds_eos else pair
      if ends:
        return
      left = left[size:]

  def _with_eos(self, pair: framing.Pair) -> framing.Pair:
    """Appends EOS to the targets, and what belongs to it to other fields."""
    inputs, targets, prefix, read, weights, documents = pair
    return framing.Pair(
      inputs,
      np.concatenate([targets, self._eos]),
      prefix,
      read if read is None else np.append(read, self._eos),
      weights if weights is None else np.append(weights, weights[-1:]),
      documents,
    )

  def _draw_in_stream(
    self, index: int, generator: definition.Generator
  ) -> tuple[np.random.Generator | None, Plan]:
    """Draws the plan of a window of concatenated documents, by its number."""
    rng = generator(f'#{index}') if self.draws else None
    return rng, self.draw_plan(rng)

  def _from_stream(self, documents, generator) -> Iterator[framing.Pair]:
    """Cuts windows from concatenated documents, each of which ends in EOS."""
    documents = iter(documents)
    following = next(documents, None)
    buffer, names = np.zeros(0, np.int32), []  # names: (id, tokens left)
    for i in itertools.count():
      if following is None and not len(buffer):
        return
      rng, plan = self._draw_in_stream(i, generator)
      waiting, size = [buffer], len(buffer)
      while size < plan.inside and following is not None:
        name, tokens = following
        waiting += [tokens, self._eos]
        names.append((name, len(tokens) + 1))
        size += len(tokens) + 1
        following = next(documents, None)
      if len(waiting) > 1:
        buffer = np.concatenate(waiting)
      size = min(plan.inside, len(buffer))
      pair = self.split(buffer[:size], plan, rng)
      buffer = buffer[size:]
      within = []
      while size:
        name, left = names[0]
        within.append(name)
        names[0] = (name, left - min(left, size))
        size -= min(left, size)
        if not names[0][1]:
          names.pop(0)
      yield pair._replace(documents=tuple(within))


class CausalLM(WindowMaker):
  """Predicts the whole window."""

  feeds = 'decoder'
  one_vocabulary = 'it has no inputs for an encoder'

  def _make_plans(self):
    return (self._longest(lambda window: (0, window)),)

  def split(self, window, plan, rng):
    return framing.Pair(np.zeros(0, np.int32), window)


class PrefixLM(WindowMaker):
  """Predicts the second half from the first, which is not the longer one.

  Attributes:
    reverse: whether the part before the split is the targets.
  """

  one_vocabulary = ''
  distills = True
  reverse = False

  @classmethod
  def build(
    cls, text, lengths, vocabulary, encoder_vocabulary, sentinel_policy, options
  ):
    del sentinel_policy
    maker = cls(text, lengths, vocabulary, **options)
    if encoder_vocabulary is None:
      return maker
    return two_vocabularies.TextSplit(maker, encoder_vocabulary, vocabulary)

  def _make_plans(self):
    return (self._longest(lambda window: (window // 2, window - window // 2)),)

  def draw_cut(self, rng: np.random.Generator | None) -> Callable[[int], int]:
    """Draws the split: a function from a window's size to its first part's."""
    del rng
    return lambda size: size // 2

  def split(self, window, plan, rng):
    middle = self.draw_cut(rng)(len(window))
    parts = window[:middle], window[middle:]
    return framing.Pair(*(parts[::-1] if self.reverse else parts))


class UniformPrefixLM(PrefixLM):
  """Predicts the text after a uniformly drawn split.

  Of concatenated documents, windows have w = min(S - 2, T) tokens, and windows
  2k and 2k + 1 share a draw i in [1, w): one is split at i, the next at w - i.
  Their inputs, with a BOS each, are w + 2 tokens and their targets w, so that
  both fill a row (Wang et al., arXiv:2204.05832, section 3.2).
  """

  draws = True

  @classmethod
  def revisions(cls, options):
    change = 'two windows that fill a row share the draw of their splits'
    return (change,) * bool(options.get('concatenate'))

  def _make_plans(self):
    if self.concatenate:
      window = min(self.lengths.encoder - 2, self.lengths.decoder)
      return (Plan(*2 * [window if window > 1 else 0]),)
    # Inputs have at most window - 1 tokens; the row has room for one more BOS.
    return (self._longest(lambda window: (window, max(window - 1, 1))),)

  def draw_cut(self, rng):
    return functools.partial(uniform_split, rng.random())

  def _draw_in_stream(self, index, generator):
    rng, plan = super()._draw_in_stream(index - index % 2, generator)
    return rng, dataclasses.replace(plan, task=bool(index % 2))

  def split(self, window, plan, rng):
    if not plan.task:
      return super().split(window, plan, rng)
    middle = plan.inside - uniform_split(rng.random(), plan.inside)
    # Only the last window of a shard is shorter; its target is one token then.
    middle = min(middle, len(window) - 1)
    return framing.Pair(window[:middle], window[middle:])


class ReversePrefixLM(PrefixLM):
  """Predicts the text before a uniformly drawn split from the text after it.

  Source: the objectives of t5/data/preprocessors.py.
  """

  draws = True
  distills = False
  reverse = True

  def _make_plans(self):
    return (self._longest(lambda window: (window, window)),)

  def draw_cut(self, rng):
    share = rng.random()
    return lambda size: max(uniform_split(share, size), 1)


def uniform_split(share: float, size: int) -> int:
  """Returns a split in [1, size) at a share in [0, 1); 0 for one token."""
  return 1 + int(share * (size - 1)) if size > 1 else 0


OBJECTIVES = {
  'causal_lm': definition.Name(CausalLM, 'next token, documents apart'),
  'full_lm': definition.Name(
    CausalLM,
    'next token, documents concatenated (Wang et al.)',
    {'concatenate': True},
  ),
  'prefix_lm': definition.Name(
    PrefixLM, 'second half from the first (T5Gemma)'
  ),
  'prefix_lm_uniform': definition.Name(
    UniformPrefixLM, 'the text after a uniform split (Wang et al.)'
  ),
  'reverse_prefix_lm': definition.Name(
    ReversePrefixLM, 'the text before a uniform split'
  ),
}
