"""Preferences: rows of a prompt with a chosen and a rejected answer.

| name             | inputs                              | answers             |
|------------------|-------------------------------------|---------------------|
| preferences      | a text                              | texts, EOS          |
| chat_preferences | the conversation, or a text as a    | assistant turns,    |
|                  | user turn, with assistant header    | with end token      |

Both read `preferences:..` sources and tokenize like `pairs` and `chat`
(`objectives/supervised.py`); `separator` (both) and `prefix` (`preferences`)
are options as there. A row is a single example, since losses compare its
answers: decoder, teacher and target fields are [2, L], chosen answer first, and
encoder fields [S], as the encoder reads the prompt once. Examples with too long
a prompt or answer are dropped and counted: n targets, end included, need n + 1
positions, since the decoder of a reward model reads BOS and all targets, and
policies and reward models share records. Ties are also dropped and counted, as
are conversations with a token across the assistant's header and an answer,
where the answers would not share a prompt. The field `margins`, float32 [2],
has the margin of the chosen answer (0 if unknown), and 0.

Pure NumPy; must not import TensorFlow, SeqIO or JAX.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any, NamedTuple

import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.objectives import (
  example_maker,
  framing,
  row_fields,
  supervised,
)
from encdec_adapt.tokenizers import special_ids

_ANSWERS = 2
_LARGEST_MARGIN = 65504  # The largest float16, the stored dtype.


class Preference(NamedTuple):
  """A prompt with a chosen and a rejected answer.

  Attributes:
    inputs: [m], in the encoder's vocabulary.
    targets: [n], the chosen answer with its end token.
    rejected: the rejected answer with its end token.
    prefix: inputs in the decoder's vocabulary, see `framing.Pair`.
    margin: [1], margin of the chosen answer; None if unknown.
    documents: document id.
  """

  inputs: np.ndarray
  targets: np.ndarray
  rejected: np.ndarray
  prefix: np.ndarray | None = None
  margin: np.ndarray | None = None
  documents: tuple[str, ...] = ()

  @property
  def pairs(self) -> tuple[framing.Pair, framing.Pair]:
    """The prompt with each answer."""
    pair = framing.Pair(self.inputs, self.targets, self.prefix)
    return pair, pair._replace(targets=self.rejected)

  @property
  def teacher_inputs(self) -> np.ndarray:
    """Inputs in the decoder's vocabulary."""
    return self.pairs[0].teacher_inputs

  @property
  def target_tokens(self) -> int:
    """Number of tokens of both answers."""
    return len(self.targets) + len(self.rejected)

  def positions(self, lengths: framing.Lengths) -> tuple[int, int]:
    """Returns the numbers of encoder and decoder positions (longer answer)."""
    encoder, decoder = max(pair.positions(lengths) for pair in self.pairs)
    return encoder, decoder + 1  # BOS and all targets.


def _frame(
  examples: Sequence[Preference],
  lengths: framing.Lengths,
  ids: special_ids.Framing,
  *,
  teacher: bool = False,
) -> framing.Batch:
  answers = [[x.pairs[i] for x in examples] for i in range(_ANSWERS)]
  margins = np.zeros(_ANSWERS, np.float32)
  if examples and examples[0].margin is not None:
    margins[:1] = examples[0].margin
  row = framing.frame_group(answers, lengths, ids, teacher=teacher)
  return row | {'margins': margins}


_AXES = framing.GROUP_AXES | {'margins': ('batch', None)}
ROWS = row_fields.RowFields(
  stored=(
    row_fields.INPUTS,
    row_fields.StoredField('targets'),
    row_fields.StoredField('rejected'),
    row_fields.StoredField('prefix'),
    row_fields.StoredField('margin', 'floats'),
  ),
  example=Preference,
  frame=_frame,
  check=framing.check_group,
  axes=_AXES,
  answers=_ANSWERS,
  packs=False,
)


class Preferences(supervised.Supervised):
  """Prompts with two text answers; see the module's docstring."""

  options = {
    name: supervised.Supervised.options[name]
    for name in ('prefix', 'separator')
  }
  documents = 'preferences'
  _counted = ('dropped', 'ties')

  @classmethod
  def rows(cls, options):
    return ROWS

  @classmethod
  def revisions(cls, options):
    # Without the revisions of `chat`.
    return ('answers leave a position of their row for BOS',)

  def examples(self, documents, generator, policy=example_maker.POLICY):
    for name, parsed in self._parsed(documents, policy, self._example):
      example, answers = parsed
      self._count_losses(name, policy, *answers)
      yield example._replace(documents=(name,))

  def _example(
    self, *content: Any
  ) -> tuple[Preference, list[supervised.Answer]] | None:
    """Returns the example of a document, and its answers; None if dropped.

    Raises:
      UserError: the document is invalid.
    """
    if not content:
      self.counts['ties'] += 1
      return None
    *texts, prompt, margin = content
    answers = [self._pairs(*self._content(prompt, x))[-1] for x in texts]
    chosen, rejected = (self._separated(pair) for pair, _ in answers)
    if not all(text.strip() for text in texts):
      raise errors.UserError('an answer is empty')
    if np.array_equal(chosen.targets, rejected.targets):
      raise errors.UserError('its answers have the same tokens')
    if margin is not None and not abs(margin) <= _LARGEST_MARGIN:
      raise errors.UserError(
        f'its margin is {margin}; it must be at most {_LARGEST_MARGIN}'
      )
    example = Preference(
      chosen.inputs,
      chosen.targets,
      rejected.targets,
      chosen.prefix,
      None if margin is None else np.array([margin], np.float32),
    )
    encoder, decoder = example.positions(self.lengths)
    if encoder > self.lengths.encoder or decoder > self.lengths.decoder:
      self.counts['dropped'] += 1
    elif not all(
      np.array_equal(getattr(chosen, field), getattr(rejected, field))
      for field in ('inputs', 'teacher_inputs')
    ):
      self.counts['shared_headers'] += 1
    else:
      return example, answers

  def _content(self, prompt: str | list, answer: str) -> list:
    if not isinstance(prompt, str):
      raise errors.UserError(
        'its prompt is a conversation; use the objective chat_preferences'
      )
    return [prompt, answer]


class ChatPreferences(Preferences, supervised.Chat):
  """Conversations with two last turns; see the module's docstring."""

  options = {'separator': supervised.Chat.options['separator']}

  @classmethod
  def rows(cls, options):
    return dataclasses.replace(ROWS, ends_turns=True)

  def _content(self, prompt, answer):
    if isinstance(prompt, str):
      prompt = [{'role': 'user', 'content': prompt}]
    return [*prompt, {'role': 'assistant', 'content': answer}]


OBJECTIVES = {
  'preferences': example_maker.Name(
    Preferences,
    'the better of two answers to a prompt (`preferences:` sources)',
  ),
  'chat_preferences': example_maker.Name(
    ChatPreferences,
    'the better of two turns of the assistant (`preferences:` sources)',
  ),
}
