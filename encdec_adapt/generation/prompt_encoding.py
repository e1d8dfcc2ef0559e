"""Encodes prompts as token ids, as in training.

`StoredModel.framing` has the text before all inputs (the task prefix of
`pairs`) and after the inputs of a decoder-only model (the separator); the
objectives of a run define the mode tokens before the inputs (UL2). `generate`,
`serve`, `evaluate` and Python callers encode prompts here. Conversations are
encoded by `tokenizers.chat_format` and framed here.
"""

from collections.abc import Sequence
import re
import shlex
import sys
from typing import Any, TypedDict

import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.cluster import distributed
from encdec_adapt.objectives import denoising, passages
from encdec_adapt.stored import model_on_disk
from encdec_adapt.tokenizers import chat_format
from encdec_adapt.tokenizers import vocabulary as vocabulary_lib


class Question(TypedDict):
  """A prompt for a model that reads passages.

  Attributes:
    question: the question.
    documents: the passages, as in `objectives.passages`.
  """

  question: str
  documents: Sequence[Any]


Prompt = str | chat_format.Messages | Question


def task_prefix(
  stored: model_on_disk.StoredModel, prefix: str | None = None
) -> str:
  """Returns the text before every prompt of a model.

  Args:
    stored: the model.
    prefix: requested prefix, '' for none; None for the model's.

  Raises:
    UserError: the model has several prefixes and none is selected; lists them.
  """
  if prefix is not None:
    return prefix
  prefixes = stored.framing.prefixes
  if len(prefixes) > 1:
    # Quoted for the shell: prefixes often end with a space.
    flags = ', '.join(f'--prefix={shlex.quote(text)}' for text in prefixes)
    raise errors.UserError(
      f'{stored.path} was trained with {len(prefixes)} task prefixes; choose'
      f" one: {flags} (in Python prefix=TEXT; '' for none)."
    )
  return prefixes[0] if prefixes else ''


def print_prefix(stored: model_on_disk.StoredModel, prefix: str | None) -> None:
  """Prints the prompt prefix of a model, if any, on process 0.

  Args:
    stored: the model.
    prefix: see `task_prefix`.
  """
  if (prefix := task_prefix(stored, prefix)) and distributed.is_lead():
    # Standard output is for the results of commands.
    print(f'{stored.path}: prompts begin with {prefix!r}', file=sys.stderr)


class PromptEncoder:
  """Encodes the prompts of a model.

  Attributes:
    prefix: text before every prompt; '' for none.
    reader: vocabulary of the stack that reads prompts.
  """

  def __init__(
    self,
    stored: model_on_disk.StoredModel,
    *,
    prefix: str | None = None,
    mode: str = '',
    sentinels: bool = False,
  ):
    """Opens the vocabularies.

    Args:
      stored: the model.
      prefix: see `task_prefix`.
      mode: mode token of UL2 to put before prompts; '' for none.
      sentinels: whether to encode names of sentinels as tokens, and to show
        them in answers.

    Raises:
      UserError: the model has no vocabularies, several prefixes, or was not
        trained with the mode; or its vocabulary lacks sentinels.
    """
    opened = stored.require_vocabularies()
    self.reader = opened.sides[stored.prompt_side]
    self._passages = stored.model.prompt_reader.passages
    self.prefix = task_prefix(stored, prefix)
    self._writer = opened.decoder
    self._separator = self._writer.encode(stored.framing.separator)
    self._side = stored.framing_side
    self._head, self._tail = self.reader.ids.edges(self._side)
    self._opening = len(self._head)
    if mode:  # Before the inputs, as in `objectives.denoising`.
      self._head = [*self._head, _mode_id(stored, self.reader, mode)]
    self._sentinels: dict[str, int] = {}
    if sentinels:
      self._sentinels = self.reader.sentinel_names
      if not self._sentinels:
        raise errors.UserError(
          f'--sentinels: the vocabulary {self.reader.path} has no sentinels;'
          ' leave it out.'
        )

  def encode(self, prompt: Prompt, room: int | None = None) -> np.ndarray:
    """Encodes a prompt: mode, prefix, text and separator, framed.

    Args:
      prompt: a text; a conversation (without prefix); or a question with its
        documents, for a model that reads passages (without prefix).
      room: maximum length; a longer prompt keeps the tokens before the text and
        its last tokens, and longer documents are an error. None for no limit.

    Raises:
      UserError: the prompt cannot be encoded, is not what the model reads, or
        the prefix leaves no room.
    """
    if isinstance(prompt, dict):
      return self._encode_passages(**prompt, room=room)
    framed = self._encode_text(prompt, room)
    self._passages.require_fits(framed)
    return framed

  def _encode_passages(
    self, question: str, documents: Sequence[Any], room: int | None
  ) -> np.ndarray:
    if not self._passages.length:
      raise errors.UserError(
        'it has documents, and the model was not trained on passages (objective'
        ' `passages`); give one text.'
      )
    if self.prefix or self._sentinels or len(self._head) > self._opening:
      raise errors.UserError(
        'it has documents, which work without a prefix, a mode and sentinels;'
        ' leave them out.'
      )
    try:
      ids = passages.encode(
        self.reader, question, documents, self._passages.length
      )
    except errors.UserError as error:
      raise errors.UserError(f'{error}.') from error
    framed = self.frame(ids)
    if room is not None and len(framed) > room:
      raise errors.UserError(
        f'its {len(documents)} documents take {len(framed)} tokens, and there'
        f' is room for {room} (--max_prompt); give fewer.'
      )
    return framed

  def _encode_text(
    self, prompt: str | chat_format.Messages, room: int | None
  ) -> np.ndarray:
    if not isinstance(prompt, str):
      turns = chat_format.encode(prompt, self.reader, open_turn=True)
      return self.frame(turns.ids, room)
    # Encoded as one text, as in training: tokens may span the boundary.
    ids = self._read(self.prefix + prompt)
    start = len(self._read(self.prefix)) if self.prefix else 0
    return self.frame(ids, room, start=start)

  def frame(
    self,
    ids: Sequence[int] | np.ndarray,
    room: int | None = None,
    *,
    start: int = 0,
  ) -> np.ndarray:
    """Adds BOS and mode before ids, separator and EOS after them, int32 [n].

    A decoder reads BOS or, with ids, nothing; an encoder BOS or EOS
    (`special_ids.SideIds.edges`).

    Args:
      ids: encoded prompt, without framing.
      room: maximum length, see `encode`.
      start: number of leading ids to keep when truncating, such as a prefix.

    Raises:
      UserError: the leading ids leave no room.
    """
    ids = *self._head, *ids, *self._separator, *self._tail
    prompt = np.array(ids or [self.reader.ids.bos], np.int32)
    if room is None or len(prompt) <= room:
      return prompt
    start += len(self._head)
    if start >= room:
      raise errors.UserError(
        f'a prompt begins with {start} tokens ({self.prefix!r} among them) and'
        f' has room for {room}; raise --max_prompt.'
      )
    # Keep the last tokens: a continuation depends most on them.
    return np.concatenate([prompt[:start], prompt[start - room :]])

  def unframed(self, ids: Sequence[int]) -> Sequence[int]:
    """Removes the BOS or EOS added by `frame`, if present."""
    return self.reader.ids.unframe(ids, self._side)

  def span(self, prompt: np.ndarray, count: int) -> slice:
    """Returns the slice of a framed prompt before separator and EOS.

    Args:
      prompt: tokens of `encode` or `frame`.
      count: length of the slice.
    """
    stop = len(prompt) - len(self._separator) - len(self._tail)
    return slice(max(stop - count, 0), stop)

  def answer_text(self, tokens: np.ndarray) -> str:
    """Decodes generated tokens, showing the names of sentinels."""
    names = set(self._writer.sentinels)
    hidden = set(self._writer.specials.values()) - names
    ids = [i for i in tokens if i not in hidden]
    return self._writer.decode_generated(ids, show_special=True)

  def _read(self, text: str) -> list[int]:
    names = '|'.join(map(re.escape, self._sentinels))
    ids: list[int] = []
    for part in re.split(f'({names})', text) if names else [text]:
      sentinel = self._sentinels.get(part)
      ids.extend(self.reader.encode(part) if sentinel is None else [sentinel])
    return ids


def _mode_id(
  stored: model_on_disk.StoredModel,
  reader: vocabulary_lib.Vocabulary,
  mode: str,
) -> int:
  """Returns the id of a mode token.

  Raises:
    UserError: the model was not trained with the mode; lists its modes.
  """
  modes = {
    name for x in stored.objectives for name in denoising.modes(x.options)
  }
  # A folder has no objectives: its vocabulary decides.
  if not stored.objectives:
    modes = set(reader.mode_ids)
  if mode not in modes:
    raise errors.UserError(
      f'--mode={mode} is not a mode of {stored.path}, which has'
      f' {", ".join(sorted(modes)) or "none"}; give one of them, or leave it'
      ' out.'
    )
  return reader.mode_ids[mode]
