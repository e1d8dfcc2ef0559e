"""Assembles the configuration: ConfigDict in, validated settings out.

Every key is defined once, as a field of its section's frozen dataclass, next to
the code using it. `defaults` returns the ConfigDict for experiments to start
from, `load` validates a ConfigDict and returns `Settings`, and `page` lists
every key with its documentation. Opens no models or records, and must not
import `stored` or the commands.
"""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

import ml_collections

from encdec_adapt.adaptation import init_section
from encdec_adapt.base import errors, keys, option_strings, saved_keys
from encdec_adapt.checkpoints import checkpoint_section
from encdec_adapt.cluster import distributed
from encdec_adapt.data import data_section
from encdec_adapt.data.records import record_sets
from encdec_adapt.files import atomic, hub, paths
from encdec_adapt.models import adapters as adapters_lib
from encdec_adapt.models import architecture as architectures
from encdec_adapt.models import execution, heads, model_config, model_section
from encdec_adapt.objectives import example_maker, labelled, passages
from encdec_adapt.ops import passage_segments
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import rules as rules_lib
from encdec_adapt.telemetry import environment
from encdec_adapt.training import losses, optimizers, recipes, schedules
from encdec_adapt.training.recipes import recipe as recipe_lib
from encdec_adapt.training.sections import (
  evaluation_section,
  teacher_section,
  train_section,
)

RUN_CONFIG = 'config.json'
_MADE_BY = 'made_by'  # Top-level key of RUN_CONFIG: the command of the run.
# Copies of the run's vocabularies in a work directory, a folder for each side,
# so that the directory can be moved without the original files.
VOCABULARIES = 'vocabulary'
# Descriptions of the models for rows that need a head.
_READERS = {
  'labels': ' and '.join(heads.Labels.models),
  'texts': ' or '.join(heads.Embedding.models)
  + ' with config.model.head.kind=embedding',
}


@dataclasses.dataclass(frozen=True)
class Settings:
  """A whole validated configuration."""

  seed: int
  model: model_config.ModelConfig
  compute: execution.ComputeConfig
  init: init_section.InitConfig
  data: data_section.DataConfig
  teacher: teacher_section.TeacherConfig
  recipe: recipe_lib.Recipe
  optimizer: optimizers.OptimizerConfig
  train: train_section.TrainConfig
  evaluation: evaluation_section.EvaluationConfig
  checkpoint: checkpoint_section.CheckpointConfig
  mesh: mesh_lib.MeshConfig

  @functools.cached_property
  def adapters(self) -> adapters_lib.Adapters | None:
    """Adapters of `config.train.lora`; None for full training."""
    return adapters_lib.make(self.model, self.train.lora)

  @property
  def rules(self) -> rules_lib.Rules:
    """The sharding rules of `config.mesh.rules`."""
    return rules_lib.RULES[self.mesh.rules]


@dataclasses.dataclass(frozen=True)
class _Root:
  """Keys outside any section."""

  seed: int = keys.key(0, 'Seed of initialisation and of the order of rows.')


# The dataclasses of each section: optimizer and schedule share a section.
# `losses` has the keys of section `loss`.
_SECTIONS = {
  'compute': (execution.ComputeConfig,),
  'init': (init_section.InitConfig,),
  'data': (data_section.DataConfig,),
  'teacher': (teacher_section.TeacherConfig,),
  'optimizer': (optimizers.OptimizerConfig, schedules.ScheduleConfig),
  'train': (train_section.TrainConfig,),
  'evaluation': (evaluation_section.EvaluationConfig,),
  'checkpoint': (checkpoint_section.CheckpointConfig,),
  'mesh': (mesh_lib.MeshConfig,),
}


def defaults() -> ml_collections.ConfigDict:
  """Returns all keys with their defaults, locked against new keys."""
  values = {
    **keys.defaults(_Root),
    'model': model_section.defaults(),
    'loss': losses.defaults(),
  }
  for name, parts in _SECTIONS.items():
    values[name] = {k: v for p in parts for k, v in keys.defaults(p).items()}
  # ml_collections suggests the nearest key for a mistyped key.
  return ml_collections.ConfigDict(values).lock()


def page(config: Mapping[str, Any] | None = None, *, full: bool = True) -> str:
  """Returns every key as `config.key = value` below its documentation.

  Args:
    config: values of all keys; the defaults if None.
    full: whether to include the keys of sections that are off.
  """
  values = defaults().to_dict() if config is None else config
  model = values['model']
  if not full:
    recipe = recipes.class_of(losses.class_of(values['loss']))
    is_read = {
      'rollouts': recipe.reads_prompts(losses.options(values['loss'])),
      'rewards': recipe.reads_rewards,
    }
    train = {k: v for k, v in values['train'].items() if is_read.get(k, True)}
    values = {**values, 'train': train}
    model = {**model, 'head': model_section.head_in_force(model['head'])}
  blocks = [
    keys.page(_Root, values, 'config.'),
    keys.page(model_section.ModelSection, model, 'config.model.', full=full),
    keys.page(
      model_config.StackConfig,
      model['encoder'],
      'config.model.encoder.',
      full=full,
    ),
    # These keys are documented once, at the encoder.
    [
      line
      for line in keys.page(
        model_config.StackConfig,
        model['decoder'],
        'config.model.decoder.',
        full=full,
      )
      if not line.startswith('#')
    ],
  ]
  for name, parts in _SECTIONS.items():
    if name == 'optimizer':  # After the teacher, which losses use.
      blocks.append(losses.page(values['loss'], full=full))
    blocks.append(
      [
        line
        for part in parts
        for line in keys.page(part, values[name], f'config.{name}.', full=full)
      ]
    )
  return '\n\n'.join('\n'.join(block) for block in blocks)


def load(
  config: ml_collections.ConfigDict, workdir: str = '', *, sources: bool = True
) -> Settings:
  """Validates a configuration.

  Keys missing from a configuration of an earlier version get their defaults,
  which are printed.

  Args:
    config: `defaults()` with changes.
    workdir: work directory of the job, and default location of the records.
    sources: whether to require the paths of sources and teacher. Plans need
      only shapes.

  Raises:
    UserError: names the key, its value and the allowed values.
  """
  saved, standard = config.to_dict(), defaults().to_dict()
  # Options of other losses are off in all versions.
  section = saved.get('loss', {})
  off = {
    name: options
    for name, options in standard['loss'].items()
    if isinstance(options, dict) and name != section.get('kind')
  }
  saved['loss'] = off | section
  # Configurations of this version are complete: they start from `defaults`.
  values, added = keys.complete(saved, standard)
  if added and distributed.is_lead():
    saved_keys.print_once(
      f'the configuration in {workdir} was saved by an earlier version; keys'
      f' that it lacks take their defaults: {", ".join(added)}'
    )
  # Objective and loss define the label or reward head; a saved configuration
  # already has it.
  head = keys.make(model_section.HeadSection, values['model']['head'])
  model = model_section.model_from_section(
    {**values['model'], 'head': keys.values_of(head.before_training())}
  )
  # Sections independent of other sections; the others follow.
  sections = {
    name: keys.make(parts[0], values[name])
    for name, parts in _SECTIONS.items()
    if name != 'data' and len(parts) == 1
  }
  loss = losses.class_of(values['loss'])
  options = losses.options(values['loss'])
  recipe_class = recipes.class_of(loss)
  data = keys.make(
    data_section.DataConfig,
    values['data'],
    table_sizes={name: s.vocab_size for name, s in model.stacks.items()},
    samples=recipe_class.reads_prompts(options),
  )
  # For labels, the recipe adds the head.
  if data.objectives[0].rows.content != 'labels':
    check_rows(model, data.objectives[0])
  model = _with_passages(model, data.in_workdir(workdir), sources)
  recipe = recipe_class.of(
    recipe_lib.Sections(
      loss,
      options,
      model,
      data,
      **{x: sections[x] for x in ('init', 'teacher', 'train')},
      **{x: sections[x] for x in ('checkpoint', 'evaluation')},
    )
  )
  head.check(recipe.model.decoder.head)
  schedule = keys.make(schedules.ScheduleConfig, values['optimizer'])
  settings = Settings(
    seed=values['seed'],
    model=recipe.model,
    data=data.in_workdir(workdir),
    optimizer=keys.make(
      optimizers.OptimizerConfig, values['optimizer'], schedule=schedule
    ),
    recipe=recipe,
    **sections,
  )
  # The user's path: the settings have a path below the work directory.
  _check_model(settings, values['data']['vocabulary'])
  _check_sources(settings, sources)
  if settings.data.repeat and not settings.train.steps:
    raise errors.UserError(
      'config.train.steps is 0, so that the job ends with its records, but'
      ' config.data.repeat is set and they never end; give a number of steps,'
      ' or set config.data.repeat to False and config.data.passes to the'
      ' number of epochs.'
    )
  return settings


def _with_passages(
  model: model_config.ModelConfig, data: data_section.DataConfig, sources: bool
) -> model_config.ModelConfig:
  """Returns a model with the passages of its objective.

  Args:
    model: the model; that of a saved run has them.
    data: the data of its job.
    sources: whether to read the vocabulary, which frames passages.

  Raises:
    UserError: the model reads passages but the objective makes none, its
      encoder is causal, or the vocabulary cannot be read.
  """
  length = max(objective.rows.passages for objective in data.objectives)
  configured = model.prompt_reader.passages.length
  if configured and not length:
    raise errors.UserError(
      f'config.model.encoder.passages.length is {configured} and objective'
      f' {data.objective!r} makes no passages; set the section passages to its'
      ' defaults (length=0, token=0, ends=False).'
    )
  if not length or (configured and not sources):
    return model
  if model.encoder.role != 'bidirectional':
    raise errors.UserError(
      f'objective {data.objective!r} needs a bidirectional encoder; set'
      ' config.model.causal_encoder to False.'
    )
  edge = ()
  if sources:
    edge = passages.edge(data.vocabularies.open().encoder.ids)
  encoder = dataclasses.replace(
    model.encoder, passages=passage_segments.Passages(length, *edge)
  )
  return dataclasses.replace(model, encoder=encoder)


def set_model(
  section: ml_collections.ConfigDict, model: model_config.ModelConfig
) -> None:
  """Sets the keys of `config.model` from a model."""
  section.update(model_section.section_from_model(model))
  # The temperature belongs to a job's loss.
  section.head.temperature = 0.0


def with_compute(
  config: ml_collections.ConfigDict, compute: execution.ComputeConfig
) -> ml_collections.ConfigDict:
  """Returns a configuration with resolved dtype and remat."""
  config = config.copy_and_resolve_references()
  config.compute.update(dtype=compute.dtype, remat=compute.remat)
  return config


def with_implied(
  config: ml_collections.ConfigDict, model: model_config.ModelConfig
) -> ml_collections.ConfigDict:
  """Returns a configuration with keys of `model` that others imply.

  Args:
    config: the configuration.
    model: its model; loss and objective have set its head, the objective its
      passages.
  """
  config = config.copy_and_resolve_references()
  head = model_section.HeadSection.of(model.decoder.head)
  config.model.head.update(keys.values_of(head))
  for name, stack in model.stacks.items():
    config.model[name].passages.update(keys.values_of(stack.passages))
  return config


def parse_arg(arg: str | None, **defaults: Any) -> dict[str, Any]:
  """Parses 'key=value,key=value' after the colon of --config=FILE:ARG.

  Args:
    arg: text after the colon, or None.
    **defaults: the allowed keys with default values, which set the types.

  Raises:
    UserError: a key is unknown or a value has the wrong type; lists the keys.
  """
  return option_strings.key_values(
    "the configuration's argument", arg or '', defaults
  )


def save(
  config: ml_collections.ConfigDict,
  workdir: str,
  made_by: Mapping[str, str] | None = None,
) -> None:
  """Writes the resolved configuration into a work directory.

  Args:
    config: the configuration.
    workdir: the work directory.
    made_by: command line and configuration file of a run, see
      `command.made_by`; None for a run started from Python.
  """
  content = config.to_dict()
  if made_by:
    content[_MADE_BY] = dict(made_by)
  atomic.write_json(paths.join(workdir, RUN_CONFIG), content)


def pinned(
  config: ml_collections.ConfigDict, workdir: str, section: str = ''
) -> ml_collections.ConfigDict:
  """Returns a configuration with Hub addresses pinned to commits.

  A resumed job keeps its commits, and existing records keep those of their
  manifest, unless the configuration names others. Must be called by all
  processes.

  Args:
    config: the configuration.
    workdir: work directory of the job.
    section: section of the keys to pin; '' for all.

  Raises:
    UserError: an address cannot be resolved, see `hub.pinned`.
  """

  def pin(value, before):
    if isinstance(value, str):
      return hub.pinned(value, before or '')
    return tuple(hub.pinned(x, ' '.join(before)) for x in value)

  def addresses() -> dict[str, Any]:
    file = paths.at(workdir) / RUN_CONFIG
    saved = atomic.read_json(file) if file.exists() else {}
    saved = environment.flat(saved_keys.translate(saved))
    folder = config.data.folder or paths.join(workdir, 'records')
    if hub.SCHEME in config.data.source:
      manifest = record_sets.read_manifest(paths.join(folder, 'train'))
      saved |= {'data.source': manifest['spec']['source']} if manifest else {}
    return {
      key: pin(value, saved.get(key, ()))
      for key, value in environment.flat(config.to_dict()).items()
      if hub.SCHEME in str(value) and key.startswith(section)
    }

  # Resolved by process 0: a branch may move between two requests.
  commits = distributed.from_lead(addresses, 'commits')
  config = config.copy_and_resolve_references()
  config.update_from_flattened_dict(commits)
  if distributed.is_lead():
    for key, address in commits.items():
      print(f'config.{key} is {address}')
  return config


def load_run(workdir: str) -> Settings:
  """Loads the settings of the run in a work directory; see `saved`."""
  # Without sources: a merged model may have no text.
  return load(saved(workdir), workdir, sources=False)


def saved(workdir: str) -> ml_collections.ConfigDict:
  """Returns the configuration of the run in a work directory.

  Its vocabularies are the copies in the folder.

  Raises:
    UserError: the folder has no run (a Hugging Face folder is named as such),
      or its configuration is damaged.
  """
  path = paths.at(workdir) / RUN_CONFIG
  if not path.exists():
    raise errors.UserError(
      f'{workdir} is not the work directory of a training job: it has no'
      f' {RUN_CONFIG}. Give the folder that --workdir named in training.'
    )
  content = atomic.read_json(path)
  # A Hugging Face folder has a file with the same name and this field.
  if 'model_type' in content:
    raise errors.UserError(
      f'{workdir} is a Hugging Face folder, and a work directory of a training'
      ' job is needed; make one with `convert import`.'
    )
  content.pop(_MADE_BY, None)
  config = ml_collections.ConfigDict(saved_keys.translate(content))
  for side, key in (('decoder', ''), ('encoder', 'encoder_')):
    copy = paths.at(workdir) / VOCABULARIES / side
    if copy.exists():
      config.data[f'{key}vocabulary'] = str(copy)
  return config


def check_rows(
  model: model_config.ModelConfig, objective: example_maker.Objective
) -> None:
  """Checks that a model reads the rows of an objective, ignoring its head.

  Raises:
    UserError: it does not; names the kinds of models for these rows.
  """
  content, architecture = objective.rows.content, model.architecture
  if content not in architecture.rows:
    kinds = architectures.BY_NAME.values()
    kinds = [kind for kind in kinds if content in kind.rows]
    raise errors.UserError(
      f'objective {objective.text!r} feeds models of kind'
      f' {_READERS.get(content) or architectures.names(kinds)}, and the model'
      f' is {architecture.name} with a head of {model.decoder.head.kind};'
      ' change config.data.objective, config.model.kind or'
      ' config.model.head.kind (the table is in configs/objectives.md).'
    )


def check_passages(
  model: model_config.ModelConfig, objective: example_maker.Objective
) -> None:
  """Checks that a model that reads passages reads those of an objective.

  Raises:
    UserError: it makes none, or longer ones.
  """
  length = model.prompt_reader.passages.length
  if length and not 0 < objective.rows.passages <= length:
    raise errors.UserError(
      f'the model reads passages of at most {length} tokens, and objective'
      f' {objective.text!r} makes'
      f' {objective.rows.passages or "none"}; use records of such passages.'
    )


def check_kind(
  model: model_config.ModelConfig, objective: example_maker.Objective
) -> None:
  """Checks that a model reads the rows of an objective and has its labels.

  Raises:
    UserError: it does not; names the kinds of models for these rows.
  """
  check_rows(model, objective)
  labels, outputs = objective.options.get('labels', ()), model.decoder.outputs
  if labels and len(labels) != outputs:
    raise errors.UserError(
      f'objective {objective.text!r} has {len(labels)} labels and the model'
      f' {outputs}; use records of the same labels.'
    )
  pooled = getattr(model.decoder.head, 'pooled', '')
  if pooled and issubclass(objective.maker, labelled.Tag):
    raise errors.UserError(
      f'objective {objective.text!r} feeds models of kind {_READERS["labels"]}'
      ' that label words, and this one labels whole texts'
      f' (config.model.head.pooled is {pooled!r}); use records of `classify`.'
    )
  if outputs == 1 and objective.rows.answers < 2:
    raise errors.UserError(
      f'objective {objective.text!r} has no answers to compare, which a reward'
      ' model scores; use records of preferences.'
    )


def _check_model(settings: Settings, vocabulary: str) -> None:
  data, model, init = settings.data, settings.model, settings.init
  # The first is enough: objectives of a mixture have the same row fields.
  check_kind(model, data.objectives[0])
  architecture, content = model.architecture, data.objectives[0].rows.content
  answers = content in ('pair', 'passages') and architecture.generates
  if settings.evaluation.samples and not answers:
    raise errors.UserError(
      f'config.evaluation.samples is {settings.evaluation.samples:g} with'
      f' objective {data.objective!r}, whose rows have no inputs for the model'
      ' to answer, or with a reward model, which answers nothing; set it to 0,'
      ' or train a language model on inputs and targets.'
    )
  path = data.encoder_vocabulary
  # Equal paths are a single vocabulary, allowed for any model.
  two_vocabularies = path not in ('', data.vocabulary, vocabulary)
  if two_vocabularies and model.shared_parts:
    raise errors.UserError(
      f'config.data.encoder_vocabulary is {path!r} with one table for both'
      ' sides (config.model.shared_table, or the second table of Gemma 4); use'
      ' one vocabulary.'
    )
  if not architecture.encodes_prompt:
    if two_vocabularies:
      raise errors.UserError(
        f'config.data.encoder_vocabulary is {path!r} but config.model.kind is'
        f' {architecture.name}, which has no encoder; leave it empty.'
      )
    if init.mode == 'embeddings' or init.decoder:
      raise errors.UserError(
        f'config.init.mode is {init.mode!r} and config.init.decoder'
        f' {init.decoder!r} but config.model.kind is {architecture.name}; only'
        " an encoder_decoder has two stacks to start. Set init.mode to 'adapt'"
        ' and init.encoder alone to the source of a single stack.'
      )
  if settings.adapters and init.mode != 'checkpoint':
    raise errors.UserError(
      f'config.train.lora.rank is {settings.train.lora.rank} with'
      f' config.init.mode {init.mode!r}; adapters need a base on disk. Make the'
      ' model first (`convert adapt` or `convert import`), and set'
      " config.init.mode to 'checkpoint' and config.init.encoder to it."
    )
  head = model.decoder.head
  if init.mode in ('adapt', 'embeddings') and head.fresh:
    raise errors.UserError(
      f'config.init.mode is {init.mode!r} and the model has a head of'
      f' {head.kind}; make the pair first (`convert adapt`), and start from it:'
      " config.init.mode='checkpoint'."
    )
  if init.optimizer == 'source':
    _check_carried(settings)


def _check_carried(settings: Settings) -> None:
  schedule, train = settings.optimizer.schedule.kind, settings.train
  for key, value, needed in (
    ('optimizer.schedule', schedule, ('rsqrt', 'constant')),
    ('train.cross_attention_warmup', train.cross_attention_warmup, (0,)),
    ('init.decoder', settings.init.decoder, ('',)),
    ('train.lora.rank', train.lora.rank, (0,)),
  ):
    if value not in needed:
      raise errors.UserError(
        f"config.init.optimizer is 'source' with config.{key} {value!r}; the"
        " source's optimizer state and step count go on with"
        f' {" or ".join(map(repr, needed))} only. Change one of them.'
      )


def _check_sources(settings: Settings, sources: bool) -> None:
  init, teacher = settings.init, settings.teacher.checkpoint
  recipe, loss = settings.recipe, settings.recipe.loss
  # Not checked when the section is made: a dry run plans a job before its
  # sources exist.
  if sources:
    settings.data.require_source()
  if sources and init.mode != 'random' and not init.encoder:
    raise errors.UserError(
      f'config.init.mode is {init.mode!r} but config.init.encoder is empty;'
      ' give the work directory or Hugging Face folder of the source.'
    )
  for key, read in (
    ('rollouts', recipe.sampling),
    ('rewards', recipe.rewards),
  ):
    section = getattr(settings.train, key)
    if read is None:
      keys.require_defaults(
        keys.values_of(section),
        keys.defaults(type(section)),
        f'config.train.{key}.',
        f'the loss is {loss.name}',
      )
  best, patience = settings.checkpoint.keep_best, settings.train.patience
  if not settings.evaluation.loss and (best or patience):
    raise errors.UserError(
      f'config.evaluation.loss is 0, and config.checkpoint.keep_best={best} or'
      f' config.train.patience={patience} compares evaluations; set it to a'
      ' number of steps, or the other keys to False and 0.'
    )
  if sources and recipe.rewards is not None and not recipe.rewards.weights:
    raise errors.UserError(
      'config.train.rewards has no reward with config.loss.kind='
      f'{loss.name!r}; set config.train.rewards.answers to 1, or name'
      ' config.train.rewards.functions or .models.'
    )
  train = settings.train
  dropout = train.dropout or train.lora.dropout
  # Only for new jobs: runs of earlier versions may have dropout.
  if sources and dropout and not recipe.allows_dropout:
    raise errors.UserError(
      f'config.train.dropout is {train.dropout} and config.train.lora.dropout'
      f' {train.lora.dropout}, but masks of dropout would change'
      f' log-probabilities or scores that the loss {loss.name} compares; set it'
      ' to 0 in both.'
    )
  # The likely cause: config.loss.kind='distill' is missing.
  stored = recipe.rows.stored_teacher
  if teacher and not (stored if settings.teacher.stored else recipe.frozen):
    raise errors.UserError(
      f'config.teacher.checkpoint is {teacher!r} but the loss is {loss.name},'
      ' which reads no such model; empty it, or choose a loss that does: of'
      " stored probabilities config.loss.kind='distill' alone, of models also"
      " 'dpo' and others."
    )
  for frozen in recipe.frozen.values() if sources else ():
    if not frozen.path:
      raise errors.UserError(
        f'the loss is {loss.name} but config.teacher.checkpoint is empty'
        f' (config.init.mode is {init.mode!r}); give the work directory or'
        ' Hugging Face folder of a model of kind'
        f' {architectures.names(frozen.accepts)}, or choose a loss that reads'
        ' no other model (config.loss.kind).'
      )
