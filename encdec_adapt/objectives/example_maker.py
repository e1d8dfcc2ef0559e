"""Objectives: the examples made of a document, and their fields in a row.

An `Objective` is parsed from `config.data.objective` (`objective_names.parse`)
and answers every question about itself. `Objective.make` gives the maker of
examples for rows of given lengths and a vocabulary: an `ExampleMaker` of
`windows`, `denoising`, `noising`, `supervised`, `preferences`, `labelled` or
`embeddings`.
The answers are attributes and methods of these classes. A module of this kind
lists its names in `OBJECTIVES`.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

import abc
import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
import json
import types
from typing import Any

import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.objectives import framing
from encdec_adapt.tokenizers import vocabulary as vocabulary_lib

Generator = Callable[[str], np.random.Generator]
# Name of a noise, as in `ExampleMaker.count_hidden` -> its share of the
# windows, and the share of hidden tokens; None if every window draws its share.
HiddenShares = Mapping[str, tuple[float, float | None]]


@dataclasses.dataclass(frozen=True)
class Option:
  """An option in the name of an objective.

  Attributes:
    parse: parses its value; raises a ValueError.
    form: spelling of the option, for errors.
    verbatim: whether spaces around its value belong to it.
  """

  parse: Callable[[str], Any]
  form: str
  verbatim: bool = False


@dataclasses.dataclass(frozen=True)
class RowField:
  """A field of an example that is stored in a row.

  Attributes:
    name: attribute of the example, an array [n], a text or None.
    dtype: 'int32' for tokens, 'count' for other integers, 'float32' for
      weights, 'json' for a text.
    side: stack that reads the tokens, so that they are of its vocabulary.
  """

  name: str
  dtype: str = 'int32'
  side: str = 'decoder'


PAIR_FIELDS = (
  RowField('inputs', side='encoder'),
  RowField('targets'),
  RowField('prefix'),
  RowField('decoder_inputs'),
  RowField('weights', 'float32'),
  RowField('fields', 'json'),
)


class ExampleMaker(abc.ABC):
  """Makes examples of documents, for rows of given lengths.

  Attributes:
    name: name as in a configuration, options included.
    feeds: sides of a row that it fills: 'decoder' (causal language models),
      'pair', or 'encoder' (masked language models).
    options: options that a name may have.
    draws: whether anything is random.
    documents: kind of documents that it reads: 'text', 'pairs', 'chat',
      'preferences', 'labels' or 'embed'.
    reads: content of documents: 'tokens', or 'text' (JSON of pairs and chats).
    fields: fields of an example that are stored in a row.
    example: class of the examples, a NamedTuple with `fields` and `documents`,
      and a method `positions`, as `framing.Pair`; samples read its `inputs` and
      `teacher_inputs`.
    rows: content of its rows, as in `Architecture.rows`; '' for the sides.
    answers: answers of a row; several are fields [P, G, T], and rows of such
      an objective hold a single example.
    axes: logical axes of batch fields other than rows ('batch') of tokens
      ('length'). Objectives that have some override `frame` and `check`.
    distills: whether a teacher can predict the targets from the inputs, or
      from the text that spans were cut out of.
    hides_spans: whether spans of a text are targets, behind the sentinels that
      stand for them in the inputs; a teacher then reads the text instead
      (`framing.with_windows`).
    ends_turns: whether targets end with the token that ends a turn.
    concatenate: whether examples cross documents.
    one_vocabulary: reason that both sides must share a vocabulary; '' if they
      may differ.
    lengths: row lengths that every pair fits.
    skips_bad: whether documents that it cannot read are left out and counted.
    refuses_long: whether inputs that are longer than a row are an error.
    locate: returns the file and line of a document id, for errors.
    frame: frames a row of examples; see `framing.frame_row`.
    check: checks framed rows; see `framing.check_framing`.
    counts: dropped and cut examples and hidden tokens (`count_hidden`), which
      the manifest states.
    first_losses: description of the first example with a lossy or an empty
      target, by the name of its count.
  """

  feeds = 'pair'
  options: Mapping[str, Option] = types.MappingProxyType({})
  draws = False
  documents = 'text'
  reads = 'tokens'
  fields = PAIR_FIELDS
  example: type = framing.Pair
  rows = ''
  answers = 1
  axes: Mapping[str, tuple[str | None, ...]] = types.MappingProxyType({})
  distills = False
  hides_spans = False
  ends_turns = False
  concatenate = False
  one_vocabulary = 'both sides read the tokens of one window'
  skips_bad = False
  refuses_long = False
  locate: Callable[[str], str] = staticmethod(str)
  frame = staticmethod(framing.frame_row)
  check = staticmethod(framing.check_framing)

  def __init__(self, name: str, lengths: framing.Lengths):
    """Checks the lengths.

    Args:
      name: name of the objective, for errors.
      lengths: row lengths that every pair has to fit.

    Raises:
      UserError: the lengths do not suit the objective.
    """
    check_lengths(name, self.feeds, lengths)
    self.name = name
    self.lengths = lengths
    self.counts: collections.Counter[str] = collections.Counter()
    self.first_losses: dict[str, str] = {}

  @classmethod
  def masks_inputs(cls, options: Mapping[str, Any]) -> bool:
    """Whether masks replace text that a model reads (MEAP)."""
    return False

  @classmethod
  def shared_mask_share(cls, options: Mapping[str, Any]) -> float:
    """Share of the decoder's inputs that a common pattern masks in all rows."""
    return 0.0

  @classmethod
  def evaluation_text(cls, text: str, options: Mapping[str, Any]) -> str:
    """Returns the objective that held-out rows are made with.

    It lacks the masks that only training has, so that held-out losses of MEAP
    and of plain next-token prediction compare, as in its published code.
    `concatenate` in it has no effect (`objective_names.for_evaluation`).
    """
    return text

  @classmethod
  def hidden_shares(cls, text: str, options: Mapping[str, Any]) -> HiddenShares:
    """Returns the expected shares of windows and hidden tokens by noise."""
    return {}

  @classmethod
  def added_sentinels(
    cls, options: Mapping[str, Any], policy: str, lengths: framing.Lengths
  ) -> int:
    """Returns the new sentinels that a policy for them needs."""
    return 0

  @classmethod
  def with_options(cls, options: Mapping[str, Any]) -> type['ExampleMaker']:
    """Returns the class with options that `frame` needs as attributes."""
    return cls

  @classmethod
  def capacity(cls, lengths: framing.Lengths) -> framing.Lengths:
    """Returns the most that the `positions` of a row's examples may sum to."""
    return lengths

  @classmethod
  def modes(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the mode tokens that inputs begin with, of `vocabulary.MODES`."""
    return ()

  @classmethod
  def require_one_vocabulary(cls, options: Mapping[str, Any]) -> str:
    """Returns why both sides must share a vocabulary; '' if they need not."""
    # Two vocabularies are split in text, which concatenated ids no longer have.
    if options.get('concatenate'):
      return 'windows of concatenated documents are cut in the tokens of one'
    return cls.one_vocabulary

  @classmethod
  def build(
    cls,
    text: str,
    lengths: framing.Lengths,
    vocabulary: vocabulary_lib.Vocabulary,
    encoder_vocabulary: vocabulary_lib.Vocabulary | None,
    sentinel_policy: str,
    options: Mapping[str, Any],
  ) -> 'ExampleMaker':
    """Makes the maker; see `Objective.make`."""
    return cls(text, lengths, vocabulary, **options)

  @classmethod
  def revisions(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the changes to the examples since record format 7, in order.

    Their number is the revision of the objective; records of an earlier
    revision are refused with the changes as the reason.

    Args:
      options: options of the objective's name.
    """
    return ()

  @abc.abstractmethod
  def examples(
    self, documents: Iterable[tuple[str, Any]], generator: Generator
  ) -> Iterator[framing.Pair]:
    """Makes the pairs of documents.

    Args:
      documents: (id, content) pairs of one virtual shard, in order; the
        content is of the kind that the objective `reads`: tokens, int32 [n]
        with n > 0, or text.
      generator: returns the generator of a name, which draws everything about
        an example: its document's id, '#' and its number there, or '#' and its
        number in the shard if documents are concatenated. Not called if
        nothing is drawn.

    Yields:
      Pairs that fit the lengths, with the ids of their documents.
    """

  def parsed_examples(
    self,
    documents: Iterable[tuple[str, str]],
    parse: Callable[..., Any],
  ) -> Iterator[Any]:
    """Yields the example of each document that is a JSON list.

    Args:
      documents: see `examples`.
      parse: makes an example of the parts of a list; returns None to drop it,
        and raises a UserError where it is bad.

    Raises:
      UserError: a document is bad, and `skips_bad` is not set; names it.
    """
    for name, content in documents:
      try:
        example = parse(*json.loads(content))
      except errors.UserError as error:
        if not self.skips_bad:
          raise errors.UserError(
            f'example {self.locate(name)}: {error}'
          ) from error
        self.counts['bad_documents'] += 1
        continue
      if example is not None:
        yield example._replace(documents=(name,))

  def count_hidden(self, noise: str, tokens: int, hidden: int) -> None:
    """Counts a window of a noise, its tokens, and those that were hidden."""
    self.counts[f'{noise}: windows'] += 1
    self.counts[f'{noise}: tokens'] += tokens
    self.counts[f'{noise}: hidden'] += hidden

  def shared_spans(self, pair: framing.Pair) -> int:
    """Returns the number of spans that share their sentinel with another."""
    return 0


@dataclasses.dataclass(frozen=True)
class Name:
  """A name that a configuration gives to an objective.

  Attributes:
    maker: class of its maker.
    predicts: description of the targets, for the table in configs/README.md.
    preset: options that the name stands for.
    parse: parses a text that stands before the options to options; None where
      there is none.
  """

  maker: type[ExampleMaker]
  predicts: str
  preset: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  parse: Callable[[str], dict[str, Any]] | None = None


@dataclasses.dataclass(frozen=True)
class Objective:
  """An objective of a configuration.

  Attributes:
    text: name and options of the objective, as the configuration has them.
    kind: class of its maker, without its options.
    options: values of its options, and of those that its name stands for.
  """

  text: str
  kind: type[ExampleMaker] = dataclasses.field(compare=False, repr=False)
  options: Mapping[str, Any] = dataclasses.field(compare=False, repr=False)

  def __str__(self) -> str:
    return self.text

  @property
  def maker(self) -> type[ExampleMaker]:
    """Class of its maker: see `ExampleMaker.with_options`."""
    return self.kind.with_options(self.options)

  @property
  def feeds(self) -> str:
    """Sides of a row that it fills: see `ExampleMaker.feeds`."""
    return self.maker.feeds

  @property
  def documents(self) -> str:
    """Kind of documents that it reads: see `ExampleMaker.documents`."""
    return self.maker.documents

  @property
  def answers(self) -> int:
    """Answers of a row: see `ExampleMaker.answers`."""
    return self.maker.answers

  @property
  def rows(self) -> str:
    """Content of its rows, as in `Architecture.rows`."""
    return 'labels' if self.labels else self.maker.rows or self.feeds

  @property
  def labels(self) -> tuple[str, ...]:
    """Labels that it predicts; empty for tokens."""
    return self.options.get('labels', ())

  @property
  def concatenate(self) -> bool:
    """Whether windows cross documents, so that they may contain EOS."""
    return self.options.get('concatenate', False)

  @property
  def ends_turns(self) -> bool:
    """Whether targets end with the token that ends a turn."""
    return self.maker.ends_turns

  @property
  def eos_inside(self) -> bool:
    """Whether inputs may hold EOS, of a document or a turn."""
    # The EOS of some vocabularies ends a turn, and inputs have several.
    return self.concatenate or self.ends_turns

  @property
  def masks_inputs(self) -> bool:
    """Whether masks replace text that a model reads (MEAP)."""
    return self.maker.masks_inputs(self.options)

  @property
  def shared_mask_share(self) -> float:
    """Share of the inputs that framing masks alike in all rows, else 0."""
    return self.maker.shared_mask_share(self.options)

  @property
  def prefix(self) -> str | None:
    """Text before all inputs; None if the objective has no such option."""
    has_option = 'prefix' in self.maker.options
    return self.options.get('prefix', '') if has_option else None

  @property
  def prompts(self) -> Mapping[str, str]:
    """Text before the texts that are embedded, by their role."""
    roles = self.maker.options.keys() & {'query', 'document'}
    return {role: self.options.get(role, '') for role in sorted(roles)}

  @property
  def modes(self) -> tuple[str, ...]:
    """Mode tokens of the inputs: see `ExampleMaker.modes`."""
    return self.maker.modes(self.options)

  @property
  def separator(self) -> str:
    """Text between the inputs and targets of decoder-only rows."""
    return self.options.get('separator', '')

  @property
  def hidden_shares(self) -> HiddenShares:
    """Expected shares of hidden tokens by noise; see `HiddenShares`."""
    return self.maker.hidden_shares(self.text, self.options)

  @property
  def revisions(self) -> tuple[str, ...]:
    """Changes to its examples; see `ExampleMaker.revisions`."""
    changes = self.maker.revisions(self.options)
    # Parsing used to remove a space at the end, so that records of the same
    # text may have been made without it.
    if self.text != self.text.rstrip():
      changes += ('options keep the space at their end',)
    if self.options.get('shortest'):
      changes += ('documents shorter than the option shortest are windows',)
    # Held-out rows (`objective_names.for_evaluation`).
    if self.options.get('concatenate') is False:
      changes += ('held-out windows do not cross documents',)
    return changes

  def added_sentinels(self, policy: str, lengths: framing.Lengths) -> int:
    """Returns the new sentinels that 'extend_vocabulary' needs, else 0."""
    return self.maker.added_sentinels(self.options, policy, lengths)

  def check_lengths(self, lengths: framing.Lengths) -> None:
    """Checks that a row has the sides that it fills; see `check_lengths`."""
    check_lengths(self.text, self.feeds, lengths)

  def check_vocabularies(self) -> None:
    """Refuses an objective that cannot have two vocabularies.

    Raises:
      UserError: states the reason.
    """
    if reason := self.maker.require_one_vocabulary(self.options):
      raise errors.UserError(
        f'config.data.objective {self.text!r} needs one vocabulary for both'
        f' sides: {reason}. Leave out config.data.encoder_vocabulary, or use'
        ' prefix_lm, prefix_lm_uniform, reverse_prefix_lm, pairs or chat'
        ' without these options'
      )

  def make(
    self,
    lengths: framing.Lengths,
    vocabulary: vocabulary_lib.Vocabulary,
    *,
    encoder_vocabulary: vocabulary_lib.Vocabulary | None = None,
    sentinel_policy: str = 'unique',
  ) -> ExampleMaker:
    """Makes the maker of examples.

    Args:
      lengths: row lengths that every example has to fit.
      vocabulary: vocabulary with EOS, and with sentinels, mode tokens or a mask
        if the objective needs them; the decoder's if there are two.
      encoder_vocabulary: vocabulary of the encoder if it is another one.
      sentinel_policy: one of `denoising.POLICIES`.

    Raises:
      UserError: the lengths do not suit the objective, it cannot have two
        vocabularies, or the vocabulary lacks special tokens.
    """
    if encoder_vocabulary is not None:
      self.check_vocabularies()
    return self.maker.build(
      self.text,
      lengths,
      vocabulary,
      encoder_vocabulary,
      sentinel_policy,
      self.options,
    )


def check_lengths(name: str, feeds: str, lengths: framing.Lengths) -> None:
  """Checks that a row has the sides that an objective fills.

  Raises:
    UserError: names the length to change.
  """
  for side in ('encoder', 'decoder'):
    length, filled = getattr(lengths, side), feeds in (side, 'pair')
    if filled != (length > 0):
      rule = 'above 0' if filled else f'0, as {name!r} fills only the {feeds}'
      # The usual mistake: settings of a causal language model for a pair.
      if feeds == 'pair' and side == 'encoder':
        rule += ' (causal_lm and full_lm have no inputs)'
      raise errors.UserError(
        f'objective {name!r}: config.data.{side}_length is {length}; it must be'
        f' {rule}'
      )
