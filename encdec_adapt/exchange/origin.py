"""What a run keeps of the Hugging Face folders that its weights came from.

Their config.json, generation config and tokenizer files lie in a work
directory under hugging_face/decoder, and under hugging_face/encoder where the
encoder came from another folder; so does the vision part of a T5Gemma 2.
Export carries them along.
"""

from collections.abc import Mapping
import dataclasses
import json
import os
import pathlib
import shutil
from typing import Any

from encdec_adapt.data import batch as batch_lib
from encdec_adapt.exchange import source as source_lib
from encdec_adapt.interop import folder as folder_lib
from encdec_adapt.interop import model_configs, vision
from encdec_adapt.runtime import errors

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
# Of a generation config; others speak of caches and versions of software.
_GENERATION_FIELDS = (
  *model_configs.TOKEN_IDS,
  'do_sample',
  'temperature',
  'top_k',
  'top_p',
)
# The framing of our own vocabularies.
_OUR_IDS = {
  'bos_token_id': batch_lib.BOS,
  'eos_token_id': batch_lib.EOS,
  'pad_token_id': batch_lib.PAD,
}

Folders = Mapping[str, pathlib.Path]


def folders(path: str | os.PathLike[str]) -> Folders:
  """Where the files of a model lie, by stack; empty for a model of our own.

  Args:
    path: a Hugging Face folder, or a work directory.
  """
  path = pathlib.Path(path)
  if source_lib.is_folder(path):
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


def keep(workdir: str | os.PathLike[str], found: Folders) -> None:
  """Copies the files into a work directory.

  Args:
    workdir: whose.
    found: as `folders` and `of_pair` give them.
  """
  for name, path in found.items():
    folder = pathlib.Path(workdir) / FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    for file in (folder_lib.CONFIG, GENERATION, *TOKENIZER):
      if (path / file).is_file():
        shutil.copyfile(path / file, folder / file)
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
  file = found.get('decoder', pathlib.Path()) / folder_lib.CONFIG
  raw = _read(file) if 'decoder' in found and file.is_file() else {}
  is_own = raw.get('model_type') == vision.MODEL_TYPE
  if folder is None:
    return vision.open_vision(file.parent) if is_own else None
  part = vision.open_vision(folder)
  if part is None:
    raise errors.UserError(
      f'{folder} has no vision part: no tensor of a vision_tower. Give a'
      ' folder of T5Gemma 2, or of a Gemma 3 that reads images.'
    )
  fields = {**part.fields, **vision.image_ids(raw)}
  return dataclasses.replace(part, fields=fields)


def config_fields(found: Folders) -> dict[str, dict[str, Any]]:
  """Fields of config.json to carry, by stack; ours where none were kept.

  Args:
    found: as `folders` gives them.

  Raises:
    UserError: a kept file is damaged.
  """
  fields = {'decoder': dict(_OUR_IDS)}
  for name, path in found.items():
    kept = model_configs.carried_fields(_read(path / folder_lib.CONFIG))
    # The folder of a whole pair has both, that of a source the decoder's.
    fields |= {name: kept['decoder']} if len(kept) == 1 else kept
  return fields


def generation_config(
  found: Folders, fields: Mapping[str, Mapping[str, Any]], *, is_pair: bool
) -> dict[str, Any]:
  """Content of generation_config.json.

  Args:
    found: as `folders` gives them.
    fields: as `config_fields` gives them.
    is_pair: of an encoder-decoder, whose decoder starts from BOS.
  """
  own = fields['decoder']
  content = {key: own[key] for key in model_configs.TOKEN_IDS if key in own}
  file = found.get('decoder', pathlib.Path()) / GENERATION
  if file.is_file():
    kept = _read(file)
    content |= {k: kept[k] for k in _GENERATION_FIELDS if k in kept}
  if is_pair and 'bos_token_id' in content:
    content['decoder_start_token_id'] = content['bos_token_id']
  return content


def tokenizer_files(found: Folders, vocabulary: str) -> dict[str, pathlib.Path]:
  """Tokenizer files to carry: name in the new folder -> file.

  An encoder's own go to the folder encoder/, where they are not the
  decoder's.

  Args:
    found: as `folders` gives them.
    vocabulary: SentencePiece file of the model, carried where no tokenizer
      was kept; '' for none.
  """
  files = _tokenizer(found['decoder']) if 'decoder' in found else {}
  if not files and vocabulary:
    files['tokenizer.model'] = pathlib.Path(vocabulary)
  if 'encoder' in found:
    own = _tokenizer(found['encoder'])
    if any(
      name not in files or path.read_bytes() != files[name].read_bytes()
      for name, path in own.items()
    ):
      files |= {f'encoder/{name}': path for name, path in own.items()}
  return files


def _tokenizer(folder: pathlib.Path) -> dict[str, pathlib.Path]:
  return {n: folder / n for n in TOKENIZER if (folder / n).is_file()}


def _read(path: pathlib.Path) -> dict[str, Any]:
  try:
    content = json.loads(path.read_bytes())
  except (OSError, ValueError) as error:
    raise errors.UserError(f'{path} cannot be read ({error}).') from error
  if not isinstance(content, dict):
    raise errors.UserError(f'{path} is not a JSON object.')
  return content
