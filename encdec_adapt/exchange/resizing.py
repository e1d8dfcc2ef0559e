"""`convert resize`: rows for new tokens -> a work directory at step 0.

The work directory is written atomically (`work_directory`).
"""

from collections.abc import Mapping
import dataclasses
import pathlib
import tempfile
import zlib

from absl import flags
import numpy as np

from encdec_adapt.adaptation import coverage as coverage_lib
from encdec_adapt.base import errors
from encdec_adapt.cli import command
from encdec_adapt.files import lazy_array, paths
from encdec_adapt.huggingface import new_folder
from encdec_adapt.models import model_config
from encdec_adapt.stored import (
  model_on_disk,
  pretrained_files,
  tokenizer_files,
  work_directory,
)
from encdec_adapt.tokenizers import new_tokens, vocabulary_pair


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
  model_on_disk.require_head(stored)
  if stored.adapters:
    raise errors.UserError(
      f'--checkpoint={stored.name} is a run of adapters; merge them first'
      ' (`convert merge-lora`).'
    )
  opened = stored.open_vocabularies()
  if opened is None:
    raise errors.UserError(
      f'--checkpoint={stored.name} has no tokenizer to add tokens to; put its'
      ' tokenizer.model or tokenizer.json into the folder of the weights.'
    )
  for line in coverage_lib.by_reason(stored.unused):
    print(f'unused: {line}')
  tokens = new_tokens.read_file(values.tokens) if values.tokens else {}
  with tempfile.TemporaryDirectory() as scratch:
    folders = _write_tokenizers(pathlib.Path(scratch), stored, opened)
    added = {
      side: new_tokens.add(folder, tokens, stored.model.stacks[side].vocab_size)
      for side, folder in folders.items()
    }
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
      {
        'command': 'resize',
        'sources': [stored.name],
        'unused': stored.unused,
      },
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
    old: vocabularies of the model.
    new: the same vocabularies with the new tokens.
    added: stack -> result of `new_tokens.add`; without the encoder if both
      stacks have one vocabulary.

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
    tables = ['embedder/table']
    tables += ['layer_inputs/table'] if stack.layer_input_width else []
    if stack.head.predicts_tokens and stack.head.bias:
      bias = f'{side}/{stack.head.bias}/logits_bias'
      fixed = dataclasses.replace(entry, drawn=())  # New rows are 0.
      rows[bias] = fixed if stack.head.fixed_bias else entry
    for table in tables:
      if side == 'decoder' or table not in model.shared_parts:
        rows[f'{side}/{table}'] = entry
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
  """Returns a table [V, ..] with new rows, in its dtype; the others pad it."""

  def make() -> np.ndarray:
    old = np.asarray(array)
    table = np.zeros((rows, *old.shape[1:]), old.dtype)
    table[: len(old)] = old
    for i, source in new.copied.items():
      table[i] = old[source]
    if new.drawn:
      text = old[new.text_ids].astype(np.float32)
      mean, deviation = text.mean(0, np.float64), text.std(0, np.float64)
      draws = np.random.default_rng(seed).standard_normal(
        (len(new.drawn), *mean.shape)
      )
      table[[*new.drawn]] = mean + deviation * draws
    return table

  shape = rows, *array.shape[1:]
  return lazy_array.LazyArray.in_full(shape, array.dtype, make)
