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
  weights,
)
from encdec_adapt.models import adapters as adapters_lib
from encdec_adapt.models import heads, model_config, parameters
from encdec_adapt.objectives import embeddings, example_maker, labelled
from encdec_adapt.stored import (
  adapter_arrays,
  checkpoint_arrays,
  prompt_framing,
)
from encdec_adapt.tokenizers import vocabulary_pair
from encdec_adapt.training import state as state_lib
from encdec_adapt.training.metrics import held_out_metrics

WINDOWS = ('exclusive', 'inclusive')  # Rules of an encoder's local layers.
# Subfolder of the decoder's tokenizer, if it differs from the encoder's. The
# encoder's is at the top, where `AutoTokenizer` finds it for prompts.
DECODER_TOKENIZER = 'decoder_tokenizer'
# The tokenizer files of a folder.
TOKENIZERS = (
  *vocabulary_pair.FILES,
  *(f'{DECODER_TOKENIZER}/{name}' for name in vocabulary_pair.FILES),
)
CARD = 'README.md'
WORDS = 'labels_words'  # Field of config.json.
# Files to download from the Hub besides the weights.
_FILES = (
  CARD,
  tensor_folder.CONFIG,
  tensor_folder.GENERATION,
  tensor_folder.INDEX,
  embedding_files.PROMPTS,
  embedding_files.MODULES,
  embedding_files.POOLING,
  embedding_files.TRANSFORMER,
  *vision.PROCESSORS,
  *TOKENIZERS,
)


@dataclasses.dataclass(frozen=True)
class StoredModel:
  """A model on disk; parameters are read lazily.

  Attributes:
    path: the folder.
    model: config of the model.
    vocabularies: paths of its vocabularies; None if it has none.
    arrays: returns path -> lazy parameter, in the order of the parameter table.
    checkpoint: the checkpoint of a run, see `open_checkpoint`; None for a
      folder.
    unused: name of an unused stored tensor -> reason.
    objectives: training objectives of a run; () for a folder.
    name: the path it was opened with, such as RUN@STEP, or its address on the
      Hub with the commit.
    adapters: adapters trained by a run, merged into the base by `arrays`; None
      for other models.
    base: the base model of the adapters.
    trained: returns path -> lazy parameter, of the trained parameters only.
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

    Hashes config.json and the checkpoint's checksum manifest of a run, or sizes
    and times of a folder's weight and tokenizer files.
    """
    parts = [(self.path / tensor_folder.CONFIG).read_bytes()]
    if self.checkpoint:
      # Always exists: steps without a manifest are refused.
      parts.append((self.checkpoint.path / checksums.FILE).read_bytes())
    else:
      # Hashing the weights of a large model would take minutes.
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
    """Digest of the parameters, equal for copies.

    Reads the files of a folder once (`adapter_arrays.folder_digest`).
    """
    if self.checkpoint:
      return adapter_arrays.checkpoint_digest(self.checkpoint.path)
    return adapter_arrays.folder_digest(self.path)

  @property
  def full_name(self) -> str:
    """Absolute name with the step, valid from any working directory."""
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
      UserError: there are none, or they are larger than the model's tables.
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
  def labels(self) -> tuple[str, ...]:
    """Names of a classifier's labels, in the order of its outputs.

    Raises:
      UserError: the model is no classifier.
    """
    head = self.model.decoder.head
    if not isinstance(head, heads.Labels):
      raise errors.UserError(
        f'{self.path} is no classifier, its head is of kind {head.kind}; make'
        ' one with configs/classification.py.'
      )
    if self.objectives:
      return self.objectives[0].options['labels']
    return labels_in(self.path, head.labels)

  @property
  def labels_words(self) -> bool:
    """Whether a classifier labels words (the objective `tag`), not texts."""
    if self.objectives:
      return any(issubclass(x.maker, labelled.Tag) for x in self.objectives)
    return labels_words_in(self.path)

  @property
  def prompt_side(self) -> str:
    """The stack that reads prompts, 'encoder' or 'decoder'."""
    return self.model.architecture.prompt_stack

  @property
  def framing_side(self) -> str:
    """The side to frame prompts for; see `SideIds.edges`."""
    return self.model.architecture.framing_side

  @functools.cached_property
  def framing(self) -> prompt_framing.PromptFraming:
    """Text around the model's prompts.

    Raises:
      UserError: the config.json of a folder is invalid.
    """
    if not self.objectives:
      return prompt_framing.in_file(self.path / tensor_folder.CONFIG)
    return prompt_framing.of_objectives(
      self.objectives, self.model.architecture
    )

  @property
  def prompts(self) -> Mapping[str, str]:
    """Text before queries and documents of an embedding model, by role."""
    # All objectives of a run have the same kind of rows; a folder has none.
    options = self.objectives[0].options if self.objectives else {}
    prompts = embeddings.prompts(options)
    file = self.path / embedding_files.PROMPTS
    if file.exists():  # An exported folder.
      prompts |= atomic.read_json(file).get('prompts', {})
    return prompts

  def read(self, placement: state_lib.Placement) -> Any:
    """Reads the parameters: nested, sharded, in the dtype of the placement.

    Args:
      placement: placement of this model. Each process reads only the shards of
        its local devices.
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
  """Reads an array; each process reads only its local shards."""
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

  Reads configs and headers only. All processes of a job call it together.

  Args:
    path: the folder, RUN@STEP or an address on the Hub, see `resolve`.
    encoder_window: see `with_window`; None for the stored rule.
    vocab_multiple: multiple to pad the table rows of a Hugging Face folder to,
      so that they divide over a mesh; None for no padding. The tables of runs
      are never padded here.

  Raises:
    UserError: the path is neither, or the model is damaged or has no such step
      or window; or the processes of the job find different kinds of models, or
      local folders whose sampled weights differ.
  """
  given = name = os.fspath(path)
  if hub.is_address(given):
    # All processes read the commit resolved by process 0.
    name = distributed.from_lead(lambda: hub.pinned(given), 'commit')
  settings = problem = None
  kind = 'a Hugging Face folder'
  try:
    path, step = resolve(name)
    if is_folder(path):
      processes, _ = distributed.count_and_index()
      # All processes read the same objects of a bucket and the same commit of
      # the Hub.
      shared = hub.is_address(given) or paths_lib.is_bucket(path)
      if processes > 1 and not shared:
        kind += f' with weights {_sample_digest(path)}'
    else:
      settings = config_lib.load_run(str(path))
      kind = 'a run of adapters' if settings.adapters else 'a run'
  except errors.UserError as error:
    kind, problem = 'no model', error
  # Processes may read different disks, and agree on the step of a run, and on
  # the base of adapters.
  distributed.require_same('model', {name: kind})
  if problem:
    raise problem
  if settings is None:
    if step is not None:
      raise errors.UserError(
        f'{name} names a step, but {path} is a Hugging Face folder, which has'
        f' none; give {path}, or the work directory of a run.'
      )
    source = folder.ModelFolder(path, vocab_multiple=vocab_multiple)
    choice, unused = vocabularies_in(path), dict(source.unused)
    if choice and hub.is_address(given):
      # No paths in the local cache: the configuration with these names is
      # saved, and must be valid on other machines.
      names = (choice.decoder, choice.encoder)
      names = (x.replace(str(path), given.rstrip('/')) for x in names)
      choice = vocabulary_pair.Choice(*names)
    stored = StoredModel(
      path, source.config, choice, source.arrays, unused=unused
    )
    # Our own config.json of an embedding model has its head.
    plain = stored.model.decoder.head.predicts_tokens
    head = embedding_files.read_head(path) if plain else None
    if head and stored.model.architecture.is_encoder:
      stored = embedding_model(stored, head)
  else:
    stored = _open_run(path, step, settings)
  model = with_window(stored.model, encoder_window, name)
  return dataclasses.replace(stored, model=model, name=name)


def _sample_digest(path: paths_lib.Path) -> str:
  try:
    return adapter_arrays.sample_digest(path)
  except OSError as error:  # All processes hear of it.
    raise errors.UserError(f'{path}: {error}; mend the file.') from error


def embedding_model(
  stored: StoredModel, head: heads.Embedding | None = None
) -> StoredModel:
  """Returns a view of a model as an embedding model, without reading it.

  Args:
    stored: the model.
    head: see `model_config.embedding_model`.

  Raises:
    UserError: a head is given for an embedding model.
  """
  return _view(stored, model_config.embedding_model(stored.model, head))


def labels_words_in(folder: paths_lib.Path) -> bool:
  """Returns whether the config.json of a folder is of a labeller of words."""
  return atomic.read_json(folder / tensor_folder.CONFIG).get(WORDS, False)


def labels_in(folder: paths_lib.Path | None, count: int) -> tuple[str, ...]:
  """Returns the names of `count` labels in the config.json of a folder."""
  raw = atomic.read_json(folder / tensor_folder.CONFIG) if folder else {}
  names = raw.get('id2label') or {}
  return tuple(names.get(str(i), f'LABEL_{i}') for i in range(count))


def view_for(
  stored: StoredModel, target: model_config.ModelConfig
) -> StoredModel:
  """Returns a view of the part used to initialize another model.

  Reads no arrays.

  Args:
    stored: the source model.
    target: the model to initialize, see `model_config.with_head_of`.

  Returns:
    The model itself if its head matches and all stacks are used; otherwise a
    view with the `arrays` of the part, without a new head.
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
  """Reads stored parameters in float32, and initializes a new head.

  Args:
    arrays: path -> stored parameter.
    placement: placement of the model, or of its adapters, which are not
      initialized here.
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
  """Resolves a model name to a folder and a step; downloads from the Hub.

  Args:
    name: a folder; RUN@STEP, the work directory of a run and a step;
      or hf://ORG/NAME[@REVISION], a model on the Hub.

  Returns:
    The folder, and the step or None.

  Raises:
    UserError: the Hub refuses or cannot be reached.
  """
  if hub.is_address(name):
    return _download(os.fspath(name)), None
  run, _, step = os.fspath(name).rpartition('@')
  # The name of a folder may itself contain '@'.
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
  """Returns the name of a model without its location, for model cards."""
  if hub.is_address(name):
    return hub.repository(os.fspath(name))
  # A relative path such as '.' has no name.
  return pathlib.PurePath(name).name or paths_lib.absolute(name).name


def _open_run(
  path: paths_lib.Path, step: int | None, settings: config_lib.Settings
) -> StoredModel:
  checkpoint = open_checkpoint(path, settings, step)
  choice = settings.data.vocabularies
  opened = open_vocabularies(checkpoint, choice)
  adapters = settings.adapters
  table = parameters.parameter_table(settings.model)
  if adapters:
    table = adapters.table
  # Lazy: callers that need only the config never open the arrays.
  trained = functools.partial(
    checkpoint_arrays.open_arrays,
    checkpoint,
    table,
    groups=weights.joined(settings.model),
  )
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
  """Opens the base of adapters, or the adapted part of it.

  Args:
    described: name and digest of the base in a checkpoint's metadata.
    moved: fallback name: a copy of the base, or adapters over it; '' for none.
    target: the model with the adapters, see `view_for`.

  Raises:
    UserError: neither is the base; says why.
  """
  problems = []
  for name in dict.fromkeys(filter(None, (described['name'], moved))):
    try:
      model = open_model(name, vocab_multiple=target.decoder.vocab_multiple)
    except errors.UserError as error:
      problems.append(f'{name} cannot be opened ({error})')
      continue
    # The name may be a run of adapters, to train them further.
    base = model.base or model
    digest = base.digest
    # All processes take the next name, or none does.
    distributed.require_same('base', {name: digest})
    if digest.startswith(described['digest']):
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
  """Opens the best or newest checkpoint of a run; prints its step and loss.

  Args:
    path: work directory of the run.
    settings: configuration of the run. `checkpoint.keep_best` selects the
      undamaged checkpoint with the lowest held-out loss instead of the newest.
    step: the step to open instead.

  Raises:
    UserError: there is no undamaged checkpoint, or no such step.
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
      # Checkpoints store ranks (lower is better); `rank` is its own inverse.
      metrics = settings.recipe.metrics
      value = held_out_metrics.rank(metrics, rank)
      text = f', {held_out_metrics.describe(metrics, value)}'
    _report_step(f'{path}: step {checkpoint.step}{text}')
  return checkpoint


@functools.cache  # A run may be both source and teacher of a job.
def _report_step(line: str) -> None:
  # Standard output is for the results of commands.
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
    UserError: no such rule, or the model has no separate bidirectional encoder.
  """
  if encoder_window is None:
    return model
  if encoder_window not in WINDOWS:
    raise errors.UserError(
      f'encoder_window is {encoder_window!r}; it must be one of'
      f' {", ".join(WINDOWS)}.'
    )
  # Refuse an option without effect: scores would be attributed to it.
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
  """Opens the vocabularies of a run.

  Args:
    checkpoint: checkpoint of the run; its metadata has their fingerprints.
    choice: paths of the vocabularies in the run's configuration.

  Returns:
    None if the run has no vocabulary.

  Raises:
    UserError: a vocabulary is missing, changed or damaged; names its path.
  """
  described = checkpoint.read_meta()['vocabularies']
  if not described:
    # Imported without a tokenizer; a user may have added a path later.
    return choice.open() if vocabulary_pair.exists(choice.decoder) else None
  sides = ('decoder', 'encoder')
  wrong = [s for s in sides if not vocabulary_pair.exists(choice.path(s))]
  if not wrong:
    opened = choice.open()
    # Compare fingerprints, not paths: a run may have been moved, and a file may
    # have been retrained in place.
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


def require_sources(encoder: StoredModel, decoder: StoredModel) -> None:
  """Checks that a pair can be made of two models.

  Args:
    encoder: source of the encoder, a decoder or an encoder-only model.
    decoder: source of the decoder; may be the same.

  Raises:
    UserError: one has two stacks, or the second is encoder-only.
  """
  for source, side in ((encoder, 'encoder'), (decoder, 'decoder')):
    architecture = source.model.architecture
    if architecture.encodes_prompt or (
      side == 'decoder' and architecture.has_encoder
    ):
      raise errors.UserError(
        f'{source.path} is a model of kind {architecture.name}; the {side} of a'
        ' pair is made of a decoder-only model'
        + (' or an encoder-only one.' if side == 'encoder' else '.')
      )


def require_head(stored: StoredModel) -> None:
  """Checks that a model was read with its head.

  Raises:
    UserError: it is a `sentence_transformers` folder that is read without its
      head (`embedding_files.read_head`).
  """
  has_head = stored.checkpoint or not stored.model.decoder.head.predicts_tokens
  if not has_head and (stored.path / embedding_files.MODULES).exists():
    raise errors.UserError(
      f'{stored.path} has the {embedding_files.MODULES} of'
      ' sentence_transformers: of such folders only encoders with a pooling and'
      ' without projections are read. Give the run that it was exported from,'
      ' or train from its stack (config.init.encoder).'
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
  # A run's configuration has sections. Take any other file for a folder's: its
  # reader lists the supported model types.
  return 'model_type' in content or 'train' not in content


def vocabularies_in(path: paths_lib.Path) -> vocabulary_pair.Choice | None:
  """Finds the tokenizers of a model folder; see `DECODER_TOKENIZER`."""
  top = vocabulary_pair.file_in(path)
  if not (path / DECODER_TOKENIZER).is_dir():
    return vocabulary_pair.Choice(str(top)) if top else None
  decoder = vocabulary_pair.file_in(path / DECODER_TOKENIZER)
  # A pair needs the tokenizers of both sides.
  if top is None or decoder is None:
    return None
  return vocabulary_pair.Choice(str(decoder), str(top))
