"""Base classes of objectives, which make examples from documents.

`objective_names.parse` parses `config.data.objective` to an `Objective`, with
its option values, maker class and kind of rows (`row_fields`).
`Objective.make` returns the `ExampleMaker` for row lengths and a vocabulary,
from `windows`, `denoising`, `noising`, `shared_noise`, `supervised`,
`preferences`, `labelled` or `embeddings`. These modules list their objectives
in `OBJECTIVES`.

Must not import TensorFlow, SeqIO or JAX.
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
# Name of a noise in the counts -> its share of the windows, and its share of
# hidden tokens (None if drawn per window).
HiddenShares = Mapping[str, tuple[float, float | None]]


@dataclasses.dataclass(frozen=True)
class Option:
  """An option in the name of an objective.

  Attributes:
    parse: parses a value; raises a ValueError if invalid.
    form: spelling of the option, for errors.
    accepts: returns whether a parsed value is valid.
    verbatim: whether values keep surrounding spaces.
    one_vocabulary: reason why the option requires a shared vocabulary; '' if
      the sides may differ.
  """

  parse: Callable[[str], Any]
  form: str
  accepts: Callable[[Any], bool] = lambda value: True
  verbatim: bool = False
  one_vocabulary: str = ''


@dataclasses.dataclass(frozen=True)
class DocumentPolicy:
  """Treatment of invalid and overlong documents.

  Attributes:
    locate: returns the file and line of a document id, for errors.
    skips_bad: whether invalid documents are dropped and counted.
    refuses_long: whether inputs longer than a row are an error.
  """

  locate: Callable[[str], str] = str
  skips_bad: bool = False
  refuses_long: bool = False


POLICY = DocumentPolicy()


class ExampleMaker(abc.ABC):
  """Makes examples from documents, for rows of given lengths.

  Attributes:
    name: name in the configuration, with options.
    options: supported options by name.
    documents: kind of documents read: 'text', 'pairs', 'chat', 'preferences',
      'labels' or 'embed'.
    reads: content of documents: 'tokens', or 'text' (JSON except for the kind
      'text').
    teacher_reads: content read by a teacher to predict the targets: 'inputs';
      'text', the uncorrupted window (`framing.with_windows`); or '' for none.
    one_vocabulary: reason why both sides must share a vocabulary; '' if they
      may differ.
    lengths: row lengths; every example fits.
    counts: counts for the manifest, such as dropped and truncated examples and
      hidden tokens.
    first_losses: description of the first example with a lossy or an empty
      target, by name of the count.
  """

  options: Mapping[str, Option] = types.MappingProxyType({})
  documents = 'text'
  reads = 'tokens'
  teacher_reads = ''
  one_vocabulary = 'both sides read the tokens of one window'
  # Counts that the manifest has even if they are 0.
  _counted: tuple[str, ...] = ()

  def __init__(self, name: str, lengths: framing.Lengths):
    """Initializes without checks; `Objective.make` checks the lengths."""
    self.name = name
    self.lengths = lengths
    self.counts = collections.Counter(dict.fromkeys(self._counted, 0))
    self.first_losses: dict[str, str] = {}

  @classmethod
  def rows(cls, options: Mapping[str, Any]) -> row_fields.RowFields:
    """Returns the kind of rows of its examples."""
    return row_fields.PAIRS

  @classmethod
  def without_masks(cls, text: str, options: Mapping[str, Any]) -> str:
    """Returns the objective without MEAP's masks.

    It makes the held-out rows, so that held-out losses of MEAP and plain
    next-token prediction are comparable, as in MEAP's published code; its
    option `concatenate` has no effect (`objective_names.for_evaluation`).

    Args:
      text: name and options of the objective.
      options: option values.
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
    """Builds the maker; see `Objective.make`."""
    return cls(text, lengths, vocabulary, **options)

  @classmethod
  def revisions(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the changes to the examples since record format 7, in order.

    Their number is the objective's revision. Records of earlier revisions are
    refused with an error that lists the changes.

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
    """Makes examples from documents.

    Args:
      documents: (id, content) pairs of one virtual shard, in order; the content
        has the kind in `reads`: tokens, int32 [n] with n > 0, or text.
      generator: returns the random generator of an example, by name: document
        id, '#' and the example's index in it, or '#' and its index in the shard
        if documents are concatenated. Not called if nothing is random.
      policy: treatment of invalid and overlong documents.

    Yields:
      Examples that fit the lengths, with document ids.

    Raises:
      UserError: the policy refuses an invalid or overlong document.
    """

  def _parsed(
    self,
    documents: Iterable[tuple[str, str]],
    policy: DocumentPolicy,
    parse: Callable[..., Any],
  ) -> Iterator[tuple[str, Any]]:
    """Yields the id and the parsed content of each document, a JSON list.

    Args:
      documents: see `examples`.
      policy: see `examples`.
      parse: parses the items of the list; returns None to drop the document,
        and raises a UserError if it is invalid.

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
  """Entry of an objective name.

  Attributes:
    maker: class of its maker.
    predicts: description of the targets, in the table of configs/objectives.md.
    preset: options implied by the name.
    parse: parses the text before the options to options; None if names have
      no such text.
  """

  maker: type[ExampleMaker]
  predicts: str
  preset: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  parse: Callable[[str], dict[str, Any]] | None = None


@dataclasses.dataclass(frozen=True)
class Objective:
  """An objective of a configuration.

  Attributes:
    text: name and options, as in the configuration.
    maker: class of its maker.
    options: option values, including the preset of its name.
  """

  text: str
  maker: type[ExampleMaker] = dataclasses.field(compare=False, repr=False)
  options: Mapping[str, Any] = dataclasses.field(compare=False, repr=False)

  def __str__(self) -> str:
    return self.text

  @functools.cached_property
  def rows(self) -> row_fields.RowFields:
    """Kind of its rows."""
    return self.maker.rows(self.options)

  @property
  def masks_inputs(self) -> bool:
    """Whether the inputs have MEAP's masks."""
    return self.maker.without_masks(self.text, self.options) != self.text

  @property
  def revisions(self) -> tuple[str, ...]:
    """Changes to its examples; see `ExampleMaker.revisions`."""
    changes = self.maker.revisions(self.options)
    # Earlier versions stripped a trailing space, so records with the same text
    # may differ.
    if self.text != self.text.rstrip():
      changes += ('options keep the space at their end',)
    if self.options.get('shortest'):
      changes += ('documents shorter than the option shortest are windows',)
    # Held-out rows (`objective_names.for_evaluation`).
    if self.options.get('concatenate') is False:
      changes += ('held-out windows do not cross documents',)
    return changes

  def check_lengths(self, lengths: framing.Lengths) -> None:
    """Checks that exactly the sides used by the objective have a length.

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
    """Checks that the objective supports two vocabularies.

    Raises:
      UserError: it does not; names the reason.
    """
    reasons = [
      option.one_vocabulary
      for name, option in self.maker.options.items()
      if self.options.get(name)
    ]
    # Options come first: the user can leave them out.
    if reason := next(filter(None, [*reasons, self.maker.one_vocabulary]), ''):
      raise errors.UserError(
        f'config.data.objective {self.text!r} needs one vocabulary for both'
        f' sides: {reason}. Leave out config.data.encoder_vocabulary, or use'
        ' prefix_lm, prefix_lm_uniform, reverse_prefix_lm, passages, pairs or'
        ' chat without these options'
      )

  def make(
    self,
    lengths: framing.Lengths,
    vocabulary: vocabulary_lib.Vocabulary,
    *,
    encoder_vocabulary: vocabulary_lib.Vocabulary | None = None,
    sentinel_policy: str = 'unique',
  ) -> ExampleMaker:
    """Returns the example maker for row lengths and vocabularies.

    Args:
      lengths: row lengths; every example must fit.
      vocabulary: vocabulary with EOS and, if needed, sentinels, mode tokens or
        a mask; the decoder's if there are two.
      encoder_vocabulary: vocabulary of the encoder, if different.
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
