"""Hugging Face files of a run's source models, stored for a later export.

A work directory stores config.json, generation config and tokenizer files under
hugging_face/decoder, and under hugging_face/encoder if the encoder has another
source, each with base_model.json (model card metadata of the source's
README.md); also the vision part of a T5Gemma 2 with its image processor. No
parameters are read here.
"""

from collections.abc import Mapping
import dataclasses
import math
import os
import re
from typing import Any

import yaml

from encdec_adapt.base import errors
from encdec_adapt.files import atomic, paths
from encdec_adapt.huggingface import (
  config_json,
  embedding_files,
  t5_json,
  tensor_folder,
  vision,
)
from encdec_adapt.stored import model_on_disk
from encdec_adapt.tokenizers import vocabulary, vocabulary_pair

FOLDER = 'hugging_face'
_BASE = 'base_model.json'
_FRONT_MATTER = re.compile(r'\A---\n(.*?\n)---\n', re.DOTALL)
# A folder in the cache of the Hub's client.
_CACHED = re.compile(r'models--(.+?)--([^/]+)/snapshots/')
_CARRIED = (tensor_folder.GENERATION, *model_on_disk.TOKENIZERS)
# Fields of a generation config that name the software that wrote it.
_STAMPS = ('transformers_version', '_from_model_config', '_commit_hash')
# Cache settings for a class and version of transformers; the exported model may
# have another class.
_CACHES = ('cache_implementation', 'cache_config', 'compile_config')

Folders = Mapping[str, paths.Path]


def folders(path: str | os.PathLike[str]) -> Folders:
  """Finds the folders with the pretrained files of a model.

  Args:
    path: a Hugging Face folder, or a work directory.

  Returns:
    Stack -> folder; empty for a model without sources.
  """
  path = paths.at(path)
  if model_on_disk.is_folder(path):
    return {'decoder': path}
  stored = {name: path / FOLDER / name for name in ('encoder', 'decoder')}
  return {name: folder for name, folder in stored.items() if folder.is_dir()}


def tokenizer_folders(path: str | os.PathLike[str]) -> Folders:
  """Finds the folders with the tokenizer files of a model, as `folders`."""
  sources = folders(path)
  top = sources.get('decoder', paths.at(path))
  separate = top / model_on_disk.DECODER_TOKENIZER
  # An exported pair has the encoder's files at the top.
  if separate.is_dir():
    return {'encoder': top, 'decoder': separate}
  return sources


def folders_of_pair(
  encoder: str | os.PathLike[str], decoder: str | os.PathLike[str]
) -> Folders:
  """Finds the folders with the files of an adapted pair.

  Args:
    encoder: decoder-only source of the encoder.
    decoder: decoder-only source of the decoder.
  """
  # Both are decoder-only: each has its files under 'decoder'.
  inputs, targets = (folders(x).get('decoder') for x in (encoder, decoder))
  pair = {'encoder': None if inputs == targets else inputs, 'decoder': targets}
  return {name: path for name, path in pair.items() if path}


def check(sources: Folders) -> None:
  """Checks pretrained files before anything is written.

  Args:
    sources: see `folders`.

  Raises:
    UserError: a file is damaged; names it.
  """
  for path in sources.values():
    for file in (path / name for name in _CARRIED):
      if not file.is_file():
        continue
      if file.name.endswith('.json'):
        atomic.read_json(file)
      with file.open('rb') as content:
        # Without Git LFS, a clone has pointer files that begin with 'version'.
        if content.read(7) in (b'', b'version'):
          raise errors.UserError(
            f'{file} is empty, or a pointer of Git LFS; copy the file itself'
            ' again.'
          )
  vision_part(sources)


def keep(workdir: str | os.PathLike[str], sources: Folders) -> None:
  """Copies the files into a work directory, replacing earlier files.

  Args:
    workdir: the work directory.
    sources: see `folders`.
  """
  # Remove all: a file missing from the new sources would be stale.
  paths.remove(paths.at(workdir) / FOLDER)
  for name, path in sources.items():
    folder = paths.at(workdir) / FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    for file in (tensor_folder.CONFIG, *_CARRIED):
      if (path / file).is_file():
        (folder / file).parent.mkdir(exist_ok=True)
        paths.copy(path / file, folder / file)
    atomic.write_json(folder / _BASE, _base_model(path))
    if part := vision_part({name: path}):
      vision.keep(part, folder)


def replace_tokenizers(
  workdir: str | os.PathLike[str], tokenizers: Folders
) -> None:
  """Replaces the tokenizer files that `keep` has copied.

  Args:
    workdir: the work directory.
    tokenizers: folders of the new files, by stack; a stack that is missing has
      the decoder's.
  """
  for stack, folder in tokenizer_folders(workdir).items():
    source = tokenizers.get(stack, tokenizers['decoder'])
    for name in vocabulary_pair.FILES:
      (folder / name).unlink(missing_ok=True)
      if (source / name).is_file():
        paths.copy(source / name, folder / name)


def base_models(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Describes the pretrained models that a model was made from.

  Args:
    path: see `folders`.

  Returns:
    `name` and `on_hub` of each, and `license`, `license_name`, `license_link`
    and `languages` if its README.md states them.
  """
  bases = map(_base_model, folders(path).values())
  return [*{base['name']: base for base in bases}.values()]


def _base_model(folder: paths.Path) -> dict[str, Any]:
  if (folder / _BASE).is_file():
    return atomic.read_json(folder / _BASE)
  address = _CACHED.search(str(folder))
  name = '/'.join(address.groups()) if address else model_on_disk.title(folder)
  base = {'name': name, 'on_hub': address is not None}
  if not (folder / model_on_disk.CARD).is_file():
    return base
  text = (folder / model_on_disk.CARD).read_text('utf-8', errors='replace')
  matter = _FRONT_MATTER.match(text)
  try:
    fields = yaml.safe_load(matter[1]) if matter else {}
  except yaml.YAMLError:  # A model card is not needed to load the model.
    return base
  if not isinstance(fields, dict):
    return base
  names = ('license', 'license_name', 'license_link')
  base |= {key: fields[key] for key in names if fields.get(key)}
  languages = fields.get('language') or []
  if isinstance(languages, str):
    languages = [languages]
  return {**base, 'languages': languages}


def vision_part(
  sources: Folders, folder: str | None = None
) -> vision.Vision | None:
  """Opens the vision part of a T5Gemma 2; None if there is none.

  Args:
    sources: see `folders`.
    folder: model to take it from instead; image ids are still those of
      `sources`.

  Raises:
    UserError: it is incomplete, or `folder` has none.
  """
  if folder is None:
    # A Gemma 3 may have a vision part too, but is adapted as a text model
    # unless --vision is given.
    has_part = reads_images(sources)
    return vision.open_vision(sources['decoder']) if has_part else None
  part = vision.open_vision(model_on_disk.resolve(folder)[0])
  if part is None:
    raise errors.UserError(
      f'{folder} has no vision part: no tensor of a vision_tower. Give a'
      ' folder of T5Gemma 2, or of a Gemma 3 that reads images.'
    )
  # The text model was trained with the ids of its source.
  ids = vision.image_ids(_stored_json(sources, tensor_folder.CONFIG))
  return dataclasses.replace(part, fields={**part.fields, **ids})


def reads_images(sources: Folders) -> bool:
  """Returns whether the stored config.json describes a T5Gemma 2."""
  config = _stored_json(sources, tensor_folder.CONFIG)
  return config.get('model_type') == vision.MODEL_TYPE


def _stored_json(sources: Folders, name: str) -> dict[str, Any]:
  if 'decoder' in sources and (sources['decoder'] / name).is_file():
    return atomic.read_json(sources['decoder'] / name)
  return {}


def config_fields(
  sources: Folders, opened: vocabulary_pair.Opened | None = None
) -> dict[str, dict[str, Any]]:
  """Returns the fields of config.json to carry over, by stack.

  Args:
    sources: see `folders`.
    opened: vocabularies of the model, for ids without a stored config.json.

  Raises:
    UserError: a stored file is damaged.
  """
  fields = {'decoder': {}}
  for name, side in opened.sides.items() if opened else ():
    if name == 'decoder' or opened.differ:
      fields[name] = _ids(side)
  # Stored files take precedence: they may list several EOS ids.
  for name, path in sources.items():
    raw = atomic.read_json(path / tensor_folder.CONFIG)
    carried = config_json.carried_fields(raw)
    # A pair has fields of both stacks. A decoder-only source has its fields
    # under 'decoder', even as the source of an encoder.
    fields |= {name: carried['decoder']} if len(carried) == 1 else carried
  return fields


def _ids(opened: vocabulary.Vocabulary) -> dict[str, int]:
  ids = {
    f'{role}_token_id': getattr(opened, role) for role in ('bos', 'eos', 'pad')
  }
  ids[vocabulary.FORCED] = opened.ids.forced
  return {name: i for name, i in ids.items() if i is not None}


def prompt_room(
  stored: model_on_disk.StoredModel, generated: int = 0
) -> int | None:
  """Returns the maximum prompt length by `stack_positions`.

  Args:
    stored: the model.
    generated: number of generated tokens, which share the context of a
      decoder-only model.

  Returns:
    Tokens; of a passage, if the model reads passages. None without a limit.

  Raises:
    UserError: there is no room for BOS and a token, or a stored file is
      damaged.
  """
  side = stored.prompt_side
  # The second is in the folder of an embedding model.
  stated = embedding_files.read_room(stored.path) or math.inf
  passage = stored.model.prompt_reader.passages.length or math.inf
  # Both stacks of a classifier may read the text.
  reads = stored.model.architecture.positions(1, 0)
  limits = stack_positions(stored)
  limit = min(stated, passage, *(limits[x] for x in limits if reads[x]))
  if limit == math.inf:
    return None
  room = limit - stored.model.architecture.positions(0, generated)[side]
  if room < 2:
    raise errors.UserError(
      f'{generated} generated tokens leave no room for a prompt in the {limit}'
      f' positions of {stored.path} ({positions_key(stored, side)}); lower'
      ' --max_tokens, or leave out --retrieval.'
    )
  return room


def stack_positions(stored: model_on_disk.StoredModel) -> dict[str, float]:
  """Returns the positions that each stack can read.

  Learned ones, or `max_position_embeddings` of config.json; infinity if
  missing.

  Raises:
    UserError: a stored file is damaged.
  """
  fields = config_fields(folders(stored.path))
  stacks = {x: fields.get(x, fields['decoder']) for x in stored.model.stacks}
  return {
    name: min(
      stored.model.stacks[name].positions.limit,
      part.get('max_position_embeddings') or math.inf,
    )
    for name, part in stacks.items()
  }


def positions_key(stored: model_on_disk.StoredModel, side: str) -> str:
  """Returns the key of `prompt_room` and `stack_positions`, for errors."""
  room = embedding_files.read_room(stored.path)
  if room and room < stack_positions(stored)[side]:
    return f'max_seq_length of its {embedding_files.TRANSFORMER}'
  if stored.model.stacks[side].positions.kind == 'learned':
    return f'learned, config.model.{side}.positions.rows'
  return 'max_position_embeddings of its config.json'


def special_ids(
  sources: Folders, opened: vocabulary_pair.Opened | None
) -> dict[str, Any]:
  """Returns the special ids of a decoder.

  A vocabulary has a single EOS; config.json or the generation config lists
  further end-of-turn ids of a chat model.

  Args:
    sources: see `folders`.
    opened: vocabularies of the model, if it has any.

  Returns:
    Known ids: `bos`, `pad`, `eos` (a tuple), `forced`, and the `vocab_size`.

  Raises:
    UserError: a stored file is damaged.
  """
  fields = config_fields(sources)['decoder']
  generation = _stored_json(sources, tensor_folder.GENERATION)
  # The vocabulary first: it framed the training texts.
  framing = opened.decoder if opened else None

  def tokens(stated: int | list[int] | None) -> list[int]:
    # Old Llamas use -1 for no token.
    listed = stated if isinstance(stated, list) else [stated]
    return [i for i in listed if i is not None and i >= 0]

  # T5's files have no BOS.
  fields['bos_token_id'] = fields.get(t5_json.START, fields.get('bos_token_id'))
  ids: dict[str, Any] = {}
  for role in ('bos', 'pad'):
    key = f'{role}_token_id'
    token = getattr(framing, role) if framing else fields.get(key)
    if tokens(token):
      ids[role] = token
  ends = fields.get('eos_token_id'), generation.get('eos_token_id')
  if framing:
    ends = framing.eos, *ends
  # All EOS ids: generation must stop at any of them.
  if eos := tuple(dict.fromkeys(i for end in ends for i in tokens(end))):
    ids['eos'] = eos
  # As in transformers, a generation config decides alone.
  ids['forced'] = (generation or fields).get(vocabulary.FORCED)
  if framing:
    ids |= {'vocab_size': framing.size, 'forced': framing.ids.forced}
  return ids


def generation_config(
  sources: Folders,
  fields: Mapping[str, Mapping[str, Any]],
  opened: vocabulary_pair.Opened | None,
  *,
  is_pair: bool,
  end_of_turn: int | None = None,
) -> tuple[dict[str, Any], str]:
  """Returns the content of an exported generation_config.json.

  Args:
    sources: see `folders`.
    fields: see `config_fields`.
    opened: vocabularies of the model, for ids missing from the stored files.
    is_pair: whether the model is an encoder-decoder; its decoder starts with
      the source's decoder start token (T5), otherwise with BOS.
    end_of_turn: end-of-turn id of a chat model; None for others.

  Returns:
    The content, and a note on omitted stored fields, '' for none.
  """
  ids = {**(_ids(opened.decoder) if opened else {}), **fields['decoder']}
  content = {key: ids[key] for key in config_json.TOKEN_IDS if key in ids}
  stored = _stored_json(sources, tensor_folder.GENERATION)
  content |= {k: stored[k] for k in stored if k not in (*_STAMPS, *_CACHES)}
  forced = special_ids(sources, opened)['forced']
  if content.get(vocabulary.FORCED) != forced:
    content[vocabulary.FORCED] = forced
  # Decoder-only sources lack this field.
  start = ids.get(t5_json.START, content.get('bos_token_id'))
  if is_pair and start is not None:
    content[t5_json.START] = start
  if end_of_turn is not None:
    # Added to EOS, which still ends plain text.
    ends = content.get('eos_token_id', [])
    ends = ends if isinstance(ends, list) else [ends]
    content['eos_token_id'] = [*dict.fromkeys([*ends, end_of_turn])]
  dropped = [
    f'{key} ({stored[key]!r})' for key in _CACHES if stored.get(key) is not None
  ]
  if not dropped:
    return content, ''
  return content, (
    f'{tensor_folder.GENERATION} is written without {", ".join(dropped)}:'
    ' transformers chooses caches by the class of the model.'
  )
