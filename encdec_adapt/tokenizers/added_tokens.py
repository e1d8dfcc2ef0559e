"""Tokens that were added to a vocabulary, written into its tokenizer's files.

| file                  | what they become                                     |
|-----------------------|------------------------------------------------------|
| tokenizer.json        | added_tokens, special                                |
| tokenizer.model       | user-defined pieces, where it is SentencePiece       |
| tokenizer_config.json | added_tokens_decoder, where it lists tokens at all   |
| added_tokens.json     | name -> id                                           |

So that other software gives them the same ids, and `vocabulary` finds them
again. This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Mapping
import json
from typing import Any

import tokenizers

from encdec_adapt.files import atomic
from encdec_adapt.files import paths as paths_lib
from encdec_adapt.tokenizers import vocabulary

_JSON, _SENTENCEPIECE = 'tokenizer.json', 'tokenizer.model'
_CONFIG, _NAMES = 'tokenizer_config.json', 'added_tokens.json'
_KIND = {
  'single_word': False,
  'lstrip': False,
  'rstrip': False,
  'normalized': False,
  'special': True,
}


def contents(
  paths: Mapping[str, paths_lib.Path], one: vocabulary.Vocabulary
) -> dict[str, bytes]:
  """What the files of a tokenizer are with the tokens that were added.

  Args:
    paths: its files by their names.
    one: the vocabulary.

  Returns:
    Name -> content of the files that change. None of them does where nothing
    was added, or where a file would give a token another id.

  Raises:
    UserError: a file is damaged.
  """
  tokens = {one.piece(i): i for i in one.added}
  if not tokens:
    return {}
  models = {}
  if _JSON in paths:
    models[_JSON] = _in_json(paths[_JSON], tokens)
  if _SENTENCEPIECE in paths:
    data = paths[_SENTENCEPIECE].read_bytes()
    if vocabulary.is_sentencepiece(data):
      models[_SENTENCEPIECE] = _in_sentencepiece(data, tokens)
  if not models or not all(models.values()):
    return {}
  if _CONFIG in paths:
    content = atomic.read_json(paths[_CONFIG])
    if listed := content.get('added_tokens_decoder'):
      new = {str(i): {'content': name} | _KIND for name, i in tokens.items()}
      content['added_tokens_decoder'] = {**listed, **new}
      models[_CONFIG] = _dump(content)
  if _NAMES in paths:
    models[_NAMES] = _dump({**atomic.read_json(paths[_NAMES]), **tokens})
  return models


def _in_json(path: paths_lib.Path, tokens: Mapping[str, int]) -> bytes | None:
  """tokenizer.json with the tokens; None where it numbers them otherwise."""
  content = atomic.read_json(path)
  new = [{'id': i, 'content': name} | _KIND for name, i in tokens.items()]
  content['added_tokens'] = [*(content.get('added_tokens') or []), *new]
  data = _dump(content)
  # It goes by its own count, whatever number a token is listed with.
  found = tokenizers.Tokenizer.from_str(data.decode())
  agree = all(found.token_to_id(name) == i for name, i in tokens.items())
  return data if agree else None


def _in_sentencepiece(data: bytes, tokens: Mapping[str, int]) -> bytes | None:
  """The model with the tokens; None where its ids do not end before them."""
  from sentencepiece import sentencepiece_model_pb2  # Brings protobuf.

  proto = sentencepiece_model_pb2.ModelProto.FromString(data)
  if len(proto.pieces) != min(tokens.values()):
    return None
  for name in tokens:
    piece = proto.pieces.add(piece=name, score=0.0)
    piece.type = piece.USER_DEFINED
  proto.trainer_spec.vocab_size = len(proto.pieces)
  return proto.SerializeToString()


def _dump(content: Mapping[str, Any]) -> bytes:
  return (json.dumps(content, indent=2, ensure_ascii=False) + '\n').encode()
