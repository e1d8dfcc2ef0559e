"""Vocabularies from Hugging Face's `tokenizer.json`, through `tokenizers`.

The roles of special tokens are read from tokenizer_config.json,
special_tokens_map.json and config.json in the same folder, in this order.
Remaining roles are found by the names of Gemma, Llama, Qwen and BERT:

| role | names, the first match                                               |
|------|----------------------------------------------------------------------|
| bos  | <bos>, <|begin_of_text|>, <s>, [CLS]; <|endoftext|> for Qwen and      |
|      | GPT-2, which have none                                                |
| eos  | <eos>, <|end_of_text|>, </s>, [SEP], <|endoftext|>                    |
| pad  | <pad>, <|finetune_right_pad_id|>, [PAD], <|endoftext|>; else EOS      |
| unk  | <unk>, [UNK]                                                          |
| mask | <mask>, [MASK]                                                        |

A tokenizer without BOS that appends EOS to every text is T5's, and BOS is
padding. One that puts [CLS] before every text and [SEP] behind it is BERT's or
ModernBERT's, and these are BOS and EOS; RoBERTa's, by the `model_type` of
config.json, has <s> and </s> there. One that adds nothing, with EOS or padding
as BOS, is Qwen's or GPT-2's: decoders read inputs without BOS.

Special tokens never match in text, whatever the file declares.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Mapping
import hashlib
import json
import re
from typing import Any

import numpy as np
import tokenizers

from encdec_adapt.base import errors
from encdec_adapt.files import atomic, paths
from encdec_adapt.tokenizers import vocabulary

FILE = 'tokenizer.json'
_CONFIGS = ('tokenizer_config.json', 'special_tokens_map.json')
_MODEL_CONFIG = 'config.json'
_KNOWN: Mapping[str, tuple[str, ...]] = {
  'bos': ('<bos>', '<|begin_of_text|>', '<s>', '[CLS]', '<|endoftext|>'),
  'eos': ('<eos>', '<|end_of_text|>', '</s>', '[SEP]', '<|endoftext|>'),
  'pad': ('<pad>', '<|finetune_right_pad_id|>', '[PAD]', '<|endoftext|>'),
  'unk': ('<unk>', '[UNK]'),
  'mask': ('<mask>', '[MASK]'),
}
_BYTE = re.compile(r'<0x([0-9A-F]{2})>')


class TokenizerJson(vocabulary.Vocabulary):
  """A tokenizer.json."""

  def __init__(self, path: paths.Path, *, added_sentinels: int = 0):
    """Opens a file.

    Args:
      path: path of the file.
      added_sentinels: see `vocabulary.Vocabulary`.

    Raises:
      UserError: it or another file of the folder is missing or damaged, has no
        EOS or BOS, matches special tokens in text, or loses text.
    """
    path = paths.at(path)
    siblings = [path.parent / name for name in (*_CONFIGS, _MODEL_CONFIG)]
    siblings = [file for file in siblings if file.is_file()]
    content = atomic.read_json(path)
    named = _named(siblings)
    try:
      added = content.get('added_tokens') or []
      vocab = content['model']['vocab']
      if isinstance(vocab, list):  # Unigram's: [token, score].
        vocab = {token: i for i, (token, _) in enumerate(vocab)}
      ids = {**vocab, **{token['content']: token['id'] for token in added}}
      for token in added:
        # Added tokens not marked special match in text, and files mark only
        # some of the tokens that frame rows or turns.
        token['special'] = bool(
          token.get('special')
          or vocabulary.SPECIAL.fullmatch(token['content'])
          or token['content'] in named.values()
        )
      specials = {t['content']: t['id'] for t in added if t['special']}
      self._added = {t['id'] for t in added}
      edges = _edges(content)
      if isinstance(content['model']['vocab'], list):
        _rename_pieces(content, specials)
      self._tokenizer = _load(content)
    except Exception as error:  # `tokenizers` raises plain Exception.
      raise vocabulary.DamagedError(
        f'vocabulary {str(path)!r}: not a tokenizer.json, or a damaged one'
        f' ({type(error).__name__}: {error}); copy it again, or install a newer'
        ' `tokenizers`'
      ) from error
    roles = _roles(named, specials, siblings, str(path), edges[1])
    # mT5 has a space before <extra_id_0>.
    specials = {name.lstrip('\u2581'): i for name, i in specials.items()}
    self._by_id = {i: token for token, i in ids.items()}
    self._bytes = _bytes_of_characters(content)
    self._head = self._head_for_continuing()
    super().__init__(
      str(path),
      # Includes the roles, which may come from other files of the folder.
      vocabulary.digest_of(
        hashlib.sha256(path.read_bytes()).hexdigest(),
        {role: roles.get(role) for role in vocabulary.ROLES},
      ),
      max(self._by_id) + 1,
      specials,
      roles,
      files=[path, *siblings],
      added_sentinels=added_sentinels,
      edges=edges,
      frames=_frames(siblings, edges, specials),
      omits_bos=not any(edges) and roles['bos'] in (roles['eos'], roles['pad']),
    )
    self._check_specials()

  def _head_for_continuing(self) -> list[int]:
    # Llama 2's decoder drops the leading space of every sequence. Continuations
    # are decoded after a letter to keep it.
    letter = self._encode('x')
    twice = self._tokenizer.decode(2 * letter, skip_special_tokens=False)
    return [] if twice == 'xx' else letter

  def _check_specials(self) -> None:
    # `encode_special_tokens` does not prevent text from matching special tokens
    # that are also pieces of the model.
    specials = {i: n for n, i in self.specials.items() if i < self.stored_size}
    if self.ids.ends_with_eos:  # T5 encodes '<' as unknown.
      specials.pop(self.unk, None)
    for name in specials.values():
      if not specials.keys().isdisjoint(self.encode(name).tolist()):
        raise errors.UserError(
          f'vocabulary {self.path!r}: the text {name!r} becomes a special'
          ' token that the file does not declare as one; use another tokenizer'
        )

  def _piece(self, token):
    return self._by_id.get(token, '')

  def _bytes_of(self, token):
    piece = self._piece(token)
    # Added tokens are not written by bytes.
    if token not in self._added and self._bytes.keys() >= {*piece}:
      return bytes(self._bytes[x] for x in piece)
    if byte := _BYTE.fullmatch(piece):
      return bytes.fromhex(byte[1])
    return self._decode([token], start=False).encode()

  def _encode(self, text):
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def _encode_with_boundaries(self, text):
    encoding = self._tokenizer.encode(text, add_special_tokens=False)
    if not encoding.ids:
      return [], [0]
    starts, ends = np.array(encoding.offsets, np.int64).T
    # Tokens that share a character both include it in their spans.
    between = np.where(ends[:-1] <= starts[1:], starts[1:], -1)
    return encoding.ids, [0, *between, len(text)]

  def _decode(self, ids, *, start):
    head = [] if start else self._head
    text = self._tokenizer.decode(head + ids, skip_special_tokens=False)
    return text[1:] if head else text


def _load(content: dict[str, Any]) -> tokenizers.Tokenizer:
  for step in ('post_processor', 'truncation', 'padding'):
    content[step] = None
  tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
  tokenizer.encode_special_tokens = True  # By characters.
  return tokenizer


def _bytes_of_characters(content: Mapping[str, Any]) -> dict[str, int]:
  """Returns the byte of each character in byte-level BPE; else nothing."""
  step = content.get('decoder') or {}
  if 'ByteLevel' not in [x.get('type') for x in step.get('decoders', [step])]:
    return {}
  # Printable bytes are written as themselves, the others as U+0100 and on.
  characters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  order = sorted(range(256), key=lambda byte: chr(byte) not in characters)
  return dict(zip(characters, order, strict=True))


def _edges(content: Mapping[str, Any]) -> tuple[list[int], list[int]]:
  """Returns the ids that a tokenizer.json adds before and after every text."""
  step = content.get('post_processor') or {}
  head, tail = [], []
  for part in step.get('processors', [step]):
    if 'cls' in part:  # BERT and RoBERTa.
      head, tail = [part['cls'][1]], [part['sep'][1]]
    side = head
    for item in part.get('single', ()):
      if 'Sequence' in item:
        side = tail
      else:
        name = item['SpecialToken']['id']
        side += part['special_tokens'][name]['ids']
  return head, tail


def _frames(
  files: list[paths.Path],
  edges: tuple[list[int], list[int]],
  specials: Mapping[str, int],
) -> bool:
  """Returns whether encoders of the tokenizer read both edges."""
  if not all(edges):
    return False
  if edges == ([specials.get('[CLS]')], [specials.get('[SEP]')]):
    return True
  configs = [file for file in files if file.name == _MODEL_CONFIG]
  kinds = [atomic.read_json(file).get('model_type') for file in configs]
  return 'roberta' in kinds


def _rename_pieces(
  content: dict[str, Any], specials: Mapping[str, int]
) -> None:
  """Renames special pieces of a Unigram model, so they never match in text.

  T5's special pieces have the best score. The new names start with a space,
  which no piece contains (spaces are written U+2581).
  """
  model = content['model']
  model['vocab'] = [
    [f' {name}' if name in specials else name, score]
    for name, score in model['vocab']
  ]
  # Each would get a new id: no piece has its name now.
  content['added_tokens'] = [
    token for token in content['added_tokens'] if not token['special']
  ]


def _named(files: list[paths.Path]) -> dict[str, str | int]:
  """Reads special tokens (or their ids) by role from the files."""
  named: dict[str, str | int] = {}
  for file in files:
    content = atomic.read_json(file)
    for role in vocabulary.ROLES:
      if file.name == _MODEL_CONFIG:
        value = content.get(f'{role}_token_id')
        # Of several EOS ids, documents end with the first.
        value = value[0] if isinstance(value, list) and value else value
        if type(value) is int and value < 0:  # -1 in old Llamas.
          value = None
      else:
        value = content.get(f'{role}_token')
        # transformers 4 wrote the fields of an AddedToken here.
        value = value.get('content') if isinstance(value, dict) else value
      if value is not None:
        named.setdefault(role, value)
  return named


def _roles(
  named: Mapping[str, str | int],
  specials: Mapping[str, int],
  siblings: list[paths.Path],
  path: str,
  tail: list[int],
) -> dict[str, int]:
  """Returns the ids by role, given the ids appended to every text (`tail`).

  Raises:
    UserError: a named token is not special, or there is no EOS or BOS.
  """
  roles: dict[str, int] = {}
  for role, names in _KNOWN.items():
    value = named.get(role)
    if value is None:
      ids = [specials[name] for name in names if name in specials]
      if ids:
        roles[role] = ids[0]
    elif value in specials or value in specials.values():
      roles[role] = specials.get(value, value)
    else:
      names = ' or '.join(file.name for file in siblings)
      raise errors.UserError(
        f'vocabulary {path!r}: {names} beside it has {role} {value!r}, which'
        ' is not a special token of it; use the files of one model'
      )
  if 'bos' not in roles and 'pad' in roles and tail == [roles.get('eos')]:
    roles['bos'] = roles['pad']
  for role in ('eos', 'bos'):
    if role not in roles:
      raise errors.UserError(
        f'vocabulary {path!r} has no known {role.upper()}, which rows need;'
        f' name it as {role}_token in {_CONFIGS[0]} beside it'
      )
  return {'pad': roles['eos'], **roles}
