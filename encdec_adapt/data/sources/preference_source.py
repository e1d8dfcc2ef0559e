r"""The source `preferences:`: prompts with a chosen and a rejected answer.

| fields                   | in each line                                      |
|--------------------------|---------------------------------------------------|
| #PROMPT,CHOSEN,REJECTED  | a prompt and answers: texts, or a list of messages|
|                          | and the assistant's replies to it                 |
| #CHOSEN,REJECTED         | whole dialogues that differ in the last turn only:|
|                          | lists of messages, or texts with turns after      |
|                          | "\n\nHuman:" and "\n\nAssistant:" (HH)            |
| .., label=FIELD          | the better answer is the first where FIELD is 1,  |
|                          | the second where it is 2; a tie is 0 or "tie"     |
| .., margin=FIELD         | how much better it is, a number                   |

A message has `role` and `content`, or `from` (human, gpt) and `value`. A
document is a JSON list: chosen answer, rejected answer, prompt (a text or
messages) and margin (or null); a tie is an empty list.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Callable
import re
from typing import Any

from encdec_adapt.base import errors
from encdec_adapt.data.sources import (
  document_source,
  file_sources,
  row_sources,
)
from encdec_adapt.tokenizers import chat_format

_TURN = re.compile(r'\n\n(Human|Assistant):')
_ROLES = {role: role for role in chat_format.ROLES}
_ROLES |= {'human': 'user', 'gpt': 'assistant'}
_LABELS = {'1': 1, '2': 2, '0': 0, 'tie': 0}


@document_source.register('preferences')
class PreferenceSource(row_sources.NamedFieldSource):
  """Preferences; see the module's docstring."""

  form = 'preferences:GLOB#[PROMPT,]CHOSEN,REJECTED[,label=FIELD,margin=FIELD]'
  document_kind = 'preferences'

  field_counts = (2, 3)
  field_names = ('label', 'margin')

  def _read(self, unit: file_sources.Unit) -> str:
    try:
      return super()._read(unit)
    except errors.UserError:
      raise  # Already names the line.
    except ValueError as error:
      location = self._line_location(unit.path, unit.offset)
      raise errors.UserError(
        f'source {self.name!r}: {location}: {error}'
      ) from None

  def _document(self, value: Callable[..., Any]) -> object:
    *prompts, _, _ = self._texts
    contents = [
      value(name, (str, list, dict)) for name in self._texts[len(prompts) :]
    ]
    if prompts:
      prompt = value(prompts[0], (str, list))
      prompt = prompt if isinstance(prompt, str) else _messages(prompt)
      answers = [_answer(content) for content in contents]
    else:
      prompt, *answers = _parted(*map(_messages, contents))
    margin = None
    if field := self._named.get('margin'):
      margin = value(field, (int, float))
    if field := self._named.get('label'):
      label = str(value(field, (str, int)))
      if label not in _LABELS:
        raise ValueError(f'{field} is {label!r}; it must be 1, 2, 0 or tie')
      if not _LABELS[label]:
        return []
      answers = answers[:: 1 if _LABELS[label] == 1 else -1]
    return [*answers, prompt, margin]


def _messages(content: object) -> list[dict[str, str]]:
  """Returns the messages of a dialogue.

  Raises:
    ValueError: it is neither a list of messages nor a text with turns.
  """
  if isinstance(content, str):
    start, *parts = _TURN.split(content)
    if start.strip() or not parts:
      raise ValueError(
        f'the dialogue {content[:60]!r} does not begin with a turn, "Human:" or'
        ' "Assistant:" after an empty line; of texts name prompt, chosen and'
        ' rejected answer'
      )
    turns = zip(parts[::2], parts[1::2], strict=True)
    names = {'Human': 'human', 'Assistant': 'gpt'}
    content = [{'from': names[x], 'value': text.strip()} for x, text in turns]
  return [_message(entry) for entry in content]


def _message(entry: Any) -> dict[str, str]:
  entry = entry if isinstance(entry, dict) else {'content': entry}
  role = entry.get('role', entry.get('from'))
  content = entry.get('content', entry.get('value'))
  if role not in _ROLES or not isinstance(content, str):
    raise ValueError(
      f'the message {str(entry)[:80]} has no text, or a role that is none of'
      f' {", ".join(_ROLES)}'
    )
  return {'role': _ROLES[role], 'content': content}


def _answer(content: Any) -> str:
  if isinstance(content, str):
    return content
  messages = _messages(content if isinstance(content, list) else [content])
  if [message['role'] for message in messages] != ['assistant']:
    raise ValueError(
      f'the answer {str(content)[:80]} is not one message of the assistant'
    )
  return messages[0]['content']


def _parted(
  chosen: list[dict[str, str]], rejected: list[dict[str, str]]
) -> tuple[list[dict[str, str]], str, str]:
  """Returns the common prefix of two dialogues and their last turns.

  Raises:
    ValueError: they differ before their last turns, or these are not the
      assistant's.
  """
  prompt = chosen[:-1]
  if not prompt or prompt != rejected[:-1]:
    raise ValueError(
      f'the dialogues of {len(chosen)} and {len(rejected)} turns part before'
      ' their last turn; they must be equal up to the last answer'
    )
  return prompt, _answer(chosen[-1:]), _answer(rejected[-1:])
