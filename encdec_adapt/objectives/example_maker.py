"""Objectives: the examples made of a document.

An `Objective` is parsed from `config.data.objective` (`objective_names.parse`).
It has the values of its options, the class of its maker and the kind of its
rows (`row_fields`). `Objective.make` gives the maker of examples for rows of
given lengths and a vocabulary: an `ExampleMaker` of `windows`, `denoising`,
`noising`, `supervised`, `preferences`, `labelled` or `embeddings`. These
modules list the names of their objectives in `OBJECTIVES`.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

import abc
import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
import functools
import json
import types
from typing import Any

import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.objectives import framing, row_fields
from encdec_adapt.tokenizers import vocabulary as vocabulary_lib

Generator = Callable[[str], np.random.Generator]
# Name of a noise in the counts -> its share of the windows, and the share of
# hidden tokens; None if every window draws its share.
HiddenShares = Mapping[str, tuple[float, float | None]]


@dataclasses.dataclass(frozen=True)
class Option:
  """An option in the name of an objective.

  Attributes:
    parse: parses its value; raises a ValueError.
    form: spelling of the option, for errors.
    verbatim: whether spaces around its value belong to it.
    one_vocabulary: reason that both sides must share a vocabulary if it is set;
      '' if they may differ.
  """

  parse: Callable[[str], Any]
  form: str
  verbatim: bool = False
  one_vocabulary: str = ''


@dataclasses.dataclass(frozen=True)
class DocumentPolicy:
  """Treatment of documents that do not suit an objective.

  Attributes:
    locate: returns the file and line of a document id, for errors.
    skips_bad: whether documents that cannot be read are left out and counted.
    refuses_long: whether inputs that are longer than a row are an error.
  """

  locate: Callable[[str], str] = str
  skips_bad: bool = False
  refuses_long: bool = False


POLICY = DocumentPolicy()


class ExampleMaker(abc.ABC):
  """Makes examples of documents, for rows of given lengths.

  Attributes:
    name: name as in a configuration, options included.
    options: options that a name may have.
    documents: kind of documents that it reads: 'text', 'pairs', 'chat',
      'preferences', 'labels' or 'embed'.
    reads: content of documents: 'tokens', or 'text' (JSON but for texts).
    teacher_reads: content from which a teacher can predict the targets:
      'inputs'; 'text', out of which spans were cut (`framing.with_windows`);
      or '' for none.
    one_vocabulary: reason that both sides must share a vocabulary; '' if they
      may differ.
    lengths: row lengths that every example fits.
    counts: dropped and cut examples, hidden tokens, and the like, which the
      manifest states.
    first_losses: description of the first example with a lossy or an empty
      target, by the name of its count.
  """

  options: Mapping[str, Option] = types.MappingProxyType({})
  documents = 'text'
  reads = 'tokens'
  teacher_reads = ''
  one_vocabulary = 'both sides read the tokens of one window'

  def __init__(self, name: str, lengths: framing.Lengths):
    """Takes the name and the lengths, which `Objective.make` checks."""
    self.name = name
    self.lengths = lengths
    self.counts: collections.Counter[str] = collections.Counter()
    self.first_losses: dict[str, str] = {}

  @classmethod
  def rows(cls, options: Mapping[str, Any]) -> row_fields.RowFields:
    """Returns the kind of rows that hold its examples."""
    return row_fields.PAIRS

  @classmethod
  def without_masks(cls, text: str, options: Mapping[str, Any]) -> str:
    """Returns the same objective without masks in the text that is read.

    Held-out rows are made with it, so that held-out losses of MEAP and of plain
    next-token prediction compare, as in its published code. `concatenate` in
    it has no effect (`objective_names.for_evaluation`).

    Args:
      text: name and options of the objective.
      options: values of the options.
    """
    return text

  @classmethod
  def hidden_shares(cls, text: str, options: Mapping[str, Any]) -> HiddenShares:
    """Returns the expected shares of windows and hidden tokens by noise."""
    return {}

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
    self,
    documents: Iterable[tuple[str, Any]],
    generator: Generator,
    policy: DocumentPolicy = POLICY,
  ) -> Iterator[Any]:
    """Makes the examples of documents.

    Args:
      documents: (id, content) pairs of one virtual shard, in order; the
        content is of the kind that the maker `reads`: tokens, int32 [n] with
        n > 0, or text.
      generator: returns the generator of a name, which draws everything about
        an example: its document's id, '#' and its number there, or '#' and its
        number in the shard if documents are concatenated. Not called if
        nothing is drawn.
      policy: treatment of documents that do not suit the objective.

    Yields:
      Examples that fit the lengths, with the ids of their documents.

    Raises:
      UserError: a document is bad or too long, and the policy refuses it.
    """

  def _parsed(
    self,
    documents: Iterable[tuple[str, str]],
    policy: DocumentPolicy,
    parse: Callable[..., Any],
  ) -> Iterator[tuple[str, Any]]:
    """Yields the id of each document, a JSON list, and its parsed content.

    Args:
      documents: see `examples`.
      policy: see `examples`.
      parse: parses the parts of a list; returns None to drop the document, and
        raises a UserError where it is bad.

    Raises:
      UserError: `parse` refuses a document, and `policy` does not skip it.
    """
    for name, content in documents:
      try:
        parsed = parse(*json.loads(content))
      except errors.UserError as error:
        if not policy.skips_bad:
          raise errors.UserError(
            f'example {policy.locate(name)}: {error}. Correct it, or set'
            " config.data.bad_documents='skip' to leave such documents out."
          ) from error
        self.counts['bad_documents'] += 1
        continue
      if parsed is not None:
        yield name, parsed


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
    maker: class of its maker.
    options: values of its options, and of those that its name stands for.
  """

  text: str
  maker: type[ExampleMaker] = dataclasses.field(compare=False, repr=False)
  options: Mapping[str, Any] = dataclasses.field(compare=False, repr=False)

  def __str__(self) -> str:
    return self.text

  @functools.cached_property
  def rows(self) -> row_fields.RowFields:
    """The kind of its rows."""
    return self.maker.rows(self.options)

  @property
  def masks_inputs(self) -> bool:
    """Whether masks replace text that a model reads (MEAP)."""
    return self.maker.without_masks(self.text, self.options) != self.text

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

  def check_lengths(self, lengths: framing.Lengths) -> None:
    """Checks that a row has the sides that the objective fills.

    Raises:
      UserError: names the length to change.
    """
    for side in ('encoder', 'decoder'):
      length, filled = getattr(lengths, side), side in self.rows.sides
      if filled == (length > 0):
        continue
      rule = 'above 0'
      if not filled:
        rule = f'0, as {self.text!r} fills only the {self.rows.sides[0]}'
      # The usual mistake: settings of a causal language model for a pair.
      if len(self.rows.sides) == 2 and side == 'encoder':
        rule += ' (causal_lm and full_lm have no inputs)'
      raise errors.UserError(
        f'objective {self.text!r}: config.data.{side}_length is {length}; it'
        f' must be {rule}'
      )

  def check_vocabularies(self) -> None:
    """Refuses an objective that cannot have two vocabularies.

    Raises:
      UserError: states the reason.
    """
    reasons = [
      option.one_vocabulary
      for name, option in self.maker.options.items()
      if self.options.get(name)
    ]
    # Reasons of options come first: they can be left out.
    if reason := next(filter(None, [*reasons, self.maker.one_vocabulary]), ''):
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
    self.check_lengths(lengths)
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
