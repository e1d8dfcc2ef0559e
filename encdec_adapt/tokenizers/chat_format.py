r"""Chat templates of Gemma, Llama 3 and Qwen: conversations as token ids.

| family | a turn                                                           |
|--------|------------------------------------------------------------------|
| gemma  | <start_of_turn>ROLE\nTEXT<end_of_turn>\n; the assistant's role   |
|        | is "model", and the system's text precedes the first user's      |
|        | text after an empty line, as in Gemma 3, which does not strip it |
| gemma4 | <|turn>ROLE\nTEXT<turn|>\n; the assistant's role is "model"     |
| llama3 | <|start_header_id|>ROLE<|end_header_id|>\n\nTEXT<|eot_id|>       |
| chatml | <|im_start|>ROLE\nTEXT<|im_end|>\n (Qwen)                        |

Text is stripped for Gemma (but the system text of Gemma 3) and Llama, as in
their templates. Special tokens are inserted by id; spelled out in a text they
stay text. Nothing is added to the conversation (Llama 3.1's template adds a
date, Qwen 2.5's a system message). BOS is framing and is not included.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import itertools
import json
from typing import NamedTuple

import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.tokenizers import vocabulary as vocabulary_lib

ROLES = ('system', 'user', 'assistant')
Messages = Sequence[Mapping[str, str]]


class Turns(NamedTuple):
  """A conversation as tokens.

  Attributes:
    ids: int32 [n].
    assistant: bool [n], True for the assistant's text and the token that ends
      its turn.
  """

  ids: np.ndarray
  assistant: np.ndarray


@dataclasses.dataclass(frozen=True)
class Template:
  """Turn format of a model family.

  Attributes:
    family: name in the module's table.
    start: special tokens around the role; the second may be ''.
    end: special token after the text; it ends an answer.
    before_text: separator between the header and the text.
    after_turn: text after the end token.
    assistant: name of the assistant's role.
    strips: whether text is stripped.
    system_apart: whether the system message is a separate turn.
  """

  family: str
  start: tuple[str, str]
  end: str
  before_text: str = '\n'
  after_turn: str = '\n'
  assistant: str = 'assistant'
  strips: bool = False
  system_apart: bool = True

  @property
  def specials(self) -> list[str]:
    """Special tokens, in the order of a turn."""
    return [name for name in (*self.start, self.end) if name]


_TEMPLATES = (
  Template(
    'gemma',
    ('<start_of_turn>', ''),
    '<end_of_turn>',
    assistant='model',
    strips=True,
    system_apart=False,
  ),
  Template(
    'gemma4', ('<|turn>', ''), '<turn|>', assistant='model', strips=True
  ),
  Template(
    'llama3',
    ('<|start_header_id|>', '<|end_header_id|>'),
    '<|eot_id|>',
    before_text='\n\n',
    after_turn='',
    strips=True,
  ),
  Template('chatml', ('<|im_start|>', ''), '<|im_end|>'),
)
# By family; a vocabulary uses the first matching template.
TEMPLATES = {template.family: template for template in _TEMPLATES}


def markers() -> set[str]:
  """Returns the special tokens of all templates."""
  return {name for template in _TEMPLATES for name in template.specials}


def find_template(vocabulary: vocabulary_lib.Vocabulary) -> Template | None:
  """Returns the template that matches a vocabulary's special tokens, if any."""
  names = vocabulary.specials.keys()
  return next((t for t in _TEMPLATES if names >= set(t.specials)), None)


def template_of(vocabulary: vocabulary_lib.Vocabulary) -> Template:
  """Returns the template that matches a vocabulary's special tokens.

  Raises:
    UserError: no template matches.
  """
  if template := find_template(vocabulary):
    return template
  families = '; '.join(
    f'{t.family}: {" ".join(t.specials)}' for t in _TEMPLATES
  )
  raise errors.UserError(
    f'the vocabulary {vocabulary.path} has no chat template: it lacks the'
    f' special tokens of every known one ({families}). Give plain prompts, or'
    ' a model whose vocabulary has them, as one that is trained with'
    ' config.data.chat_format'
  )


def require(vocabulary: vocabulary_lib.Vocabulary, family: str) -> None:
  """Checks that a vocabulary has the special tokens of a format.

  Args:
    vocabulary: the vocabulary.
    family: family of `TEMPLATES`; '' accepts any vocabulary.

  Raises:
    UserError: special tokens are missing.
  """
  lacks = set(TEMPLATES[family].specials if family else ()) - set(
    vocabulary.specials
  )
  if lacks:
    raise errors.UserError(
      f'config.data.chat_format is {family!r}, but the vocabulary'
      f' {vocabulary.path} exists and lacks {" ".join(sorted(lacks))}: only a'
      ' vocabulary that is trained here gets them. Leave the key empty, or give'
      ' config.data.vocabulary a path that does not exist yet'
    )


def jinja(template: Template) -> str:
  """Returns a template as Jinja source for `transformers`."""
  first, second = map(json.dumps, template.start)
  # JSON strings are valid in Jinja, escaped newlines included.
  texts = template.before_text, template.end, template.after_turn
  lead, end, tail = map(json.dumps, texts)
  assistant = json.dumps(template.assistant)
  strip = ' | trim' if template.strips else ''
  parts = ['{{- bos_token }}', "{%- set system = '' %}"]
  if not template.system_apart:
    parts += [
      "{%- if messages[0].role == 'system' %}",
      '{%- set system = messages[0].content + "\\n\\n" %}',
      '{%- set messages = messages[1:] %}',
      '{%- endif %}',
    ]
  parts += [
    '{%- for message in messages %}',
    "{%- set role = message.role if message.role != 'assistant'"
    f' else {assistant} %}}',
    f'{{{{- {first} + role + {second} + {lead} }}}}',
    "{{- system if loop.first else '' }}",
    f'{{{{- message.content{strip} }}}}',
    f'{{{{- {end} + {tail} }}}}',
    '{%- endfor %}',
    '{%- if add_generation_prompt %}',
    f'{{{{- {first} + {assistant} + {second} + {lead} }}}}',
    '{%- endif %}',
  ]
  return ''.join(parts)


def end_of_turn(vocabulary: vocabulary_lib.Vocabulary) -> int:
  """Returns the end-of-turn id, which ends an answer.

  Raises:
    UserError: see `template_of`.
  """
  return vocabulary.specials[template_of(vocabulary).end]


def encode(
  messages: Messages,
  vocabulary: vocabulary_lib.Vocabulary,
  *,
  open_turn: bool = False,
) -> Turns:
  """Encodes a conversation.

  Args:
    messages: dictionaries with `role` (system, user or assistant) and
      `content`.
    vocabulary: determines the template.
    open_turn: append the header of the assistant's turn, as a generation
      prompt.

  Raises:
    UserError: the vocabulary has no template, or a message is malformed.
  """
  check_messages(messages)
  template = template_of(vocabulary)
  ids, masks = [], []
  parts = _parts(_turns(messages, template), template, open_turn)
  # Text between special tokens is encoded together, as `transformers` encodes a
  # rendered template: a token may span a role and its newline.
  for is_special, group in itertools.groupby(parts, lambda p: p.is_special):
    group = list(group)
    if is_special:
      ids.append([vocabulary.specials[part.text] for part in group])
      masks.append([part.by_assistant for part in group])
      continue
    text = ''.join(part.text for part in group)
    tokens, boundaries = vocabulary.encode_with_boundaries(text)
    # The assistant's text ends its group. A token counts as the assistant's if
    # any of its characters is.
    answer = len(group[-1].text) if group[-1].by_assistant else 0
    ids.append(tokens)
    masks.append(_ends(boundaries) > len(text) - answer)
  return Turns(
    np.concatenate(ids).astype(np.int32), np.concatenate(masks).astype(bool)
  )


class _Part(NamedTuple):
  """A text or a special token, and whether the assistant wrote it."""

  text: str
  is_special: bool = False
  by_assistant: bool = False


def _parts(
  messages: list[tuple[str, str]], template: Template, open_turn: bool
) -> Iterator[_Part]:
  for role, content in messages:
    by_assistant = role == 'assistant'
    yield from _header(role, template)
    yield _Part(content, False, by_assistant)
    # The end token is learned with the answer, the text after it is not:
    # decoding stops at the end token.
    yield _Part(template.end, True, by_assistant)
    yield _Part(template.after_turn)
  if open_turn:
    yield from _header('assistant', template)


def _header(role: str, template: Template) -> Iterator[_Part]:
  first, second = template.start
  yield _Part(first, True)
  yield _Part(template.assistant if role == 'assistant' else role)
  if second:
    yield _Part(second, True)
  yield _Part(template.before_text)


def check_messages(messages: Messages) -> None:
  """Checks that a conversation is well-formed.

  Raises:
    UserError: there is no message, or a message is malformed.
  """
  if not messages:
    raise errors.UserError('the conversation has no message')
  for i, message in enumerate(messages):
    if (
      not isinstance(message, Mapping)
      # Other keys, such as tool calls, would be dropped silently.
      or message.keys() != {'role', 'content'}
      or not isinstance(message['content'], str)
      or message['role'] not in (ROLES if i == 0 else ROLES[1:])
    ):
      raise errors.UserError(
        f'message {i + 1} of the conversation must be an object with "role"'
        f' ({", ".join(ROLES)}; system only first) and "content" (text), not'
        f' {str(message)[:80]}'
      )


def _turns(messages: Messages, template: Template) -> list[tuple[str, str]]:
  """Returns (role, text) of each turn of the template.

  Raises:
    UserError: no user message follows the system message.
  """
  result = [
    (m['role'], m['content'].strip() if template.strips else m['content'])
    for m in messages
  ]
  if result[0][0] == 'system' and not template.system_apart:
    if len(result) < 2 or result[1][0] != 'user':
      raise errors.UserError(
        "in this format the system's text precedes the first user's text;"
        ' add a message of the user'
      )
    # The system's text is not stripped, as in Gemma 3's template.
    result[:2] = [('user', f'{messages[0]["content"]}\n\n{result[1][1]}')]
  return result


def _ends(boundaries: np.ndarray) -> np.ndarray:
  """Returns the number of characters started before each token's end, [n]."""
  # A token with an end inside a character counts that character too.
  characters = np.maximum.accumulate(np.maximum(boundaries, 0))
  return characters[1:] + (boundaries[1:] < 0)
