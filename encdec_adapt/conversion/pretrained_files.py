"""Hugging Face files of a run's source models, kept for a later export.

A work directory stores their config.json, generation config and tokenizer
files under hugging_face/decoder, and under hugging_face/encoder where the
encoder came from another folder; also the vision part of a T5Gemma 2 with its
image processor. An export writes them into its folder.
"""

from collections.abc import Mapping
import dataclasses
import os
from typing import Any

from encdec_adapt.base import errors
from encdec_adapt.conversion import model_on_disk
from encdec_adapt.files import atomic, paths
from encdec_adapt.huggingface import config_json, tensor_folder, vision
from encdec_adapt.tokenizers import vocabulary_pair

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
# Fields of a generation config that name the software that wrote it.
_STAMPS = ('transformers_version', '_from_model_config', '_commit_hash')
# Fields that choose caches for one class and version of transformers; the
# exported model may be of another class.
_CACHES = ('cache_implementation', 'cache_config', 'compile_config')

Folders = Mapping[str, paths.Path]


def folders(path: str | os.PathLike[str]) -> Folders:
  """Finds the folders with the kept files of a model.

  Args:
    path: a Hugging Face folder, or a work directory.

  Returns:
    Stack -> folder; empty for a model that was not made from others.
  """
  path = paths.at(path)
  if model_on_disk.is_folder(path):
    return {'decoder': path}
  kept = {name: path / FOLDER / name for name in ('encoder', 'decoder')}
  return {name: folder for name, folder in kept.items() if folder.is_dir()}


def folders_of_pair(
  encoder: str | os.PathLike[str], decoder: str | os.PathLike[str]
) -> Folders:
  """Finds the folders with the files of an adapted pair.

  Args:
    encoder: decoder-only source of the encoder.
    decoder: decoder-only source of the decoder.
  """
  found = {
    'encoder': folders(encoder).get('decoder'),
    'decoder': folders(decoder).get('decoder'),
  }
  if found['encoder'] == found['decoder']:
    del found['encoder']
  return {name: path for name, path in found.items() if path}


def check(found: Folders) -> None:
  """Checks kept files before anything is written.

  Args:
    found: see `folders`.

  Raises:
    UserError: a file is damaged; names it.
  """
  for path in found.values():
    for name in (GENERATION, *TOKENIZER):
      if (path / name).is_file():
        _check_file(path / name)
  vision_part(found)


def _check_file(file: paths.Path) -> None:
  if file.name.endswith('.json'):
    atomic.read_json(file)
  with file.open('rb') as content:
    if content.read(7) in (b'', b'version'):
      raise errors.UserError(
        f'{file} is empty, or a pointer of Git LFS; copy the file itself again.'
      )


def keep(workdir: str | os.PathLike[str], found: Folders) -> None:
  """Copies the files into a work directory, replacing earlier ones.

  Args:
    workdir: the work directory.
    found: see `folders`.
  """
  paths.remove(paths.at(workdir) / FOLDER)
  for name, path in found.items():
    folder = paths.at(workdir) / FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    for file in (tensor_folder.CONFIG, GENERATION, *TOKENIZER):
      if (path / file).is_file():
        paths.copy(path / file, folder / file)
    if part := vision_part({name: path}):
      vision.keep(part, folder)


def vision_part(
  found: Folders, folder: str | None = None
) -> vision.Vision | None:
  """Opens the vision part of a T5Gemma 2; None where there is none.

  Args:
    found: see `folders`.
    folder: model folder to take it from instead; the ids of images stay
      those of `found`.

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
  ids = vision.image_ids(_kept_json(found, tensor_folder.CONFIG))
  return dataclasses.replace(part, fields={**part.fields, **ids})


def reads_images(found: Folders) -> bool:
  """Returns whether the kept config.json is that of a T5Gemma 2."""
  config = _kept_json(found, tensor_folder.CONFIG)
  return config.get('model_type') == vision.MODEL_TYPE


def _kept_json(found: Folders, name: str) -> dict[str, Any]:
  """Reads a kept file of the decoder; empty if there is none."""
  if 'decoder' in found and (found['decoder'] / name).is_file():
    return atomic.read_json(found['decoder'] / name)
  return {}


def config_fields(
  found: Folders, opened: vocabulary_pair.Opened | None = None
) -> dict[str, dict[str, Any]]:
  """Collects the fields of config.json to carry, by stack.

  Args:
    found: see `folders`.
    opened: vocabularies of the model, whose ids are used where no config.json
      was kept.

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
    # The folder of a pair has fields of both stacks, that of a decoder one's.
    fields |= {name: kept['decoder']} if len(kept) == 1 else kept
  return fields


def prompt_room(
  stored: model_on_disk.StoredModel, generated: int = 0
) -> int | None:
  """Returns the most tokens of a prompt, by `max_position_embeddings`.

  Args:
    stored: the model.
    generated: tokens that follow the prompt; a decoder-only model has to hold
      them, too.

  Returns:
    None where the kept config.json states no limit.

  Raises:
    UserError: there is no room for BOS and a token, or a kept file is damaged.
  """
  fields = config_fields(folders(stored.path))
  side = 'encoder' if 'encoder' in fields else 'decoder'
  limit = fields[side].get('max_position_embeddings')
  if limit is None or 'encoder' in stored.model.stacks:
    return limit
  if limit - generated < 2:
    raise errors.UserError(
      f'{generated} generated tokens leave no room for a prompt in the {limit}'
      f' positions of {stored.path} (max_position_embeddings of its'
      ' config.json); lower --max_tokens, or leave out --retrieval.'
    )
  return limit - generated


def decoder_positions(stored: model_on_disk.StoredModel) -> int | None:
  """Returns the decoder's `max_position_embeddings`, None where none is stated.

  Raises:
    UserError: a kept file is damaged.
  """
  fields = config_fields(folders(stored.path))
  return fields['decoder'].get('max_position_embeddings')


def special_ids(
  found: Folders, opened: vocabulary_pair.Opened | None
) -> dict[str, Any]:
  """Finds the ids that frame a decoder's text.

  A vocabulary has one EOS; a model tuned for conversations ends its turns
  with others, which its config.json or generation config lists.

  Args:
    found: see `folders`.
    opened: vocabularies of the model, if it has any.

  Returns:
    `bos` and `pad`, ids; `eos`, a tuple of ids. Only those that are known.

  Raises:
    UserError: a kept file is damaged.
  """
  kept = config_fields(found)['decoder']
  generation = _kept_json(found, GENERATION)
  own = opened.decoder if opened else None
  ids = {
    'bos': own.bos if own else kept.get('bos_token_id'),
    'pad': own.pad if own else kept.get('pad_token_id'),
    'eos': own.eos if own else None,
  }

  def tokens(stated: int | list[int] | None) -> list[int]:
    """Returns the ids that a file states; old Llamas have -1 for none."""
    listed = stated if isinstance(stated, list) else [stated]
    return [i for i in listed if i is not None and i >= 0]

  known: dict[str, Any] = {
    name: ids[name] for name in ('bos', 'pad') if tokens(ids[name])
  }
  ends = ids['eos'], kept.get('eos_token_id'), generation.get('eos_token_id')
  if eos := tuple(dict.fromkeys(i for end in ends for i in tokens(end))):
    known['eos'] = eos
  return known


def generation_config(
  found: Folders,
  fields: Mapping[str, Mapping[str, Any]],
  *,
  is_pair: bool,
  end_of_turn: int | None = None,
) -> tuple[dict[str, Any], str]:
  """Makes the content of an exported generation_config.json.

  Args:
    found: see `folders`.
    fields: see `config_fields`.
    is_pair: whether the model is an encoder-decoder, whose decoder starts
      from BOS.
    end_of_turn: id that ends an answer of a model that was trained on
      conversations; None for others.

  Returns:
    The content, and a note on kept fields that are left out, '' for none.
  """
  own = fields['decoder']
  content = {key: own[key] for key in config_json.TOKEN_IDS if key in own}
  kept = _kept_json(found, GENERATION)
  content |= {k: kept[k] for k in kept if k not in (*_STAMPS, *_CACHES)}
  if is_pair and 'bos_token_id' in content:
    content['decoder_start_token_id'] = content['bos_token_id']
  if end_of_turn is not None:
    ends = content.get('eos_token_id', [])
    ends = ends if isinstance(ends, list) else [ends]
    content['eos_token_id'] = [*dict.fromkeys([*ends, end_of_turn])]
  dropped = [
    f'{key} ({kept[key]!r})' for key in _CACHES if kept.get(key) is not None
  ]
  if not dropped:
    return content, ''
  return content, (
    f'{GENERATION} is written without {", ".join(dropped)}: transformers'
    ' chooses caches by the class of the model.'
  )
