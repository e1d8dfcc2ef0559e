"""The one boundary between a ConfigDict and the code.

`load` turns each section into a frozen dataclass and validates it; nothing
behind it sees a ConfigDict. Every error names the key, its value and what
would be right.
"""

from collections.abc import Callable, Mapping, Set
import dataclasses
import json
import math
from typing import Any

import ml_collections

from encdec_adapt.cli import errors
from encdec_adapt.data import objectives as data_objectives
from encdec_adapt.data import records
from encdec_adapt.files import atomic, paths
from encdec_adapt.models import execution, model_config
from encdec_adapt.ops import attention
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import rules as rules_lib
from encdec_adapt.tokenizers import vocabularies
from encdec_adapt.training import losses, optimizers, schedules

RUN_CONFIG = 'config.json'
# A vocabulary's path that starts so is below the work directory.
WORKDIR = '{workdir}'
# In a work directory: the vocabularies it was made with, a folder for a side.
VOCABULARIES = 'vocabulary'
# Fields of a stack that follow from the model it is a part of.
_SET_BY_THE_PAIR = {'role', 'cross_width', 'cross_merged', 'cross_layers'}


@dataclasses.dataclass(frozen=True)
class ComputeConfig:
  """How the model is computed; see `models.build.build`.

  `compile_cache` is a folder of compiled programs, '' for none.
  """

  dtype: str
  remat: str
  attention: str
  attention_chunk: int
  scan_unroll: int
  compile_cache: str


@dataclasses.dataclass(frozen=True)
class InitConfig:
  """Where the parameters come from; fields as in configs/base.py."""

  mode: str
  encoder: str
  decoder: str
  cross_attention: str
  post_norm_gain: str


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Text, vocabulary and records.

  Attributes:
    folder: where the record sets are.
    vocabularies: those of the two sides.
    train_vocabulary: train the decoder's file where it is missing.
    table_sizes: tokens of the model's tables, by stack.
    workers: processes that make records.
    repeat: go on after the last pass.
    train: what the training records must be.
    evaluation: what the held-out records must be.
  """

  folder: str
  vocabularies: vocabularies.Choice
  train_vocabulary: bool
  table_sizes: Mapping[str, int]
  workers: int
  repeat: bool
  train: records.RecordSpec
  evaluation: records.RecordSpec


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """The loop; fields as in configs/base.py."""

  steps: int
  batch_size: int
  microbatches: int
  cross_attention_warmup: int
  log_every: int
  eval_every: int
  eval_batch_size: int
  max_skipped: int
  hang_factor: float
  hang_step_seconds: float
  hang_seconds: float
  profile_from: int
  profile_steps: int


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """When checkpoints are written and which stay."""

  every: int
  keep: int
  keep_every: int


@dataclasses.dataclass(frozen=True)
class Settings:
  """A whole validated configuration."""

  seed: int
  model: model_config.ModelConfig
  compute: ComputeConfig
  init: InitConfig
  data: DataConfig
  teacher: str
  loss: losses.LossConfig
  optimizer: optimizers.OptimizerConfig
  train: TrainConfig
  checkpoint: CheckpointConfig
  mesh: mesh_lib.MeshConfig
  rules: rules_lib.Rules


def load(
  config: ml_collections.ConfigDict, workdir: str = '', *, sources: bool = True
) -> Settings:
  """Validates a configuration.

  Args:
    config: `configs/base.py` with changes.
    workdir: the job's folder; records go below it unless the configuration
      names a folder.
    sources: whether the paths of sources and teacher must be given; a plan,
      which knows shapes only, does without.

  Raises:
    UserError: names the key, its value and what would be right.
  """
  _finite('config', config.to_dict())
  _at_least('train.steps', config.train.steps, 1)
  model = _model(config.model)
  settings = Settings(
    seed=config.seed,
    model=model,
    compute=_plain(ComputeConfig, config.compute),
    init=_plain(InitConfig, config.init),
    data=_data(config, model, workdir),
    teacher=config.teacher.checkpoint,
    loss=_plain(losses.LossConfig, config.loss),
    optimizer=_optimizer(config),
    train=_plain(TrainConfig, config.train),
    checkpoint=_plain(CheckpointConfig, config.checkpoint),
    mesh=mesh_lib.MeshConfig(
      **{axis: config.mesh[axis] for axis in mesh_lib.AXES}
    ),
    rules=_value_error(rules_lib.named, config.mesh.rules),
  )
  _check(settings, sources)
  return settings


def save(config: ml_collections.ConfigDict, workdir: str) -> None:
  """Writes the resolved configuration into a run's folder."""
  atomic.write_json(paths.join(workdir, RUN_CONFIG), config.to_dict())


def load_run(workdir: str) -> Settings:
  """The settings with which the run in a folder was made.

  Its vocabularies are the copies in the folder, which move with it.

  Raises:
    UserError: the folder holds no run, but perhaps a Hugging Face folder.
  """
  path = paths.at(workdir) / RUN_CONFIG
  if not path.exists():
    raise errors.UserError(
      f'{workdir} is not the work directory of a training job: it has no'
      f' {RUN_CONFIG}. Give the folder that --workdir named in training.'
    )
  content = json.loads(path.read_text())
  if 'model_type' in content:
    raise errors.UserError(
      f'{workdir} is a Hugging Face folder, and this needs the work directory'
      ' of a training job; make one of it with `convert import`.'
    )
  saved = ml_collections.ConfigDict(content)
  for side, key in (('decoder', ''), ('encoder', 'encoder_')):
    own = paths.at(workdir) / VOCABULARIES / side
    if own.exists():
      saved.data[f'{key}vocabulary'] = str(own)
  try:
    return load(saved, str(workdir))
  except AttributeError as error:  # Of sections that are read key by key.
    raise errors.UserError(
      f'{path} was saved by another version: it lacks a key ({error}).'
    ) from error


def _plain(make: Callable[..., Any], section: ml_collections.ConfigDict):
  """A dataclass whose fields are exactly the section's keys.

  Raises:
    UserError: they are not, in a configuration saved by another version.
  """
  values = section.to_dict()
  fields = {field.name for field in dataclasses.fields(make)}
  _check_keys(make.__name__, values.keys(), fields)
  return make(**values)


def _check_keys(what: str, found: Set[str], wanted: Set[str]) -> None:
  if found != wanted:
    raise errors.UserError(
      f'the configuration was saved by another version: {what} has'
      f' {", ".join(sorted(found ^ wanted))} on one side only.'
    )


def _value_error(function: Callable[..., Any], *args):
  """Calls a leaf package, whose ValueErrors are the user's to mend."""
  try:
    return function(*args)
  except ValueError as error:
    raise errors.UserError(str(error)) from error


def _one_of(key: str, value: str, known: tuple[str, ...]) -> None:
  if value not in known:
    raise errors.UserError(
      f'config.{key} is {value!r}; it must be one of {", ".join(known)}.'
    )


def _at_least(key: str, value: float, least: float) -> None:
  if value < least:
    raise errors.UserError(
      f'config.{key} is {value}; it must be at least {least}.'
    )


def _finite(key: str, value: Any) -> None:
  """Refuses NaN and infinity, which pass every comparison with a range."""
  if isinstance(value, Mapping):
    for name, inner in value.items():
      _finite(f'{key}.{name}', inner)
  elif isinstance(value, tuple | list):
    for index, inner in enumerate(value):
      _finite(f'{key}[{index}]', inner)
  elif isinstance(value, float) and not math.isfinite(value):
    raise errors.UserError(f'{key} is {value}; it must be a finite number.')


def _model(section: ml_collections.ConfigDict) -> model_config.ModelConfig:
  _one_of('model.kind', section.kind, ('decoder_only', 'encoder_decoder'))
  decoder = _stack('decoder', section.decoder)
  if section.kind == 'decoder_only':
    return model_config.DecoderOnlyConfig(decoder)
  pair = section.to_dict()
  for name in ('kind', 'encoder', 'decoder'):
    del pair[name]
  known = {'causal_encoder', 'shared_table', 'cross_merged', 'cross_layers'}
  _check_keys('a model', pair.keys(), known)
  encoder = _stack('encoder', section.encoder)
  try:
    return model_config.encoder_decoder(encoder, decoder, **pair)
  except errors.UserError as error:
    raise errors.UserError(f'config.model: {error}') from error


def _stack(name: str, section: ml_collections.ConfigDict):
  values = section.to_dict()
  fields = {
    field.name for field in dataclasses.fields(model_config.StackConfig)
  }
  _check_keys('a stack', values.keys(), fields - _SET_BY_THE_PAIR)
  values['pattern'] = tuple(values['pattern'])
  for key, none in model_config.NONE_AS.items():
    if values[key] == none:
      values[key] = None
  try:
    return model_config.StackConfig(**values)
  except errors.UserError as error:
    raise errors.UserError(f'config.model.{name}: {error}') from error


def _data(config, model, workdir: str) -> DataConfig:
  data = config.data
  _one_of('data.objective', data.objective, data_objectives.OBJECTIVES)
  policies = data_objectives.SENTINEL_POLICIES
  _one_of('data.sentinels', data.sentinels, policies)
  _at_least('data.workers', data.workers, 1)
  _at_least('data.eval_rows', data.eval_rows, 0)
  if not 0 < data.eval_fraction < 1:
    raise errors.UserError(
      f'config.data.eval_fraction is {data.eval_fraction}; it must be between'
      ' 0 and 1: a job trains on the one part and evaluates on the other.'
    )
  folder = data.folder or paths.join(workdir, 'records')
  choice = vocabularies.Choice(
    _below(data.vocabulary, workdir) or paths.join(folder, 'vocabulary.model'),
    _below(data.encoder_vocabulary, workdir),
    data.add_sentinels,
  )
  pairs = data.objective != 'causal_lm'
  if pairs != (data.encoder_length > 0):
    raise errors.UserError(
      f'config.data.encoder_length is {data.encoder_length} with objective'
      f' {data.objective!r}; causal_lm has no inputs (0), every other'
      ' objective needs a length.'
    )
  if isinstance(model, model_config.EncoderDecoderConfig) and not pairs:
    raise errors.UserError(
      'config.data.objective is causal_lm, which has no inputs for the'
      ' encoder; choose prefix_lm, prefix_lm_uniform or ul2, or set'
      ' config.model.kind to decoder_only.'
    )
  _check_vocabularies(data, model)
  common = dict(
    source=data.source,
    max_documents=data.max_documents,
    max_bytes=data.max_bytes,
    objective=data.objective,
    encoder_length=data.encoder_length,
    decoder_length=data.decoder_length,
    sentinels=data.sentinels,
    seed=data.seed,
    eval_fraction=data.eval_fraction,
    shards=data.shards,
  )
  return DataConfig(
    folder=folder,
    vocabularies=choice,
    train_vocabulary=data.train_vocabulary,
    table_sizes={
      name: stack.vocab_size for name, stack in model.stacks.items()
    },
    workers=data.workers,
    repeat=data.repeat,
    train=records.RecordSpec(
      split='train', passes=data.passes, pack=data.pack, max_rows=0, **common
    ),
    evaluation=records.RecordSpec(
      split='eval',
      passes=1,
      pack=data.eval_pack,
      max_rows=data.eval_rows,
      **common,
    ),
  )


def _below(path: str, workdir: str) -> str:
  """A path that may start with the work directory's place."""
  if path.startswith(WORKDIR):
    return paths.join(workdir, path.removeprefix(WORKDIR).lstrip('/'))
  return path


def _check_vocabularies(data, model: model_config.ModelConfig) -> None:
  """Refuses two vocabularies where there can only be one."""
  _at_least('data.add_sentinels', data.add_sentinels, 0)
  own = data.encoder_vocabulary
  if own in ('', data.vocabulary):
    return
  if not data.objective.startswith('prefix_lm'):
    raise errors.UserError(
      f'config.data.encoder_vocabulary is {own!r} with objective'
      f' {data.objective!r}; only prefix_lm and prefix_lm_uniform split the'
      ' text, which the sides then encode apart. Any other objective hides'
      ' tokens in what both sides read. Change one of them.'
    )
  if not isinstance(model, model_config.EncoderDecoderConfig):
    raise errors.UserError(
      f'config.data.encoder_vocabulary is {own!r} but config.model.kind is'
      ' decoder_only, which has no encoder; empty it.'
    )
  if model.shared_table:
    raise errors.UserError(
      f'config.data.encoder_vocabulary is {own!r} with'
      ' config.model.shared_table, one table for both sides; change one of'
      ' them.'
    )


def _optimizer(config) -> optimizers.OptimizerConfig:
  values = config.optimizer.to_dict()
  schedule = schedules.ScheduleConfig(
    kind=values.pop('schedule'),
    peak=values.pop('learning_rate'),
    warmup_steps=values.pop('warmup_steps'),
    end_fraction=values.pop('end_fraction'),
    rsqrt_steps=values.pop('rsqrt_steps'),
    total_steps=config.train.steps,
  )
  return optimizers.OptimizerConfig(schedule=schedule, **values)


def _check(settings: Settings, sources: bool) -> None:
  """Rules that ranges of one section cannot state."""
  _check_compute(settings.compute)
  _at_least('checkpoint.every', settings.checkpoint.every, 1)
  _at_least('checkpoint.keep', settings.checkpoint.keep, 1)
  _at_least('checkpoint.keep_every', settings.checkpoint.keep_every, 0)
  _check_train(settings.train)
  _check_init(settings.init, settings.model, sources)
  _check_teacher(settings, sources)


def _check_compute(compute: ComputeConfig) -> None:
  _one_of('compute.dtype', compute.dtype, ('float32', 'bfloat16'))
  _one_of('compute.remat', compute.remat, tuple(execution.REMAT_POLICIES))
  _one_of('compute.attention', compute.attention, tuple(attention.BACKENDS))
  for name in ('attention_chunk', 'scan_unroll'):
    _at_least(f'compute.{name}', getattr(compute, name), 1)


def _check_train(train: TrainConfig) -> None:
  for name in ('batch_size', 'microbatches', 'log_every'):
    _at_least(f'train.{name}', getattr(train, name), 1)
  for name in ('eval_every', 'eval_batch_size', 'max_skipped'):
    _at_least(f'train.{name}', getattr(train, name), 1)
  for name in ('hang_step_seconds', 'hang_seconds'):
    _at_least(f'train.{name}', getattr(train, name), 1)
  for name in ('hang_factor', 'profile_from', 'profile_steps'):
    _at_least(f'train.{name}', getattr(train, name), 0)
  if train.batch_size % train.microbatches:
    raise errors.UserError(
      f'config.train.batch_size ({train.batch_size}) does not divide into'
      f' config.train.microbatches ({train.microbatches}); change one of'
      ' them.'
    )
  if train.cross_attention_warmup >= train.steps:
    raise errors.UserError(
      f'config.train.cross_attention_warmup ({train.cross_attention_warmup})'
      f' leaves none of the {train.steps} steps to the other parameters;'
      ' lower it or raise config.train.steps.'
    )


def _check_init(
  init: InitConfig, model: model_config.ModelConfig, sources: bool
) -> None:
  _one_of(
    'init.mode', init.mode, ('random', 'checkpoint', 'adapt', 'embeddings')
  )
  _one_of(
    'init.cross_attention', init.cross_attention, ('auto', 'copy', 'fresh')
  )
  _one_of('init.post_norm_gain', init.post_norm_gain, ('one', 'zero'))
  if sources and init.mode != 'random' and not init.encoder:
    raise errors.UserError(
      f'config.init.mode is {init.mode!r} but config.init.encoder is empty;'
      ' give the work directory of the source run.'
    )
  options = {'cross_attention': 'auto', 'post_norm_gain': 'one'}
  unused = {
    'random': {'encoder': '', 'decoder': ''} | options,
    'checkpoint': {'decoder': ''} | options,
    'embeddings': options,
    'adapt': {},
  }
  for name, default in unused[init.mode].items():
    if getattr(init, name) != default:
      raise errors.UserError(
        f'config.init.{name} is {getattr(init, name)!r}, which init.mode'
        f' {init.mode!r} does not read; set it to {default!r}, or change'
        ' config.init.mode.'
      )
  adapting = init.mode in ('adapt', 'embeddings')
  is_pair = isinstance(model, model_config.EncoderDecoderConfig)
  if adapting and not is_pair:
    raise errors.UserError(
      f'config.init.mode is {init.mode!r} but config.model.kind is'
      ' decoder_only; adaptation makes an encoder_decoder.'
    )


def _check_teacher(settings: Settings, sources: bool) -> None:
  share, objective = settings.loss.distillation, settings.data.train.objective
  if settings.teacher and not share:
    raise errors.UserError(
      f'config.teacher.checkpoint is {settings.teacher!r} but'
      ' config.loss.distillation is 0, so that nothing is learnt from it;'
      ' empty the one or raise the other.'
    )
  if sources and share > 0 and not settings.teacher:
    raise errors.UserError(
      f'config.loss.distillation is {share} but'
      ' config.teacher.checkpoint is empty; give the work directory of a'
      ' decoder-only run, or set the distillation to 0.'
    )
  if share > 0 and not objective.startswith('prefix_lm'):
    raise errors.UserError(
      f'config.loss.distillation is {share} with config.data.objective'
      f' {objective!r}; a teacher predicts the targets of prefix_lm only.'
    )
