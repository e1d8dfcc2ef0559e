"""A model on disk, whoever wrote it: a run of ours or a Hugging Face folder."""

from collections.abc import Callable, Iterable, Iterator
import dataclasses
import os
from typing import Any

import jax
import numpy as np

from encdec_adapt import config as config_lib
from encdec_adapt.adaptation import coverage as coverage_lib
from encdec_adapt.checkpoints import manager, orbax_folder
from encdec_adapt.cli import errors
from encdec_adapt.files import atomic
from encdec_adapt.files import paths as paths_lib
from encdec_adapt.huggingface import folder, tensor_folder
from encdec_adapt.models import model_config, parameters
from encdec_adapt.tokenizers import vocabularies
from encdec_adapt.training import state as state_lib

OnProgress = Callable[[int, int], None]
WINDOWS = ('exclusive', 'inclusive')  # Rules of an encoder's local layers.
ENCODER = 'encoder'  # Folder of an encoder's own tokenizer in a folder.
_TOGETHER = 128 << 20  # Bytes of a checkpoint that are read at a time.


@dataclasses.dataclass(frozen=True)
class StoredModel:
  """A model whose parameters have not been read yet.

  Attributes:
    path: where it is.
    model: its config.
    vocabularies: of its sides; None where there are none beside it.
    arrays: every parameter, unread, in the order of the parameter table.
    read: a placement of that model -> its parameters, sharded, fp32. May be
      told whom to call with the bytes read and those to read.
    step: of the checkpoint; None for a Hugging Face folder.
    unused: tensors that are no part of the model -> why.
  """

  path: paths_lib.Path
  model: model_config.ModelConfig
  vocabularies: vocabularies.Choice | None
  arrays: Callable[[], Iterator[folder.LazyArray]]
  read: Callable[..., Any]
  step: int | None = None
  unused: dict[str, str] = dataclasses.field(default_factory=dict)

  @property
  def is_run(self) -> bool:
    """Whether it is a work directory, and no Hugging Face folder."""
    return self.step is not None


def open_model(
  path: str | os.PathLike[str],
  *,
  encoder_window: str | None = None,
  vocab_multiple: int | None = None,
) -> StoredModel:
  """Opens the work directory of a run, or a Hugging Face folder.

  Reads configs and headers only.

  Args:
    path: the folder.
    encoder_window: see `with_window`; None for the rule that is stored.
    vocab_multiple: to which the tables of a Hugging Face folder are padded,
      so that they divide over a mesh; None for not at all.

  Raises:
    UserError: it is neither, or damaged; or as `with_window`.
  """
  path = paths_lib.at(path)
  open_it = _open_folder if is_folder(path) else _open_run
  source = open_it(path, vocab_multiple)
  model = with_window(source.model, encoder_window, str(path))
  return dataclasses.replace(source, model=model)


def with_window(
  model: model_config.ModelConfig, encoder_window: str | None, name: str
) -> model_config.ModelConfig:
  """A model whose encoder's local layers look as far as asked for.

  Args:
    model: the model.
    encoder_window: 'exclusive', |q-k| < W (the authors of T5Gemma), or
      'inclusive', |q-k| <= W (transformers 5.23, eager); None for no change.
    name: what errors call the model.

  Raises:
    UserError: no such rule, or the model has no bidirectional encoder apart
      from its decoder's attention.
  """
  if encoder_window is None:
    return model
  if encoder_window not in WINDOWS:
    raise errors.UserError(
      f'encoder_window is {encoder_window!r}; it is one of'
      f' {", ".join(WINDOWS)}.'
    )
  is_pair = isinstance(model, model_config.EncoderDecoderConfig)
  if not is_pair or model.encoder.role != 'bidirectional':
    why = 'no encoder that looks both ways'
  elif model.decoder.cross_merged:
    why = 'merged attention, whose windows are those of T5Gemma 2'
  else:
    encoder = dataclasses.replace(model.encoder, window_rule=encoder_window)
    return dataclasses.replace(model, encoder=encoder)
  raise errors.UserError(
    f'encoder_window is {encoder_window!r}, and {name} has {why}; leave it out.'
  )


def _open_run(path: paths_lib.Path, vocab_multiple: int | None) -> StoredModel:
  """A work directory; its tables are as they are."""
  del vocab_multiple
  settings = config_lib.load_run(str(path))
  found = manager.open_latest(path)
  choice = settings.data.vocabularies
  opened = open_vocabularies(found, choice)

  def read(where: state_lib.Placement, on_progress: OnProgress | None = None):
    del on_progress  # Orbax reads all at once.
    return found.restore_params(where.abstract_params())

  return StoredModel(
    path,
    settings.model,
    choice if opened else None,
    lambda: _stored_arrays(found, settings.model),
    read,
    found.step,
  )


def open_vocabularies(
  found: manager.Checkpoint, choice: vocabularies.Choice
) -> vocabularies.Opened | None:
  """Opens the vocabularies of a run: those that it was trained with.

  Args:
    found: its checkpoint, which says what they were.
    choice: where its configuration has them.

  Returns:
    None where the checkpoint names none and none is there: the model came
    without a tokenizer.

  Raises:
    UserError: one is missing or another than it was: names the path and the
      remedy; or one is damaged.
  """
  described = found.read_meta()['vocabularies']
  if not described:
    return choice.open() if vocabularies.exists(choice.decoder) else None
  sides = 'decoder', 'encoder'
  for side in sides:
    path = choice.path(side)
    if not vocabularies.exists(path):
      raise errors.UserError(
        f'the vocabulary {path} of the {side}, which the checkpoint'
        f' {found.path} was trained with, is not there. '
        + _put_back(path, side, found)
      )
  opened = choice.open()
  for side in sides:
    one, wanted = opened.sides[side], described[side]['fingerprint']
    if one.fingerprint != wanted:
      raise errors.UserError(
        f'the vocabulary {one.path} of the {side} is not the one that the'
        f' checkpoint {found.path} was trained with: its fingerprint is'
        f' {one.fingerprint[:12]}, that of the checkpoint {wanted[:12]}. '
        + _put_back(choice.path(side), side, found)
      )
  return opened


def _put_back(path: str, side: str, found: manager.Checkpoint) -> str:
  """What to do where a run's vocabulary is not at its path."""
  key = 'encoder_vocabulary' if side == 'encoder' else 'vocabulary'
  remedy = (
    'Put the file back, or write where it is now in'
    f' {found.folder.parent / config_lib.RUN_CONFIG} (data.{key}).'
  )
  if paths_lib.is_bucket(path) or os.path.isabs(path):
    return remedy
  return f'The path is relative: run in the folder it starts from. {remedy}'


def vocabularies_of_pair(
  encoder: StoredModel, decoder: StoredModel
) -> vocabularies.Choice | None:
  """Vocabularies of an encoder-decoder that is made of two models.

  Args:
    encoder: the decoder-only model that the encoder comes from.
    decoder: the same of the decoder.

  Returns:
    The decoder's, and the encoder's where its ids mean other text; None where
    the decoder has none.

  Raises:
    UserError: a tokenizer is damaged.
  """
  own, theirs = decoder.vocabularies, encoder.vocabularies
  if own is None or theirs is None:
    return own
  if _mean_the_same(own.decoder, theirs.decoder):
    return own
  return dataclasses.replace(own, encoder=theirs.decoder)


def require_same_vocabularies(one: StoredModel, other: StoredModel) -> None:
  """Refuses two models of one shape whose ids mean other text.

  A model without a tokenizer beside it is taken at its shape.

  Raises:
    UserError: names the stack and both tokenizers; or one is damaged.
  """
  if one.vocabularies is None or other.vocabularies is None:
    return
  for side in one.model.stacks:
    paths = [source.vocabularies.path(side) for source in (one, other)]
    if not _mean_the_same(*paths):
      raise errors.UserError(
        f'the {side} of {one.path} has the tokenizer {paths[0]}, that of'
        f' {other.path} has {paths[1]}, and the same id means other text to'
        ' them: their average would mean neither. Give models of one'
        ' vocabulary.'
      )


def _mean_the_same(one: str, other: str) -> bool:
  """Whether ids mean the same text in the vocabularies at two paths."""
  if one == other:
    return True
  digests = {
    vocabularies.open_vocabulary(path).tokens_digest for path in (one, other)
  }
  return len(digests) == 1


def with_outside(
  report: coverage_lib.Coverage, encoder: StoredModel, decoder: StoredModel
) -> coverage_lib.Coverage:
  """The account of an adaptation, with what the sources' models leave out.

  Args:
    report: made of the models.
    encoder: source of the encoder.
    decoder: source of the decoder, maybe the same.
  """
  unused = {
    'encoder_source': encoder.unused,
    'decoder_source': decoder.unused,
  }
  outside = {name: unused[name] for name in report.sources if unused[name]}
  return dataclasses.replace(report, outside=outside)


def require_decoder_only(source: StoredModel) -> None:
  """Refuses what cannot be adapted.

  Raises:
    UserError: it is an encoder-decoder.
  """
  if not isinstance(source.model, model_config.DecoderOnlyConfig):
    raise errors.UserError(
      f'{source.path} is an encoder-decoder; adaptation starts from'
      ' decoder-only models.'
    )


def is_folder(path: str | os.PathLike[str]) -> bool:
  """Whether a Hugging Face folder is meant, not a work directory.

  Raises:
    UserError: it is neither.
  """
  file = paths_lib.at(path) / tensor_folder.CONFIG
  if not file.exists():
    is_flax = orbax_folder.is_orbax_folder(path)
    raise errors.UserError(
      f'{path} holds no model: it has no {tensor_folder.CONFIG}. '
      + (
        'It has arrays of Orbax: make a work directory of it with `convert'
        ' import`.'
        if is_flax
        else 'Give the work directory of a training job, or a Hugging Face'
        ' folder.'
      )
    )
  content = atomic.read_json(file)
  # A run's has sections, each of them an object.
  return 'model_type' in content or 'train' not in content


def _open_folder(
  path: paths_lib.Path, vocab_multiple: int | None
) -> StoredModel:
  opened = folder.ModelFolder.open(path, vocab_multiple=vocab_multiple)

  def read(where: state_lib.Placement, on_progress: OnProgress | None = None):
    return read_placed(opened.arrays(), where, on_progress)

  return StoredModel(
    path,
    opened.config,
    vocabularies_in(path),
    opened.arrays,
    read,
    unused=dict(opened.unused),
  )


def vocabularies_in(path: paths_lib.Path) -> vocabularies.Choice | None:
  """Those of a Hugging Face folder; an encoder's own are in a folder of it."""
  decoder = vocabularies.file_in(path)
  encoder = vocabularies.file_in(path / ENCODER)
  if decoder is None:
    return None
  return vocabularies.Choice(str(decoder), str(encoder) if encoder else '')


def read_placed(
  arrays: Iterable[folder.LazyArray],
  where: state_lib.Placement,
  on_progress: OnProgress | None = None,
) -> Any:
  """Reads parameters one after another to where they belong, fp32.

  Args:
    arrays: every parameter of the model.
    where: placement of that model.
    on_progress: called with the bytes read and those to read.

  Returns:
    The parameters, nested, sharded.
  """
  arrays = list(arrays)
  total, done = sum(array.nbytes for array in arrays), 0
  placed = {}
  for array in arrays:
    placed[array.path] = _place(array, where.parameters[array.path])
    done += array.nbytes
    if on_progress:
      on_progress(done, total)
  return state_lib.unflatten(placed)


def _place(
  array: folder.LazyArray, sharding: jax.sharding.Sharding
) -> jax.Array:
  """Reads what each device of this process holds, and no more, as fp32."""
  return jax.make_array_from_callback(
    array.shape,
    sharding,
    lambda index: np.asarray(array.read(index), np.float32),
  )


def _stored_arrays(
  found: manager.Checkpoint, model: model_config.ModelConfig
) -> Iterator[folder.LazyArray]:
  """The arrays of a checkpoint, read some at a time: opening takes longest."""
  stored = found.stored_leaves()
  abstract = {
    path: jax.ShapeDtypeStruct(
      info.shape, stored.get(f'params/{path}', (None, info.dtype))[1]
    )
    for path, info in parameters.parameter_table(model).items()
  }
  last: dict[str, np.ndarray] = {}

  def reader(path: str, group: list[str]):
    def read(index: tuple[slice, ...]) -> np.ndarray:
      if path not in last:
        last.clear()
        tree = state_lib.unflatten({name: abstract[name] for name in group})
        last.update(state_lib.flatten(found.restore_params(tree)))
      return np.asarray(last[path])[index]

    return read

  readers = {
    path: reader(path, group) for group in _groups(abstract) for path in group
  }
  for path, leaf in abstract.items():
    yield folder.LazyArray(
      path, tuple(leaf.shape), np.dtype(leaf.dtype), readers[path]
    )


def _groups(abstract: dict[str, jax.ShapeDtypeStruct]) -> list[list[str]]:
  """Paths in order, so many together as have `_TOGETHER` bytes."""
  groups, room = [[]], _TOGETHER
  for path in sorted(abstract):
    nbytes = abstract[path].size * abstract[path].dtype.itemsize
    if groups[-1] and nbytes > room:
      groups.append([])
      room = _TOGETHER
    groups[-1].append(path)
    room -= nbytes
  return groups
