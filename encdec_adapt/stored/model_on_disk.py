"""Opens models on disk: work directories of runs, Hugging Face folders.

Opening reads configs and headers; `StoredModel.read` reads the parameters.
Nothing here writes a file or builds an engine.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import hashlib
import os
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from encdec_adapt import config as config_lib
from encdec_adapt.adaptation import coverage as coverage_lib
from encdec_adapt.base import errors
from encdec_adapt.checkpoints import checksums, manager, orbax_folder
from encdec_adapt.cluster import distributed
from encdec_adapt.files import atomic, hub, lazy_array
from encdec_adapt.files import paths as paths_lib
from encdec_adapt.huggingface import (
  embedding_files,
  folder,
  tensor_folder,
  vision,
)
from encdec_adapt.models import adapters as adapters_lib
from encdec_adapt.models import heads, model_config, parameters
from encdec_adapt.objectives import embeddings, example_maker
from encdec_adapt.stored import (
  adapter_arrays,
  checkpoint_arrays,
  prompt_framing,
)
from encdec_adapt.tokenizers import vocabulary_pair
from encdec_adapt.training import state as state_lib
from encdec_adapt.training.metrics import held_out_metrics

WINDOWS = ('exclusive', 'inclusive')  # Rules of an encoder's local layers.
# Subfolder with the tokenizer of the decoder, if it is not the encoder's, which
# is at the top: there `AutoTokenizer` finds the one that prompts need.
DECODER_TOKENIZER = 'decoder_tokenizer'
# The tokenizer files of a folder.
TOKENIZERS = (
  *vocabulary_pair.FILES,
  *(f'{DECODER_TOKENIZER}/{name}' for name in vocabulary_pair.FILES),
)
CARD = 'README.md'
# Files of a model on the Hub besides its weights.
_FILES = (
  CARD,
  tensor_folder.CONFIG,
  tensor_folder.GENERATION,
  tensor_folder.INDEX,
  embedding_files.PROMPTS,
  embedding_files.MODULES,
  *vision.PROCESSORS,
  *TOKENIZERS,
)


@dataclasses.dataclass(frozen=True)
class StoredModel:
  """A model on disk with unread parameters.

  Attributes:
    path: the folder.
    model: config of the model.
    vocabularies: paths of its vocabularies; None if it has none.
    arrays: returns path -> parameter, unread, in the order of the parameter
      table.
    checkpoint: the checkpoint of a run, see `open_checkpoint`; None for a
      folder.
    unused: name of a stored tensor that the model does not use -> reason.
    objectives: objectives that a run was trained with; () for a folder.
    name: the path that it was opened by, such as RUN@STEP, or its address on
      the Hub with the commit.
    adapters: adapters that a run trained; None for other models. `arrays` are
      then those of the base with the adapters merged into them.
    base: the model that the adapters were trained over.
    trained: returns path -> parameter that the run trained, unread.
  """

  path: paths_lib.Path
  model: model_config.ModelConfig
  vocabularies: vocabulary_pair.Choice | None
  arrays: Callable[[], dict[str, lazy_array.LazyArray]]
  checkpoint: manager.Checkpoint | None = None
  unused: dict[str, str] = dataclasses.field(default_factory=dict)
  objectives: tuple[example_maker.Objective, ...] = ()
  name: str = ''
  adapters: adapters_lib.Adapters | None = None
  base: 'StoredModel | None' = None
  trained: Callable[[], dict[str, lazy_array.LazyArray]] = dict

  @property
  def step(self) -> int | None:
    """Step of the checkpoint; None for a folder."""
    return self.checkpoint.step if self.checkpoint else None

  @property
  def run(self) -> paths_lib.Path | None:
    """Work directory of a run; None for a folder."""
    return self.path if self.checkpoint else None

  @property
  def fingerprint(self) -> str:
    """Digest that changes with the configuration or the parameters.

    Of a run it covers the configuration and the checksums of the checkpoint;
    of a folder config.json, and sizes and times of the files of weights.
    """
    parts = [(self.path / tensor_folder.CONFIG).read_bytes()]
    if self.checkpoint:
      # Steps without a manifest are never opened.
      parts.append((self.checkpoint.path / checksums.FILE).read_bytes())
    else:
      # No digests: reading the weights of a large model takes minutes.
      patterns = (
        '*.safetensors',
        'tokenizer*',
        f'{DECODER_TOKENIZER}/tokenizer*',
      )
      files = {file for name in patterns for file in self.path.glob(name)}
      for file in sorted(files):
        parts.append(f'{file.name} {paths_lib.version(file)}'.encode())
    return hashlib.blake2b(b'\0'.join(parts), digest_size=8).hexdigest()

  @property
  def digest(self) -> str:
    """Digest of the parameters, the same for a copy in another place.

    Of a folder, the files are read once (`adapter_arrays.folder_digest`).
    """
    if self.checkpoint:
      return adapter_arrays.checkpoint_digest(self.checkpoint.path)
    return adapter_arrays.folder_digest(self.path)

  @property
  def full_name(self) -> str:
    """Name by which the same parameters are opened from any folder."""
    if hub.is_address(self.name):
      return self.name
    step = '' if self.step is None else f'@{self.step}'
    return f'{paths_lib.absolute(self.path)}{step}'

  def open_vocabularies(self) -> vocabulary_pair.Opened | None:
    """Opens the vocabularies; None if there are none."""
    return self.vocabularies.open() if self.vocabularies else None

  def require_vocabularies(self) -> vocabulary_pair.Opened:
    """Opens the vocabularies.

    Raises:
      UserError: there are none, or they have ids without a row in the model.
    """
    opened = self.open_vocabularies()
    if opened is None:
      raise errors.UserError(
        f'{self.path} has no tokenizer; put its tokenizer.model or'
        ' tokenizer.json into the folder of the weights.'
      )
    for side, stack in self.model.stacks.items():
      vocabulary_pair.check_size(opened.sides[side], stack.vocab_size, side)
    return opened

  @property
  def prompt_side(self) -> str:
    """Name of the stack that reads prompts, 'encoder' or 'decoder'."""
    return self.model.architecture.prompt_stack

  @property
  def framing_side(self) -> str:
    """Side that frames texts as that stack reads them; see `SideIds.edges`."""
    return self.model.architecture.framing_side

  @functools.cached_property
  def framing(self) -> prompt_framing.PromptFraming:
    """Text around the model's prompts.

    Raises:
      UserError: the config.json of a folder states it wrongly.
    """
    if not self.objectives:
      return prompt_framing.in_file(self.path / tensor_folder.CONFIG)
    return prompt_framing.of_objectives(
      self.objectives, self.model.architecture
    )

  @property
  def prompts(self) -> Mapping[str, str]:
    """Text before queries and documents of an embedding model, by role."""
    # Objectives of a run have rows of the same kind; a folder has none.
    options = self.objectives[0].options if self.objectives else {}
    prompts = embeddings.prompts(options)
    file = self.path / embedding_files.PROMPTS
    if file.exists():  # An exported folder.
      prompts |= atomic.read_json(file).get('prompts', {})
    return prompts

  def read(self, placement: state_lib.Placement) -> Any:
    """Reads the parameters: nested, sharded, in the dtype of the placement.

    Args:
      placement: placement of this model. Each process reads only the shards
        of its devices.
    """
    if self.checkpoint and not self.adapters:
      return self.checkpoint.restore_params(placement.abstract_params())
    dtype = placement.dtype or 'float32'
    return state_lib.unflatten(
      {
        path: place(array, placement.parameters[path], dtype)
        for path, array in self.arrays().items()
      }
    )


def place(
  array: lazy_array.LazyArray, sharding: jax.sharding.Sharding, dtype: Any
) -> jax.Array:
  """Reads an array; each process only the shards of its devices."""
  dtype = jnp.dtype(dtype)
  return jax.make_array_from_callback(
    array.shape,
    sharding,
    lambda index: np.asarray(array.read_part(index), dtype),
  )


def open_model(
  path: str | os.PathLike[str],
  *,
  encoder_window: str | None = None,
  vocab_multiple: int | None = None,
) -> StoredModel:
  """Opens the work directory of a run or a Hugging Face folder.

  Reads configs and headers only.

  Args:
    path: the folder, RUN@STEP or an address on the Hub, see `resolve`.
    encoder_window: see `with_window`; None for the stored rule.
    vocab_multiple: tables of a Hugging Face folder are padded to a multiple
      of this many rows, to divide over a mesh; None for no padding. A run's
      tables stay as they are.

  Raises:
    UserError: it is neither, it is damaged, it has no such step or no such
      window.
  """
  given = name = os.fspath(path)
  if hub.is_address(given):
    # Every process reads the commit that the first found.
    name = distributed.from_lead(lambda: hub.pinned(given), 'commit')
  path, step = resolve(name)
  if is_folder(path):
    if step is not None:
      raise errors.UserError(
        f'{name} names a step, but {path} is a Hugging Face folder, which has'
        f' none; give {path}, or the work directory of a run.'
      )
    source = folder.ModelFolder(path, vocab_multiple=vocab_multiple)
    choice, unused = vocabularies_in(path), dict(source.unused)
    if choice and hub.is_address(given):
      # No paths in the cache, which others do not have: a configuration that
      # names the vocabularies is saved.
      names = (choice.decoder, choice.encoder)
      names = (x.replace(str(path), given.rstrip('/')) for x in names)
      choice = vocabulary_pair.Choice(*names)
    stored = StoredModel(
      path, source.config, choice, source.arrays, unused=unused
    )
  else:
    stored = _open_run(path, step)
  model = with_window(stored.model, encoder_window, name)
  return dataclasses.replace(stored, model=model, name=name)


def embedding_model(
  stored: StoredModel, head: heads.Embedding | None = None
) -> StoredModel:
  """Returns an embedding model, or the one in another model, without reading.

  Args:
    stored: the model.
    head: head of the stack of another model that reads prompts; None for that
      of an embedding model.

  Raises:
    UserError: there is a head, and the model is an embedding model.
  """
  if head and isinstance(stored.model.decoder.head, heads.Embedding):
    raise errors.UserError(
      f'--embedding={head.pooling} is for a model without a head of embeddings,'
      f' and {stored.path} has one (config.model.head); leave it out.'
    )
  # The temperature is for training alone.
  head = head or dataclasses.replace(stored.model.decoder.head, temperature=0.0)
  return _view(stored, model_config.prompt_model(stored.model, head))


def view_for(
  stored: StoredModel, target: model_config.ModelConfig
) -> StoredModel:
  """Returns the part of a model that another starts from, without reading.

  Args:
    stored: the model.
    target: the model that starts from it, see `model_config.with_head_of`.

  Returns:
    The model itself if it has the head of the target and all of its stacks are
    used; else `arrays` are those of the part, without those of a new head.
  """
  model = model_config.with_head_of(stored.model, target)
  return stored if model == stored.model else _view(stored, model)


def _view(stored: StoredModel, model: model_config.ModelConfig) -> StoredModel:
  paths = parameters.paths_in(stored.model, model)

  def arrays() -> dict[str, lazy_array.LazyArray]:
    every = stored.arrays()
    return {path: every[source] for path, source in paths.items()}

  return dataclasses.replace(stored, model=model, arrays=arrays)


def read_or_draw(
  arrays: Mapping[str, lazy_array.LazyArray],
  placement: state_lib.Placement,
  rng: jax.Array,
) -> state_lib.Flat:
  """Reads stored parameters, in float32, and draws those of a new head.

  Args:
    arrays: path -> stored parameter.
    placement: placement of the model, or of its adapters, which are not drawn.
    rng: the key that `parameters.init` would get.
  """
  params, new = {}, []
  for path, sharding in placement.parameters.items():
    if path in arrays:
      params[path] = place(arrays[path], sharding, np.float32)
    elif path in placement.model.table:
      new.append(path)

  def draw(rng: jax.Array) -> state_lib.Flat:
    config = placement.model.config
    return {path: parameters.init_one(config, rng, path) for path in new}

  return params | placement.place(draw, rng)


def resolve(name: str | os.PathLike[str]) -> tuple[paths_lib.Path, int | None]:
  """Finds what the name of a model stands for.

  Args:
    name: a folder; RUN@STEP, the work directory of a run and a step of it; or
      hf://ORG/NAME[@REVISION], a model on the Hub, which is downloaded.

  Returns:
    The folder, and the step that is named, if one is.

  Raises:
    UserError: the Hub refuses or cannot be reached.
  """
  if hub.is_address(name):
    return _download(os.fspath(name)), None
  run, _, step = os.fspath(name).rpartition('@')
  # A folder may be called so itself.
  if run and step.isdecimal() and not paths_lib.at(name).exists():
    return paths_lib.at(run), int(step)
  return paths_lib.at(name), None


def _download(address: str) -> paths_lib.Path:
  folder = hub.fetch(address, _FILES)
  shards = {tensor_folder.SINGLE}
  if (folder / tensor_folder.INDEX).exists():
    shards = set(tensor_folder.read_index(folder).values())
  return hub.fetch(address, sorted(shards))


def title(name: str | os.PathLike[str]) -> str:
  """Returns the name of a model without its location, for cards and users."""
  if hub.is_address(name):
    return hub.repository(os.fspath(name))
  # A relative path such as '.' has no name.
  return pathlib.PurePath(name).name or paths_lib.absolute(name).name


def _open_run(path: paths_lib.Path, step: int | None) -> StoredModel:
  settings = config_lib.load_run(str(path))
  checkpoint = open_checkpoint(path, settings, step)
  choice = settings.data.vocabularies
  opened = open_vocabularies(checkpoint, choice)
  adapters = settings.adapters
  table = parameters.parameter_table(settings.model)
  if adapters:
    table = adapters.table
  # Called late: callers that need the config only never open the arrays.
  trained = functools.partial(checkpoint_arrays.open_arrays, checkpoint, table)
  stored = StoredModel(
    path,
    settings.model,
    choice if opened else None,
    trained,
    checkpoint,
    objectives=settings.data.objectives,
  )
  if not adapters:
    return stored
  described = checkpoint.read_meta()['base']
  base = open_base(described, settings.init.encoder, settings.model)
  return dataclasses.replace(
    stored,
    arrays=lambda: adapter_arrays.merged(adapters, base.arrays(), trained()),
    adapters=adapters,
    base=base,
    trained=trained,
  )


def open_base(
  described: Mapping[str, str], moved: str, target: model_config.ModelConfig
) -> StoredModel:
  """Opens the base of adapters, or the part of it that they adapt.

  Args:
    described: its name and digest in the metadata of a checkpoint.
    moved: name of a copy of the base, or of adapters over it, which is opened
      if the first name has no such model; '' for none.
    target: the model with the adapters, see `view_for`.

  Raises:
    UserError: none of the two is the base; says why.
  """
  problems = []
  for name in dict.fromkeys(filter(None, (described['name'], moved))):
    try:
      model = open_model(name, vocab_multiple=target.decoder.vocab_multiple)
    except errors.UserError as error:
      problems.append(f'{name} cannot be opened ({error})')
      continue
    # Adapters that are trained further start from a run of adapters.
    base = model.base or model
    if base.digest.startswith(described['digest']):
      return view_for(base, target)
    problems.append(f'{name} is another model now')
  raise errors.UserError(
    f'the base of adapters is not found: {"; ".join(problems)}. Put'
    f' {described["name"]} back, or name a copy of it by init.encoder: in the'
    ' config.json of their run, or among the flags that resume it.'
  )


def open_checkpoint(
  path: str | os.PathLike[str],
  settings: config_lib.Settings,
  step: int | None = None,
) -> manager.Checkpoint:
  """Opens the checkpoint by which a run is used; prints its step and loss.

  Args:
    path: work directory of the run.
    settings: configuration of the run. With `checkpoint.keep_best` the
      undamaged checkpoint with the lowest held-out loss is opened, otherwise
      the newest.
    step: the step to open instead.

  Raises:
    UserError: there is no undamaged checkpoint, or not that step.
  """
  if step is not None:
    checkpoint = manager.open_step(path, step)
  elif settings.checkpoint.keep_best:
    checkpoint = manager.open_best(path)
  else:
    checkpoint = manager.open_latest(path)
  if distributed.is_lead():
    rank, text = checkpoint.read_loss(), ''
    if rank is not None:
      # Checkpoints store ranks, of which lower is better; `rank` applied twice
      # is the value.
      metrics = settings.recipe.metrics
      value = held_out_metrics.rank(metrics, rank)
      text = f', {held_out_metrics.describe(metrics, value)}'
    _report_step(f'{path}: step {checkpoint.step}{text}')
  return checkpoint


@functools.cache  # A job may open a run as its source and as its teacher.
def _report_step(line: str) -> None:
  # On standard error: the standard output of commands has their results.
  print(line, file=sys.stderr)


def with_window(
  model: model_config.ModelConfig, encoder_window: str | None, name: str
) -> model_config.ModelConfig:
  """Sets the window rule of the local layers of an encoder.

  Args:
    model: the model.
    encoder_window: 'exclusive', |q-k| < W (the authors of T5Gemma), or
      'inclusive', |q-k| <= W (transformers 5.23, eager); None for no change.
    name: name of the model in errors.

  Raises:
    UserError: no such rule, or the model has no bidirectional encoder apart
      from its decoder's attention.
  """
  if encoder_window is None:
    return model
  if encoder_window not in WINDOWS:
    raise errors.UserError(
      f'encoder_window is {encoder_window!r}; it must be one of'
      f' {", ".join(WINDOWS)}.'
    )
  # An option without an effect is refused: scores would seem to be of a rule
  # that the model does not have.
  encoder = model.stacks.get('encoder')
  if encoder is None or encoder.role != 'bidirectional':
    why = 'no bidirectional encoder'
  elif model.decoder.cross_merged:
    why = 'merged attention, whose windows are those of T5Gemma 2'
  else:
    encoder = dataclasses.replace(encoder, window_rule=encoder_window)
    return dataclasses.replace(model, encoder=encoder)
  raise errors.UserError(
    f'encoder_window is {encoder_window!r}, and {name} has {why}; leave it out.'
  )


def open_vocabularies(
  checkpoint: manager.Checkpoint, choice: vocabulary_pair.Choice
) -> vocabulary_pair.Opened | None:
  """Opens the vocabularies that a run was trained with.

  Args:
    checkpoint: checkpoint of the run; its metadata describes them.
    choice: paths of the vocabularies in the run's configuration.

  Returns:
    None where the checkpoint describes none and there is none.

  Raises:
    UserError: a vocabulary is missing, changed or damaged; names its path.
  """
  described = checkpoint.read_meta()['vocabularies']
  if not described:
    # An import without a tokenizer; a user may have set a path since.
    return choice.open() if vocabulary_pair.exists(choice.decoder) else None
  sides = ('decoder', 'encoder')
  wrong = [s for s in sides if not vocabulary_pair.exists(choice.path(s))]
  if not wrong:
    opened = choice.open()
    # Fingerprints and not paths: a run may have been moved, and a file with the
    # right path may have been trained again.
    wrong = [
      side
      for side in sides
      if opened.sides[side].fingerprint != described[side]['fingerprint']
    ]
  if wrong:
    key = 'encoder_vocabulary' if wrong[0] == 'encoder' else 'vocabulary'
    raise errors.UserError(
      f'the vocabulary {choice.path(wrong[0])} of the {wrong[0]} is missing, or'
      f' is not the one that the checkpoint {checkpoint.path} was trained with.'
      ' Put the file back, or write its new path in'
      f' {checkpoint.folder.parent / config_lib.RUN_CONFIG} (data.{key}).'
    )
  return opened


def with_outside(
  coverage: coverage_lib.Coverage, encoder: StoredModel, decoder: StoredModel
) -> coverage_lib.Coverage:
  """Adds the sources' tensors outside the model to a coverage report.

  Args:
    coverage: report of the adaptation.
    encoder: source of the encoder.
    decoder: source of the decoder; may be the same.
  """
  unused = {'encoder_source': encoder.unused, 'decoder_source': decoder.unused}
  outside = {name: unused[name] for name in coverage.sources if unused[name]}
  return dataclasses.replace(coverage, outside=outside)


def require_decoder_only(source: StoredModel) -> None:
  """Checks the source of an adaptation.

  Raises:
    UserError: it is not a decoder-only model.
  """
  if source.model.architecture.has_encoder:
    raise errors.UserError(
      f'{source.path} is a model of kind {source.model.architecture.name};'
      ' adaptation starts from decoder-only models.'
    )


def require_head(stored: StoredModel) -> None:
  """Checks a model that is to be used as it is.

  Raises:
    UserError: it is a folder of `sentence_transformers`, of which only the
      stack is read.
  """
  # Its own head of embeddings would be read.
  has_head = stored.checkpoint or not stored.model.decoder.head.predicts_tokens
  if not has_head and (stored.path / embedding_files.MODULES).exists():
    raise errors.UserError(
      f'{stored.path} has the {embedding_files.MODULES} of'
      ' sentence_transformers: such folders are written only, and pooling and'
      ' projections are not read. Give the run that it was exported from, or'
      ' train from its stack (config.init.encoder).'
    )


def is_folder(path: str | os.PathLike[str]) -> bool:
  """Returns whether a path is a Hugging Face folder, not a work directory.

  Raises:
    UserError: it is neither.
  """
  path = paths_lib.at(path)
  file = path / tensor_folder.CONFIG
  if not file.exists():
    remedy = 'Give the work directory of a run, or a Hugging Face folder.'
    if path.name.isdecimal() and path.parent.name == manager.FOLDER:
      run = path.parent.parent
      remedy = f'It is a step of a run: give {run}@{path.name}.'
    elif path.name == manager.FOLDER:
      remedy = f'It has the steps of a run: give {path.parent}, or'
      remedy += f' {path.parent}@STEP.'
    elif orbax_folder.is_orbax_folder(path):
      remedy = 'Convert its Orbax arrays by `convert import` first.'
    raise errors.UserError(
      f'{path} holds no model: it has no {tensor_folder.CONFIG}. {remedy}'
    )
  content = atomic.read_json(file)
  # The configuration of a run has sections. Any other file passes for that of a
  # folder: its reader names the supported model types.
  return 'model_type' in content or 'train' not in content


def vocabularies_in(path: paths_lib.Path) -> vocabulary_pair.Choice | None:
  """Finds the tokenizers of a model folder; see `DECODER_TOKENIZER`."""
  top = vocabulary_pair.file_in(path)
  if not (path / DECODER_TOKENIZER).is_dir():
    return vocabulary_pair.Choice(str(top)) if top else None
  decoder = vocabulary_pair.file_in(path / DECODER_TOKENIZER)
  # The tokenizer of one side by itself encodes nothing for the other.
  if top is None or decoder is None:
    return None
  return vocabulary_pair.Choice(str(decoder), str(top))
