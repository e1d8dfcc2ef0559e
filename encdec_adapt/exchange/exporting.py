"""`convert export` and `push`: a run -> a folder with a card -> the Hub.

Bad input is refused before anything is written, and the folder is written
atomically. Tensor names and layouts are in `huggingface`.
"""

from collections.abc import Mapping
import pathlib
import tempfile
from typing import Any

from absl import flags
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.checkpoints import manager, step_folders
from encdec_adapt.cli import command
from encdec_adapt.exchange import inspection, model_card, peft_exchange
from encdec_adapt.files import atomic, disk, hub, paths
from encdec_adapt.huggingface import (
  config_json,
  embedding_files,
  export,
  layer_norm_json,
  new_folder,
  tensor_folder,
  torch_export,
)
from encdec_adapt.huggingface import vision as vision_lib
from encdec_adapt.models import heads, model_config, parameters
from encdec_adapt.stored import (
  model_on_disk,
  pretrained_files,
  source_vocabularies,
  tokenizer_files,
)
from encdec_adapt.telemetry import progress
from encdec_adapt.tokenizers import chat_format, tokenizer_writer, vocabulary

_REWARD_NOTE = (
  'it is a reward model: its output scores the answer to a prompt, with the'
  ' token that ends it.'
)


def export_folder(values: flags.FlagValues, _: list[str]) -> int:
  """Runs `convert export`.

  Raises:
    UserError: the output exists, the model or a pretrained file is missing or
      damaged, or a tokenizer's ids differ from our vocabulary's.
  """
  command.require(values, 'checkpoint', 'output')
  new_folder.require_free(values.output)
  path, step = model_on_disk.resolve(values.checkpoint)
  while True:
    steps = step_folders.steps(path / manager.FOLDER)
    try:
      _export(values, model_on_disk.open_model(values.checkpoint))
      return 0
    except Exception:
      # A running job may have deleted the step (`checkpoint.keep`).
      deleted = {*steps} - {*step_folders.steps(path / manager.FOLDER)}
      if step is not None or not deleted:
        raise
    print(f'{path}: its job has deleted step {max(deleted)}; choosing again')


def _embedding(values: flags.FlagValues) -> heads.Embedding | None:
  if values.embedding:
    dimensions = tuple(values.dimensions or ())
    return heads.Embedding(values.embedding, dimensions=dimensions)
  if values.dimensions:
    raise errors.UserError(
      f'--dimensions is {values.dimensions} without --embedding; give both, or'
      ' leave it out.'
    )
  return None


def _export(
  values: flags.FlagValues, stored: model_on_disk.StoredModel
) -> None:
  if values.layout == 'peft':
    peft_exchange.export_adapters(values, stored)
    return
  side = stored.prompt_side
  head, stack = _embedding(values), stored.model.decoder
  embeds = head or stack.head.sizes(stack.width)
  if embeds:
    stored = model_on_disk.embedding_model(stored, head)
  native = _is_native(stored, values.layout)
  folders = pretrained_files.folders(stored.path)
  # Report damage first: the tokenizer below needs these files.
  pretrained_files.check(folders)
  opened = source_vocabularies.open_if_suitable(stored.vocabularies)
  vision, image_notes = _vision(values.vision, stored.model, folders, native)
  fields = pretrained_files.config_fields(folders, opened)
  generation, cache_note = pretrained_files.generation_config(
    folders,
    fields,
    opened,
    is_pair=stored.model.architecture.encodes_prompt,
    # A vocabulary may have a chat format unused by the model.
    end_of_turn=chat_format.end_of_turn(opened.decoder)
    if opened and stored.framing.chats
    else None,
  )
  arrays = stored.arrays()
  dtype = np.dtype(values.dtype) if values.dtype else None
  dtypes = {dtype or array.dtype for array in arrays.values()}
  name = ' and '.join(sorted(map(str, dtypes)))
  # Writes and compares the tokenizer in a scratch folder, so that a difference
  # is refused before any output exists.
  with tempfile.TemporaryDirectory() as scratch:
    tokenizers = pathlib.Path(scratch)
    notes = [
      _window_note(stored, native=native),
      *tokenizer_files.write(tokenizers, stored, opened, side),
      *image_notes,
      cache_note,
      f'it reads {stored.framing.describe()}.' if stored.framing else '',
      _REWARD_NOTE if stored.model.decoder.outputs == 1 else '',
    ]
    notes = list(filter(None, notes))
    for note in notes:
      print(f'note: {note}')
    print(f'tensors of {name}')
    # Notes go into the model card too, for users of the folder.
    # Relative names: a decoder's tokenizer may be in a subfolder.
    files = {name: tokenizers / name for name in paths.tree(tokenizers)}
    card = model_card.write(
      stored,
      native=native,
      dtype=name,
      notes=notes,
      tokenizers=files,
      languages=values.language,
      evaluation=values.evaluation,
    )
    if embeds:
      reader = opened and opened.sides[side]
      files |= _embedding_files(stored, arrays, files, reader)
    else:
      files[tensor_folder.GENERATION] = atomic.json_bytes(generation)
    export.write(
      values.output,
      stored.model,
      arrays,
      native=native,
      dtype=dtype,
      fields=fields,
      common_fields={**stored.framing.fields(), **_label_names(stored)},
      files={**files, model_on_disk.CARD: card.encode()},
      vision=vision,
      on_progress=progress.ByteProgress('written'),
    )
  print(f'{values.output}: {parameters.count(stored.model):,} parameters')


def _label_names(stored: model_on_disk.StoredModel) -> dict[str, Any]:
  """Returns the fields of config.json for the labels of a classifier."""
  if not isinstance(stored.model.decoder.head, heads.Labels):
    return {}
  words = {model_on_disk.WORDS: True} if stored.labels_words else {}
  return layer_norm_json.label_names(stored.labels) | words


def _embedding_files(
  stored: model_on_disk.StoredModel,
  arrays: Mapping[str, Any],
  files: Mapping[str, Any],
  reader: vocabulary.Vocabulary | None,
) -> dict[str, Any]:
  further = embedding_files.files(
    stored.model.decoder,
    arrays,
    stored.prompts,
    pretrained_files.prompt_room(stored),
  )
  name = tokenizer_writer.JSON
  if reader and name in files:
    content = pathlib.Path(files[name]).read_bytes()
    further[name] = embedding_files.framed(content, reader)
  return further


def push_folder(values: flags.FlagValues, operands: list[str]) -> int:
  """Runs `convert push`: prints files, sizes and the address of the upload.

  Raises:
    UserError: the folder is damaged or has no model; see also `hub.push`.
  """
  command.require(values, 'repo')
  stored = model_on_disk.open_model(operands[0])  # Checks file headers.
  inspection.require_exported(stored)
  sizes = {x: paths.size(stored.path / x) for x in paths.tree(stored.path)}
  total = {f'to {values.repo}': sum(sizes.values())}
  for name, size in {**sizes, **total}.items():
    print(f'{disk.format_bytes(size):>12} {name}')
  print(hub.push(stored.path, values.repo, public=values.public))
  return 0


def _is_native(stored: model_on_disk.StoredModel, layout: str) -> bool:
  """Returns whether to write the native layout; prints the choice.

  Raises:
    UserError: --layout=transformers, but transformers has no class for it.
  """
  if layout == 'encdec_adapt':
    return True
  try:
    config_json.raw_from_model(stored.model)
  except errors.UserError as error:
    if layout == 'transformers':
      raise
    code = 'transformers runs the code in it (trust_remote_code=True)'
    if problem := torch_export.problem(stored.model):
      code = f'no code for transformers comes with it: {problem}'
    print(
      f'{error} It is written in the layout of this project instead, which'
      f' encdec_adapt.load reads; {code}.'
    )
    return True
  print(f'transformers loads it as {inspection.transformers_class(stored)}.')
  return False


def _vision(
  folder: str | None,
  model: model_config.ModelConfig,
  folders: pretrained_files.Folders,
  native: bool,
) -> tuple[vision_lib.Vision | None, list[str]]:
  """Opens the vision part of a T5Gemma 2, if any.

  Returns:
    The part or None, and notes for users of images.

  Raises:
    UserError: the part does not fit the model.
  """
  # Only T5Gemma 2, the family with vision, has the token.
  if native or model.decoder.eoi_token is None:
    if folder:
      raise errors.UserError(
        f'--vision={folder} is for what transformers loads as T5Gemma 2; this'
        ' model has no part that reads images.'
      )
    return None, []
  part = pretrained_files.vision_part(folders, folder)
  if part is None:
    # No error: the text model is complete, only images are affected.
    return None, [
      'only the text part is written: transformers reports as missing, and'
      f' initialises at random, {", ".join(vision_lib.MISSING)}. `export'
      ' --vision=FOLDER` takes them from another model.'
    ]
  part.require_fits(model.prompt_reader)
  name = f'`{model_on_disk.title(folder)}`' if folder else 'the imported model'
  notes = [f'its vision part, {len(part.names)} tensors, is that of {name}.']
  if not part.processors:
    missing = ' and '.join(f'`{name}`' for name in vision_lib.PROCESSORS)
    notes.append(
      f'the vision part came without {missing}, which transformers needs to'
      ' read images: copy them from the model of the vision part.'
    )
  # The image ids of a Gemma 3, a possible source, are above the vocabulary of
  # T5Gemma 2.
  elif folder and not pretrained_files.reads_images(folders):
    notes.append(
      'the image processor came with the vision part, the tokenizer did not:'
      ' image_token in tokenizer_config.json must name the token of id'
      f' {part.image_token} (image_token_index).'
    )
  return part, notes


def _window_note(stored: model_on_disk.StoredModel, *, native: bool) -> str:
  model, encoder = stored.model, stored.model.stacks.get('encoder')
  # T5Gemma 2 (merged attention) has a fixed rule; T5Gemma's depends on the
  # implementation.
  if native or encoder is None or model.decoder.cross_merged:
    return ''
  window = encoder.window
  if window is None or 'local' not in encoder.pattern:
    return ''
  # In use only if inputs may be longer.
  if pretrained_files.stack_positions(stored)['encoder'] <= window:
    return ''
  effect = f'logits then differ for inputs of more than {window} tokens'
  if encoder.window_rule == 'inclusive':
    return (
      f'local layers of the encoder look at {window} tokens on either side, as'
      ' in transformers 5.23 with eager attention; the code of the authors,'
      ' older transformers and FlashAttention look at less than'
      f' {window}, {effect}. config.json has'
      f' {config_json.WINDOW} for encdec_adapt.'
    )
  return (
    f'local layers of the encoder look at less than {window} tokens on either'
    ' side, as those of the authors; transformers 5.23 with eager attention'
    f' looks at {window}, {effect}.'
  )
