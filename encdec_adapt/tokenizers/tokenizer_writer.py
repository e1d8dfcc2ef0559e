"""Exports a vocabulary as tokenizer files for other software.

| vocabulary            | tokenizer.json                                      |
|-----------------------|-----------------------------------------------------|
| tokenizer.json        | the file, unchanged                                 |
| SentencePiece BPE     | BPE with byte fallback, merges ordered by score     |
| SentencePiece unigram | Unigram with byte fallback                          |
| T5's SentencePiece    | Unigram as in transformers' T5Tokenizer             |
| bytes                 | BPE with byte fallback and no merges                |
| ByT5's bytes          | none: tokenizer_config.json names ByT5Tokenizer     |

No tokenizer.json is equivalent to a SentencePiece BPE model with both a space
before every text and user-defined symbols: `tokenizers` also adds the space
after every symbol, or omits it before a leading symbol. T5's models are
converted only with T5's normalisation, which merges spaces and line breaks.
`check_convertible` rejects other models before training.

The export differs from this package in two ways. `tokenizers` reads a U+2581 in
a text as a space for SentencePiece models. A special token spelled out in a
text becomes that token if the folder has a chat template, which requires it, or
is T5's; otherwise tokenizer_config.json has `split_special_tokens`.

tokenizer_config.json names PreTrainedTokenizerFast: transformers 4 and 5 then
load tokenizer.json unchanged, without `sentencepiece` or `protobuf`; model
classes such as GemmaTokenizer rebuild the tokenizer from parts of it.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Iterable, Mapping
import itertools
import json
import pathlib
import re
import tempfile
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, processors

from encdec_adapt.base import errors
from encdec_adapt.files import atomic, paths
from encdec_adapt.tokenizers import (
  byte_vocabulary,
  chat_format,
  sentencepiece_vocabulary,
  tokenizer_json,
  vocabulary,
)

JSON = tokenizer_json.FILE
SENTENCEPIECE, T5 = 'tokenizer.model', 'spiece.model'
CONFIG = sentencepiece_vocabulary.CONFIG
# Compared for every vocabulary: runs of spaces, digits, newlines, characters
# that fall back to bytes in small vocabularies.
TEXTS = (
  'The quick brown fox jumps over the lazy dog.',
  '  def f(x):\n\n    return {"a": 1234567890, "b": x ** 2}\n\t# end  ',
  'Caf\u00e9, na\u00efve \u2014 \u4f60\u597d, \u043c\u0438\u0440 \U0001f600!',
)
_SPACE = '\u2581'
# Below the score of any segmentation into ordinary pieces, so that names of
# special tokens, which are pieces of the Unigram model, never match in text.
_NEVER = -1e6


def write(folder: pathlib.Path, vocab: vocabulary.Vocabulary) -> str:
  """Writes the missing tokenizer files of a folder.

  Existing files, copied from the model's source folder, are kept; tokens added
  to the vocabulary are written into them.

  Args:
    folder: existing local folder, such as a draft export.
    vocab: the vocabulary.

  Returns:
    A note on added tokens, '' without any.

  Raises:
    UserError: a file is damaged.
  """
  for source in vocab.files:
    name = source.name
    if source.suffix != '.json':
      name = T5 if vocab.ids.ends_with_eos else SENTENCEPIECE
    # The export writes files of the model.
    is_models = name in ('config.json', vocabulary.GENERATION)
    if not is_models and not (folder / name).exists():
      paths.copy(source, folder / name)
  is_byt5 = isinstance(vocab, byte_vocabulary.ByT5Vocabulary)
  if not is_byt5 and not (folder / JSON).exists():
    (folder / JSON).write_text(_convert(vocab).to_str(pretty=True) + '\n')
  if not (folder / CONFIG).exists():
    _write_json(folder / CONFIG, _config(vocab))
  if vocab.ids.ends_with_eos and vocab.piece(vocab.bos) != '[CLS]':
    # The model's config.json may belong to a class without the field. [CLS]
    # frames texts without it.
    config = atomic.read_json(folder / CONFIG)
    config[vocabulary.START] = vocab.bos
    if vocab.ids.forced is not None:
      config[vocabulary.FORCED] = vocab.ids.forced
    _write_json(folder / CONFIG, config)
  if not vocab.added:
    return ''
  ids = {vocab.piece(i): i for i in vocab.added}
  first, last = vocab.added[0], vocab.added[-1]
  added = (
    f'{len(ids)} added tokens, {vocab.piece(first)} to {vocab.piece(last)},'
    f' have the ids {first} to {last}'
  )
  if not is_byt5 and _add_tokens(folder, ids):
    return f'{added} in the tokenizer files.'
  return (
    f'{added}, but the tokenizer files would number them otherwise and are'
    ' left without them. Set config.data.add_sentinels to the same number'
    ' when this model is trained further.'
  )


def check(
  folder: pathlib.Path, vocab: vocabulary.Vocabulary, texts: Iterable[str]
) -> None:
  """Checks that the folder's tokenizer.json encodes texts like the vocabulary.

  Texts with a U+2581, or with T5's special tokens spelled out, are skipped; see
  the module's docstring. SentencePiece adds unigram scores in float32, so
  rounding breaks ties between segmentations: unigram ids are compared line by
  line, in any order.

  Args:
    folder: folder with a tokenizer.json.
    vocab: the folder's vocabulary.
    texts: texts to encode, without BOS.

  Raises:
    UserError: names the first differing text and token.
  """
  if not (folder / JSON).exists():  # ByT5 has none.
    return
  tokenizer = tokenizers.Tokenizer.from_file(str(folder / JSON))
  tokenizer.encode_special_tokens = True
  tokenizer.no_padding()  # As transformers reads the file.
  tokenizer.no_truncation()
  unigram = isinstance(tokenizer.model, models.Unigram)
  skipped = [_SPACE, *(vocab.specials if vocab.ids.ends_with_eos else ())]
  for text in texts:
    for part in text.splitlines(keepends=True) if unigram else [text]:
      ours = vocab.encode(part).tolist()
      theirs = tokenizer.encode(part, add_special_tokens=False).ids
      same = sorted(theirs) == sorted(ours) if unigram else theirs == ours
      if not same and not any(name in part for name in skipped):
        _refuse(vocab, ours, theirs)


def check_convertible(vocab: vocabulary.Vocabulary) -> None:
  """Checks that a vocabulary can be exported as a tokenizer.json.

  Raises:
    UserError: it cannot; see the module's docstring.
  """
  if isinstance(vocab, sentencepiece_vocabulary.SentencePieceVocabulary):
    data = vocab.files[0].read_bytes()
    _symbols(sentencepiece_vocabulary.read_proto(data), vocab)
    file = vocab.files[0].with_name(JSON)
    if vocab.ids.ends_with_eos and not file.exists():  # Else it is copied.
      with tempfile.TemporaryDirectory() as name:
        write(pathlib.Path(name), vocab)
        check(pathlib.Path(name), vocab, TEXTS)


def _symbols(proto: Any, vocab: vocabulary.Vocabulary) -> list[str]:
  symbols = [
    piece.piece
    for piece in proto.pieces
    if piece.type == piece.USER_DEFINED
    and piece.piece not in vocab.specials
    and ' ' not in piece.piece  # Matched after U+2581.
  ]
  is_bpe = proto.trainer_spec.model_type != proto.trainer_spec.UNIGRAM
  if symbols and is_bpe and proto.normalizer_spec.add_dummy_prefix:
    raise errors.UserError(
      f'the vocabulary {vocab.path}, of SentencePiece BPE, puts a space before'
      f' every text and has user-defined symbols ({symbols[0]!r}); a model'
      ' trained with it cannot be exported, because no tokenizer.json has the'
      ' same ids. Give a tokenizer.json as the vocabulary, or another model.'
    )
  return symbols


def _refuse(
  vocab: vocabulary.Vocabulary, ours: list[int], theirs: list[int]
) -> None:
  # The ids differ, possibly only in length.
  pairs = enumerate(itertools.zip_longest(ours, theirs))
  at = next(i for i, (our, their) in pairs if our != their)
  shown = [
    ' '.join(repr(vocab.piece(i)) for i in ids[at : at + 3]) or 'nothing'
    for ids in (theirs, ours)
  ]
  raise errors.UserError(
    f'the {JSON} of an export encodes a text differently from the vocabulary'
    f' {vocab.path}: after {vocab.decode(ours[:at])[-40:]!r} (token {at}) it'
    f' has {shown[0]} instead of {shown[1]}. Software that loads the export'
    ' would read other tokens than the model was trained on; use a vocabulary'
    ' with a tokenizer.json of its own, or a SentencePiece BPE model.'
  )


def _convert(vocab: vocabulary.Vocabulary) -> tokenizers.Tokenizer:
  if isinstance(vocab, byte_vocabulary.ByteVocabulary):
    tokenizer = _bpe({vocab.piece(i): i for i in range(vocab.stored_size)}, [])
    tokenizer.decoder = decoders.Sequence(
      [decoders.ByteFallback(), decoders.Fuse()]
    )
    symbols = []
  else:
    tokenizer, symbols = _from_sentencepiece(vocab)
  # By id: `tokenizers` numbers tokens that are not pieces in this order.
  tokenizer.add_special_tokens(
    [
      tokenizers.AddedToken(name, special=True, normalized=False)
      for name, i in sorted(vocab.specials.items(), key=lambda item: item[1])
      if i < vocab.stored_size
    ]
  )
  # Symbols with spaces match after normalisation, which writes U+2581.
  tokenizer.add_tokens(
    [tokenizers.AddedToken(name, normalized=_SPACE in name) for name in symbols]
  )
  tokenizer.post_processor = template(vocab)
  return tokenizer


def template(vocab: vocabulary.Vocabulary) -> processors.TemplateProcessing:
  """Returns the post-processor that frames texts and pairs like an encoder."""
  head, tail = vocab.ids.edges('encoder')
  names = {vocab.piece(i): i for i in (*head, *tail)}
  single = ' '.join([*map(vocab.piece, head), '$A', *map(vocab.piece, tail)])
  second = ' '.join(f'{x}:1' for x in single.replace('$A', '$B').split())
  return processors.TemplateProcessing(
    single=single, pair=f'{single} {second}', special_tokens=[*names.items()]
  )


def _from_sentencepiece(
  vocab: vocabulary.Vocabulary,
) -> tuple[tokenizers.Tokenizer, list[str]]:
  """Converts a SentencePiece model.

  Returns:
    The tokenizer, and the symbols to match as added tokens.
  """
  proto = sentencepiece_vocabulary.read_proto(vocab.files[0].read_bytes())
  # Includes T5's sentinels after the pieces.
  ids = {vocab.piece(i): i for i in range(vocab.stored_size)}
  scores = {
    piece.piece: piece.score
    for piece in proto.pieces
    if piece.type == piece.NORMAL
  }
  symbols = _symbols(proto, vocab)
  if proto.trainer_spec.model_type == proto.trainer_spec.UNIGRAM:
    alphabet = set(''.join(scores))
    # SentencePiece scores a symbol above any segmentation into pieces.
    scores |= {name: 0.1 * len(name.encode()) - 0.1 for name in symbols}
    symbols = []
    tokenizer = tokenizers.Tokenizer(
      models.Unigram(
        [(name, scores.get(name, _NEVER)) for name in ids],
        unk_id=vocab.unk,
        byte_fallback=True,
      )
    )
    # A character outside all pieces scores below `_NEVER`, so a name that
    # contains it would match. Texts are split at such characters, wherever they
    # occur in a name; no piece spans them.
    cuts = [
      (re.escape(name[: i + 1]), re.escape(name[i + 1 :]), re.escape(x))
      for name in sorted(ids.keys() - scores.keys())
      for i, x in enumerate(name)
      if x not in alphabet
    ]
    if cuts:
      names = '|'.join(f'(?<={start})(?={end})' for start, end, _ in cuts)
      characters = ''.join(sorted({x for *_, x in cuts}))
      tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex(f'[{characters}](?:{names})'), 'isolated'
      )
    if vocab.ids.ends_with_eos:
      _pretokenize_as_t5(tokenizer)
  else:
    tokenizer = _bpe(ids, _merges(scores), unk_token=vocab.piece(vocab.unk))
  # The steps follow SentencePiece: normalise characters, prepend the prefix,
  # escape spaces. Decoding reverses them.
  spec = proto.normalizer_spec
  steps = []
  if not vocab.ids.ends_with_eos:
    steps.append(normalizers.Replace(' ', _SPACE))
  undo = [
    decoders.Replace(_SPACE, ' '),
    decoders.ByteFallback(),
    decoders.Fuse(),
  ]
  if spec.add_dummy_prefix:
    if steps:
      steps.insert(0, normalizers.Prepend(_SPACE))
    undo.append(decoders.Strip(' ', 1, 0))
  if spec.precompiled_charsmap:
    steps.insert(0, normalizers.Precompiled(spec.precompiled_charsmap))
  tokenizer.normalizer = normalizers.Sequence(steps)
  tokenizer.decoder = decoders.Sequence(undo)
  return tokenizer, symbols


def _pretokenize_as_t5(tokenizer: tokenizers.Tokenizer) -> None:
  steps = [
    tokenizers.pre_tokenizers.WhitespaceSplit(),
    tokenizers.pre_tokenizers.Metaspace(_SPACE, 'always', split=True),
  ]
  if tokenizer.pre_tokenizer:
    steps.append(tokenizer.pre_tokenizer)
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(steps)


def _bpe(
  ids: Mapping[str, int], merges: list[tuple[str, str]], **options: str
) -> tokenizers.Tokenizer:
  model = models.BPE(
    vocab=dict(ids),
    merges=merges,
    byte_fallback=True,
    # SentencePiece also fuses unknown characters into a single token.
    fuse_unk=True,
    **options,
  )
  return tokenizers.Tokenizer(model)


def _merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
  """Returns all merges of two pieces into a third, by descending score.

  SentencePiece merges the neighbours with the best-scoring result;
  `tokenizers` takes the first merge in the list.
  """
  return [
    (name[:at], name[at:])
    for name in sorted(scores, key=scores.__getitem__, reverse=True)
    for at in range(1, len(name))
    if name[:at] in scores and name[at:] in scores
  ]


def _config(vocab: vocabulary.Vocabulary) -> dict[str, Any]:
  family = chat_format.find_template(vocab)
  roles = {role: getattr(vocab, role) for role in vocabulary.ROLES}
  further: dict[str, Any] = {}
  if vocab.ids.ends_with_eos:
    roles['bos'] = next(iter(vocab.ids.opening), None)
    stored = [i for i in vocab.sentinels if i < vocab.stored_size]
    further['extra_ids'] = len(stored)
  if isinstance(vocab, byte_vocabulary.ByT5Vocabulary):
    return {'tokenizer_class': byte_vocabulary.BYT5_CLASS}
  config = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    **{f'{r}_token': vocab.piece(i) for r, i in roles.items() if i is not None},
    'clean_up_tokenization_spaces': False,
    'model_input_names': ['input_ids', 'attention_mask'],
    # Rendered chats and T5's users spell out special tokens; in all other text
    # they are split.
    'split_special_tokens': family is None and not vocab.ids.ends_with_eos,
    **further,
  }
  if family:
    config['chat_template'] = chat_format.jinja(family)
  return config


def _add_tokens(folder: pathlib.Path, tokens: Mapping[str, int]) -> bool:
  """Writes added tokens into the files of a folder.

  Returns:
    False, without changes, if a file would give the tokens other ids.
  """
  tokenizer = tokenizers.Tokenizer.from_file(str(folder / JSON))
  tokenizer.add_special_tokens(
    [tokenizers.AddedToken(name, normalized=False) for name in tokens]
  )
  # `tokenizers` numbers new tokens from the end of its vocabulary.
  agree = all(tokenizer.token_to_id(name) == i for name, i in tokens.items())
  model = folder / T5
  if not model.exists():
    model = folder / SENTENCEPIECE
  if (
    agree and model.exists() and vocabulary.is_sentencepiece(model.read_bytes())
  ):
    agree = _add_pieces(model, tokens)
  if not agree:
    return False
  tokenizer.save(str(folder / JSON))
  config = atomic.read_json(folder / CONFIG)
  if listed := config.get('added_tokens_decoder'):
    # transformers' classes that rebuild the tokenizer read only this list.
    for name, i in tokens.items():
      listed[str(i)] = {'content': name, 'normalized': False, 'special': True}
    _write_json(folder / CONFIG, config)
  return True


def _add_pieces(path: pathlib.Path, tokens: Mapping[str, int]) -> bool:
  proto = sentencepiece_vocabulary.read_proto(path.read_bytes())
  if len(proto.pieces) != min(tokens.values()):
    return False
  for name in tokens:
    piece = proto.pieces.add(piece=name, score=0.0)
    # The type of special tokens in Gemma's files.
    piece.type = piece.USER_DEFINED
  proto.trainer_spec.vocab_size = len(proto.pieces)
  path.write_bytes(proto.SerializeToString())
  return True


def _write_json(path: pathlib.Path, content: Mapping[str, Any]) -> None:
  path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + '\n')
