"""`convert resize`: rows for new tokens -> a work directory at step 0.

The work directory is written atomically (`work_directory`).
"""

from collections.abc import Mapping
import dataclasses
import functools
import pathlib
import tempfile
import zlib

from absl import flags
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.cli import command
from encdec_adapt.files import lazy_array, paths
from encdec_adapt.huggingface import new_folder
from encdec_adapt.models import adapters, model_config
from encdec_adapt.stored import (
  model_on_disk,
  pretrained_files,
  tokenizer_files,
  work_directory,
)
from encdec_adapt.tokenizers import new_tokens, vocabulary_pair

_BLOCK = 1 << 14  # Rows to read at a time.


@dataclasses.dataclass(frozen=True)
class _NewRows:
  """New rows of a table.

  Attributes:
    copied: id of a new token -> id whose row it copies.
    drawn: ids whose rows are drawn.
    text_ids: ids of ordinary tokens with a row; drawn rows have their mean and
      deviation.
  """

  copied: Mapping[int, int]
  drawn: tuple[int, ...]
  text_ids: np.ndarray


def resize_model(values: flags.FlagValues, _: list[str]) -> int:
  """Runs `convert resize`.

  Raises:
    UserError: the output exists, the model is a run of adapters or has no
      tokenizer, a token exists, or there is nothing to add.
  """
  command.require(values, 'checkpoint', 'output')
  new_folder.require_free(values.output)
  stored = model_on_disk.open_model(
    values.checkpoint, vocab_multiple=values.vocab_multiple
  )
  opened = stored.open_vocabularies()
  if stored.adapters or opened is None:
    problem = (
      f'is a run of adapters ({adapters.LABEL}); merge them first (`convert'
      ' merge-lora`).'
    )
    raise errors.UserError(
      f'--checkpoint={stored.name} '
      + (problem if opened else 'has no tokenizer to add tokens to.')
    )
  tokens = new_tokens.read_file(values.tokens) if values.tokens else {}
  with tempfile.TemporaryDirectory() as scratch:
    folders = _write_tokenizers(pathlib.Path(scratch), stored, opened)
    added = {x: new_tokens.add(folders[x], tokens) for x in folders}
    choice = model_on_disk.vocabularies_in(paths.at(scratch))
    model, rows = _resized(stored.model, opened, choice.open(), added)
    arrays = stored.arrays()
    for path, new in rows.items():
      print(f'{path}: {len(new.drawn)} rows drawn, {len(new.copied)} copied')
      table_rows = model.stacks[path.split('/')[0]].table_rows
      seed = [values.seed, zlib.crc32(path.encode())]
      arrays[path] = _with_rows(arrays[path], table_rows, new, seed)
    contents = work_directory.Contents(
      model,
      {'command': 'resize', 'sources': [stored.name]},
      pretrained_files.folders(stored.path),
      choice,
      run=stored.run,
      framing=stored.framing,
      tokenizers=folders,
    )
    work_directory.write(values.output, contents, arrays, verb='read')
  return 0


def _write_tokenizers(
  folder: pathlib.Path,
  stored: model_on_disk.StoredModel,
  opened: vocabulary_pair.Opened,
) -> pretrained_files.Folders:
  """Writes the tokenizer files as an export does; returns folders by stack."""
  if opened.decoder.added:
    raise errors.UserError(
      f'{stored.name} has {len(opened.decoder.added)} sentinels that are in no'
      ' tokenizer file (config.data.add_sentinels); export it, and resize the'
      ' export.'
    )
  tokenizer_files.write(folder, stored, opened, stored.prompt_side)
  separate = folder / model_on_disk.DECODER_TOKENIZER
  if separate.is_dir():
    return {'encoder': folder, 'decoder': separate}
  return {'decoder': folder}


def _resized(
  model: model_config.ModelConfig,
  old: vocabulary_pair.Opened,
  new: vocabulary_pair.Opened,
  added: Mapping[str, Mapping[int, int | None]],
) -> tuple[model_config.ModelConfig, dict[str, _NewRows]]:
  """Returns the model with a row for each token, and path -> new rows.

  Args:
    model: the model.
    old: its vocabularies.
    new: those with the new tokens.
    added: by stack, see `new_tokens.add`; the encoder's may be the decoder's.

  Raises:
    UserError: there is no new row.
  """
  rows, stacks = {}, {}
  for side, stack in model.stacks.items():
    ids = added.get(side, added['decoder'])
    size = max(stack.vocab_size, new.sides[side].size)
    stacks[side] = dataclasses.replace(stack, vocab_size=size)
    copied = {i: source for i, source in ids.items() if source is not None}
    drawn = {*ids, *range(stack.vocab_size, size)} - copied.keys()
    text_ids = old.sides[side].text_ids
    text_ids = text_ids[text_ids < stack.vocab_size]
    entry = _NewRows(copied, tuple(sorted(drawn)), text_ids)
    if side == 'decoder' or not model.shared_table:
      rows[f'{side}/embedder/table'] = entry
    if stack.head.predicts_tokens and stack.head.module:
      rows[f'{side}/{stack.head.module}/table'] = entry
  if not any(x.copied or x.drawn for x in rows.values()):
    raise errors.UserError(
      'nothing to add: every token of the tokenizer has a row; give --tokens.'
    )
  return dataclasses.replace(model, **stacks), rows


def _with_rows(
  array: lazy_array.LazyArray, rows: int, new: _NewRows, seed: list[int]
) -> lazy_array.LazyArray:
  """Returns a table [V, D] with new rows, in its dtype, read in parts."""

  @functools.cache
  def values() -> dict[int, np.ndarray]:
    found = {i: array[source] for i, source in new.copied.items()}
    if new.drawn:
      mean, deviation = _moments(array, new.text_ids)
      normal = np.random.default_rng(seed).standard_normal(
        (len(new.drawn), *mean.shape)
      )
      drawn = mean + deviation * normal
      found |= zip(new.drawn, drawn.astype(array.dtype), strict=True)
    return found

  def read(index: tuple[slice, ...]) -> np.ndarray:
    start, stop, _ = index[0].indices(rows)
    old = array.read_part((slice(start, min(stop, len_old)), *index[1:]))
    part = np.zeros((stop - start, *old.shape[1:]), array.dtype)
    part[: len(old)] = old
    for i, row in values().items():
      if start <= i < stop:
        part[i - start] = row[index[1:]]
    return part

  len_old = array.shape[0]
  return dataclasses.replace(
    array, shape=(rows, *array.shape[1:]), read_part=read
  )


def _moments(
  array: lazy_array.LazyArray, ids: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """Returns mean and standard deviation [D] of rows, read block by block."""
  total = squares = np.zeros(array.shape[1:])
  for start in range(0, array.shape[0], _BLOCK):
    part = array.read_part((slice(start, start + _BLOCK), slice(None)))
    inside = ids[(ids >= start) & (ids < start + len(part))] - start
    part = part[inside].astype(np.float64)
    total, squares = total + part.sum(0), squares + (part**2).sum(0)
  mean = total / len(ids)
  return mean, np.sqrt(np.maximum(squares / len(ids) - mean**2, 0))
