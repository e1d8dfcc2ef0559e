"""What a run keeps of the Hugging Face folders that its weights came from.

Their config.json, generation config and tokenizer files lie in a work
directory under hugging_face/decoder, and under hugging_face/encoder where the
encoder came from another folder; so does the vision part of a T5Gemma 2, with
what reads its images. Export carries them along.
"""

from collections.abc import Mapping
import dataclasses
import os
import pathlib
from typing import Any

from encdec_adapt.cli import errors
from encdec_adapt.conversion import stored_model
from encdec_adapt.files import atomic, paths
from encdec_adapt.huggingface import config_json, tensor_folder, vision
from encdec_adapt.tokenizers import added_tokens, vocabularies, vocabulary

FOLDER = 'hugging_face'
GENERATION = 'generation_config.json'
TOKENIZER = (
  'tokenizer.json',
  'tokenizer.model',
  'tokenizer_config.json',
  'special_tokens_map.json',
  'added_tokens.json',
  'vocab.json',
  'merges.txt',
  'chat_template.jinja',
  'chat_template.json',
)
# What a generation config says of the software that wrote it.
_STAMPS = ('transformers_version', '_from_model_config', '_commit_hash')
# What it says of caches: for a class and a version of transformers, and the
# model may be of another class now.
_CACHES = ('cache_implementation', 'cache_config', 'compile_config')

_POINTER = b'version https://git-lfs'  # In the place of a large file.

Folders = Mapping[str, paths.Path]


def folders(path: str | os.PathLike[str]) -> Folders:
  """Where the files of a model lie, by stack; empty for a model of our own.

  Args:
    path: a Hugging Face folder, or a work directory.
  """
  path = paths.at(path)
  if stored_model.is_folder(path):
    return {'decoder': path}
  kept = path / FOLDER
  return {
    name: kept / name
    for name in ('encoder', 'decoder')
    if (kept / name).is_dir()
  }


def of_pair(
  encoder: str | os.PathLike[str], decoder: str | os.PathLike[str]
) -> Folders:
  """Where the files of an adapted pair lie.

  Args:
    encoder: the decoder-only model that the encoder comes from.
    decoder: the same of the decoder.
  """
  found = {
    'encoder': folders(encoder).get('decoder'),
    'decoder': folders(decoder).get('decoder'),
  }
  if found['encoder'] == found['decoder']:
    del found['encoder']
  return {name: path for name, path in found.items() if path}


def check(found: Folders) -> None:
  """Refuses, before anything is written, files that `keep` would keep damaged.

  Args:
    found: as `folders` and `of_pair` give them.

  Raises:
    UserError: names the file, and what is wrong with it.
  """
  for path in found.values():
    for name in (GENERATION, *TOKENIZER):
      if (path / name).is_file():
        _check_file(path / name)
  _check_ids(found)
  vision_part(found)


def _check_file(file: paths.Path) -> None:
  """Refuses a file that was not copied whole."""
  if file.name.endswith('.json'):
    atomic.read_json(file)
  with file.open('rb') as content:
    start = content.read(len(_POINTER))
  if not start or start == _POINTER:
    what = 'a pointer of Git LFS' if start else 'empty'
    raise errors.UserError(f'{file} is {what}; copy the file itself again.')


def keep(workdir: str | os.PathLike[str], found: Folders) -> None:
  """Copies the files into a work directory, which then has no others.

  Args:
    workdir: whose.
    found: as `folders` and `of_pair` give them.
  """
  paths.remove(paths.at(workdir) / FOLDER)
  for name, path in found.items():
    folder = paths.at(workdir) / FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    for file in (tensor_folder.CONFIG, GENERATION, *TOKENIZER):
      if (path / file).is_file():
        paths.copy(path / file, folder / file)
    part = vision_part({name: path})
    if part:
      vision.keep(part, folder)


def vision_part(
  found: Folders, folder: str | None = None
) -> vision.Vision | None:
  """The vision part of a T5Gemma 2; None where there is none.

  Args:
    found: as `folders` gives them.
    folder: where to take it from instead; the ids of images stay those of
      `found`.

  Raises:
    UserError: it is incomplete, or `folder` has none.
  """
  if folder is None:
    own = reads_images(found)
    return vision.open_vision(found['decoder']) if own else None
  part = vision.open_vision(folder)
  if part is None:
    raise errors.UserError(
      f'{folder} has no vision part: no tensor of a vision_tower. Give a'
      ' folder of T5Gemma 2, or of a Gemma 3 that reads images.'
    )
  ids = vision.image_ids(_decoder_config(found))
  fields = {**part.fields, **ids}
  return dataclasses.replace(part, fields=fields)


def reads_images(found: Folders) -> bool:
  """Whether the config.json that was kept is of a T5Gemma 2.

  Args:
    found: as `folders` gives them.

  Raises:
    UserError: it is damaged.
  """
  return _decoder_config(found).get('model_type') == vision.MODEL_TYPE


def _decoder_config(found: Folders) -> dict[str, Any]:
  """The config.json that was kept of the decoder; empty for none."""
  file = found.get('decoder', pathlib.Path()) / tensor_folder.CONFIG
  return atomic.read_json(file) if 'decoder' in found and file.is_file() else {}


def config_fields(
  found: Folders, opened: vocabularies.Opened | None = None
) -> dict[str, dict[str, Any]]:
  """Fields of config.json to carry, by stack.

  Args:
    found: as `folders` gives them.
    opened: the vocabularies, whose ids are told where none were kept.

  Raises:
    UserError: a kept file is damaged.
  """
  fields = {'decoder': {}}
  for name, one in opened.sides.items() if opened else ():
    if name == 'decoder' or opened.differ:
      fields[name] = {
        'bos_token_id': one.bos,
        'eos_token_id': one.eos,
        'pad_token_id': one.pad,
      }
  for name, path in found.items():
    kept = config_json.carried_fields(
      atomic.read_json(path / tensor_folder.CONFIG)
    )
    # The folder of a whole pair has both, that of a source the decoder's.
    fields |= {name: kept['decoder']} if len(kept) == 1 else kept
  return fields


def special_ids(
  found: Folders, opened: vocabularies.Opened | None
) -> dict[str, Any]:
  """What a decoder's text is framed with, and all the tokens that end it.

  A vocabulary has one EOS. A model that was tuned to converse ends its turns
  with others, which its config.json or generation config lists.

  Args:
    found: as `folders` gives them.
    opened: the vocabularies, which say `bos` and `pad` where there are any.

  Returns:
    `bos` and `pad`, ids; `eos`, a tuple of ids. Those that are known.

  Raises:
    UserError: a kept file is damaged.
  """
  _check_ids(found)
  kept = config_fields(found)['decoder']
  generation = generation_config(found, {'decoder': kept}, is_pair=False)
  ids = {name: kept.get(f'{name}_token_id') for name in ('bos', 'pad')}
  ends = [kept.get('eos_token_id'), generation.get('eos_token_id')]
  if opened:
    ids |= {'bos': opened.decoder.bos, 'pad': opened.decoder.pad}
    ends.insert(0, opened.decoder.eos)
  known: dict[str, Any] = {name: i for name, i in ids.items() if _is_token(i)}
  each = [i for end in ends for i in (end if isinstance(end, list) else [end])]
  if eos := tuple(dict.fromkeys(i for i in each if _is_token(i))):
    known['eos'] = eos
  return known


def generation_config(
  found: Folders, fields: Mapping[str, Mapping[str, Any]], *, is_pair: bool
) -> dict[str, Any]:
  """Content of generation_config.json: what was kept of the source's.

  Stamps of the software that wrote it go, and the fields of `dropped_note`;
  the decoder of a pair starts from BOS, whatever was kept.

  Args:
    found: as `folders` gives them.
    fields: as `config_fields` gives them.
    is_pair: of an encoder-decoder, whose decoder starts from BOS.
  """
  own = fields['decoder']
  content = {key: own[key] for key in config_json.TOKEN_IDS if key in own}
  file = found.get('decoder', pathlib.Path()) / GENERATION
  if file.is_file():
    kept = atomic.read_json(file)
    content |= {k: kept[k] for k in kept if k not in (*_STAMPS, *_CACHES)}
  if is_pair and 'bos_token_id' in content:
    content['decoder_start_token_id'] = content['bos_token_id']
  return content


def dropped_note(found: Folders) -> str:
  """What to say of fields that an exported generation config lacks.

  Args:
    found: as `folders` gives them.

  Returns:
    A sentence; '' if nothing is lost.
  """
  file = found.get('decoder', pathlib.Path()) / GENERATION
  kept = atomic.read_json(file) if file.is_file() else {}
  given = [key for key in _CACHES if kept.get(key) is not None]
  dropped = [f'{key} ({kept[key]!r})' for key in given]
  if not dropped:
    return ''
  return (
    f'{GENERATION} is written without {", ".join(dropped)}: transformers'
    ' chooses caches by the class of the model.'
  )


def tokenizer_files(
  found: Folders, opened: vocabularies.Opened | None
) -> dict[str, paths.Path]:
  """Tokenizer files to carry: name in the new folder -> file.

  An encoder's own go to the folder encoder/, where they are not the
  decoder's.

  Args:
    found: as `folders` gives them.
    opened: vocabularies of the model, carried where no tokenizer was kept.
  """
  sides = {name: _tokenizer(path) for name, path in found.items()}
  if opened:
    for name, one in opened.sides.items():
      if not sides.get(name) and (name == 'decoder' or opened.differ):
        sides[name] = vocabulary_files(one)
  files = dict(sides.get('decoder', {}))
  own = sides.get('encoder', {})
  if any(
    name not in files or path.read_bytes() != files[name].read_bytes()
    for name, path in own.items()
  ):
    files |= {f'{stored_model.ENCODER}/{name}': p for name, p in own.items()}
  return files


def with_added(
  carried: Mapping[str, paths.Path], opened: vocabularies.Opened | None
) -> dict[str, paths.Path | bytes]:
  """Tokenizer files with the tokens that were added to a vocabulary.

  Args:
    carried: as `tokenizer_files` gives them.
    opened: the vocabularies of the model.

  Returns:
    `carried`, with the content for the file where it changes. Nothing does
    where the files cannot give the tokens their ids.

  Raises:
    UserError: a file is damaged.
  """
  found: dict[str, paths.Path | bytes] = dict(carried)
  for side, one in opened.sides.items() if opened else ():
    start = '' if side == 'decoder' else f'{stored_model.ENCODER}/'
    own = {
      name.removeprefix(start): path
      for name, path in carried.items()
      if name.startswith(start)
    }
    new = added_tokens.contents(own, one)
    found |= {f'{start}{name}': content for name, content in new.items()}
  return found


def added_note(opened: vocabularies.Opened | None, *, is_written: bool) -> str:
  """What to say of ids that were added to a vocabulary; or ''.

  Args:
    opened: the vocabularies of the model.
    is_written: the exported tokenizer files have them.
  """
  added = opened.decoder.added if opened else ()
  if not added:
    return ''
  names = [opened.decoder.piece(i) for i in added]
  sentinels = sum(name.startswith('<sentinel_') for name in names)
  ids = f'{len(added)} tokens, {names[0]} to {names[-1]}, have the ids'
  if is_written:
    return f'{ids} {added[0]} to {added[-1]} in the tokenizer files.'
  return (
    f'{ids} {added[0]} to {added[-1]}, which no tokenizer file has: they were'
    f' added by config.data.add_sentinels={sentinels}. Set it again when this'
    ' model is trained on.'
  )


def vocabulary_files(
  one: vocabulary.Vocabulary,
) -> dict[str, paths.Path]:
  """Files of a vocabulary, by their names in a tokenizer's folder."""
  if len(one.files) == 1 and one.files[0].suffix != '.json':
    return {vocabularies.SENTENCEPIECE: one.files[0]}
  return {file.name: file for file in one.files if file.name in TOKENIZER}


def _check_ids(found: Folders) -> None:
  """Refuses special ids that are no numbers, in any file that was kept."""
  said = [
    (found.get(stack, found.get('decoder')), tensor_folder.CONFIG, fields)
    for stack, fields in config_fields(found).items()
    if fields
  ]
  for path in found.values():
    if (path / GENERATION).is_file():
      said.append((path, GENERATION, atomic.read_json(path / GENERATION)))
  for path, name, fields in said:
    for key in config_json.TOKEN_IDS:
      value = fields.get(key)
      several = key == 'eos_token_id' and isinstance(value, list)
      for one in value if several else [value]:
        if one is not None and type(one) is not int:
          raise errors.UserError(
            f'{path / name} has {key} = {value!r}, and an id is a number.'
            ' Correct it, or fetch the file again.'
          )


def _is_token(value: int | None) -> bool:
  """Whether an id of a config is there; old Llamas have -1 for none."""
  return value is not None and value >= 0


def _tokenizer(folder: paths.Path) -> dict[str, paths.Path]:
  return {n: folder / n for n in TOKENIZER if (folder / n).is_file()}
