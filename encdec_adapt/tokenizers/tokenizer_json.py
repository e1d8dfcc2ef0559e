"""Vocabularies of Hugging Face's `tokenizer.json`, through `tokenizers`.

Which special token has which role is read, in this order, from
tokenizer_config.json, special_tokens_map.json and config.json beside the
file, and else known by the names of Gemma, Llama and Qwen:

| role | names, the first that exists                                         |
|------|----------------------------------------------------------------------|
| bos  | <bos>, <|begin_of_text|>, <s>; Qwen has none: <|endoftext|> stands in |
| eos  | <eos>, <|end_of_text|>, </s>, <|endoftext|>                           |
| pad  | <pad>, <|finetune_right_pad_id|>, [PAD], <|endoftext|>; else EOS      |
| unk  | <unk>                                                                 |
| mask | <mask>, [MASK]                                                        |

No special token matches in a text, whatever the file says.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Mapping
import dataclasses
import hashlib
import json
from typing import Any

import numpy as np
import tokenizers

from encdec_adapt.cli import errors
from encdec_adapt.files import atomic, paths
from encdec_adapt.tokenizers import vocabulary

FILE = 'tokenizer.json'
_CONFIGS = ('tokenizer_config.json', 'special_tokens_map.json')
_MODEL_CONFIG = 'config.json'
_KNOWN: Mapping[str, tuple[str, ...]] = {
  'bos': ('<bos>', '<|begin_of_text|>', '<s>', '<|endoftext|>'),
  'eos': ('<eos>', '<|end_of_text|>', '</s>', '<|endoftext|>'),
  'pad': ('<pad>', '<|finetune_right_pad_id|>', '[PAD]', '<|endoftext|>'),
  'unk': ('<unk>',),
  'mask': ('<mask>', '[MASK]'),
}


class TokenizerJson(vocabulary.Vocabulary):
  """A tokenizer.json."""

  def __init__(self, path: paths.Path, *, added_sentinels: int = 0):
    """Opens a file.

    Args:
      path: the file.
      added_sentinels: as for any vocabulary.

    Raises:
      UserError: it or a file beside it is missing or damaged, has no EOS or
        BOS, reads special tokens in text, or loses text.
    """
    path = paths.at(path)
    beside = [path.parent / name for name in (*_CONFIGS, _MODEL_CONFIG)]
    beside = [file for file in beside if file.is_file()]
    data, content = _read(path)
    named = _named(beside)
    added = _added_tokens(content, path)
    self._ids = {**_model_tokens(content, path)}
    self._ids |= {token['content']: token['id'] for token in added}
    specials = {
      token['content']: token['id']
      for token in added
      if token.get('special')
      or vocabulary.SPECIAL.fullmatch(token['content'])
      or token['content'] in named.values()
    }
    roles = _roles(named, specials, beside, str(path))
    for token in added:
      token['special'] = token['content'] in specials
    self._tokenizer = _load(content, path)
    self._by_id = {i: token for token, i in self._ids.items()}
    self._head = self._head_for_continuing()
    super().__init__(
      str(path),
      vocabulary.digest_of(
        hashlib.sha256(data).hexdigest(), dataclasses.asdict(roles)
      ),
      max(self._by_id) + 1,
      specials,
      roles,
      files=[path, *beside],
      added_sentinels=added_sentinels,
    )
    self._check_specials()

  def _head_for_continuing(self) -> list[int]:
    """Ids of a letter, where the start of a text is decoded differently."""
    letter = self._encode('x')
    twice = self._tokenizer.decode(2 * letter, skip_special_tokens=False)
    return [] if twice == 'xx' else letter

  def _check_specials(self) -> None:
    """Refuses a tokenizer that reads a special token in a text."""
    known = np.array(sorted(self._own_specials()), np.int32)
    for name in self._own_specials().values():
      if np.isin(self.encode(name), known).any():
        raise errors.UserError(
          f'vocabulary {self.path!r}: the text {name!r} becomes a special'
          ' token, though it is marked as none; use another tokenizer'
        )

  def _own_specials(self) -> dict[int, str]:
    return {i: n for n, i in self.specials.items() if i < self.stored_size}

  def _piece(self, token):
    return self._by_id.get(token, '')

  def _encode(self, text):
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def _encode_with_boundaries(self, text):
    found = self._tokenizer.encode(text, add_special_tokens=False)
    if not found.ids:
      return [], [0]
    starts, ends = np.array(found.offsets, np.int64).T
    # Tokens that share a character have it in both their spans.
    between = np.where(ends[:-1] <= starts[1:], starts[1:], -1)
    return found.ids, [0, *between, len(text)]

  def _decode(self, ids, *, start):
    head = [] if start else self._head
    text = self._tokenizer.decode(head + ids, skip_special_tokens=False)
    return text[1:] if head else text


def _read(path: paths.Path) -> tuple[bytes, dict[str, Any]]:
  """A file, and the JSON object that it is.

  Raises:
    UserError: there is none.
  """
  try:
    data = path.read_bytes()
    return data, atomic.parse_json(data, path)
  except OSError as error:
    raise errors.UserError(
      f'vocabulary {str(path)!r}: cannot be read ({error}); copy it again, or'
      ' give another tokenizer'
    ) from None
  except errors.UserError as error:
    raise errors.UserError(f'vocabulary {error}') from None


def _load(content: dict[str, Any], path: paths.Path) -> tokenizers.Tokenizer:
  """The tokenizer without what it does after tokenising, such as framing."""
  content = {
    **content,
    'post_processor': None,
    'truncation': None,
    'padding': None,
  }
  try:
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
  except Exception as error:  # What `tokenizers` raises has no own type.
    raise errors.UserError(  # Of a newer version, it may be.
      f'{_damaged(path, error)}, or install a newer `tokenizers`'
    ) from error
  tokenizer.encode_special_tokens = True  # As the text that they are.
  return tokenizer


def _damaged(path: paths.Path, why: object) -> vocabulary.DamagedError:
  return vocabulary.DamagedError(
    f'vocabulary {str(path)!r}: not a tokenizer.json of Hugging Face, or a'
    f' damaged one ({why}); copy it again'
  )


def _added_tokens(
  content: dict[str, Any], path: paths.Path
) -> list[dict[str, Any]]:
  added = content.get('added_tokens') or []
  try:
    wrong = any(
      type(t['content']) is not str or type(t['id']) is not int for t in added
    )
  except (TypeError, KeyError) as error:
    raise _damaged(path, error) from error
  if wrong:
    raise _damaged(path, 'added_tokens')
  return added


def _model_tokens(content: dict[str, Any], path: paths.Path) -> dict[str, int]:
  """Tokens of the model, without those that were added."""
  model = content.get('model')
  tokens = model.get('vocab') if isinstance(model, dict) else None
  if isinstance(tokens, list):  # Unigram's: [token, score].
    return {token: i for i, (token, _) in enumerate(tokens)}
  if not isinstance(tokens, dict) or not tokens:
    raise _damaged(path, 'it has no model.vocab')
  return tokens


def _named(beside: list[paths.Path]) -> dict[str, str | int]:
  """Role -> the special token that the files name, or its id."""
  found: dict[str, str | int] = {}
  for file in beside:
    _, content = _read(file)
    for role in vocabulary.ROLES:
      if file.name == _MODEL_CONFIG:
        value = content.get(f'{role}_token_id')
        value = value[0] if isinstance(value, list) and value else value
        if type(value) is int and value < 0:  # Old Llamas' -1 for none.
          value = None
      else:
        value = content.get(f'{role}_token')
        value = value.get('content') if isinstance(value, dict) else value
      if value is not None and role not in found:
        found[role] = value
  return found


def _roles(
  named: Mapping[str, str | int],
  specials: Mapping[str, int],
  beside: list[paths.Path],
  path: str,
) -> vocabulary.SpecialIds:
  """Ids by role.

  Raises:
    UserError: what is named is no special token, or there is no EOS or BOS.
  """
  roles: dict[str, int] = {}
  for role, names in _KNOWN.items():
    value = named.get(role)
    if value is None:
      for name in reversed(names):
        if name in specials:
          roles[role] = specials[name]
    elif value in specials or value in specials.values():
      roles[role] = specials.get(value, value)
    else:
      raise errors.UserError(
        f'vocabulary {path!r}: {" or ".join(f.name for f in beside)} beside it'
        f' says that {role} is {value!r}, which is no special token of it;'
        ' they are of different models'
      )
  for role in ('eos', 'bos'):
    if role not in roles:
      raise errors.UserError(
        f'vocabulary {path!r}: no special token is known as its'
        f' {role.upper()}, which rows are framed with; name it as'
        f' {role}_token in {_CONFIGS[0]} beside it'
      )
  return vocabulary.SpecialIds(**{'pad': roles['eos'], **roles})
