"""What the commands build from settings: mesh, models, data, parameters."""

from collections.abc import Sequence
import dataclasses
import sys

import jax.numpy as jnp
from jax.sharding import Mesh

from encdec_adapt import config as config_lib
from encdec_adapt import vocabulary_checks
from encdec_adapt.cli import errors
from encdec_adapt.cluster import distributed
from encdec_adapt.data import batch as batch_lib
from encdec_adapt.data import materialization, records, workers
from encdec_adapt.models import build, model_config, model_flops
from encdec_adapt.ops import attention
from encdec_adapt.ops import partition as partition_lib
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.telemetry import environment, flops
from encdec_adapt.tokenizers import vocabularies
from encdec_adapt.training import optimizers, phases
from encdec_adapt.training import state as state_lib
from encdec_adapt.training import step as step_lib


def make_mesh(settings: config_lib.Settings) -> Mesh:
  """The mesh of the settings over all devices; the start of every job.

  Also says where compiled programs are kept.

  Raises:
    UserError: the axes do not multiply to the devices.
  """
  if settings.compute.compile_cache:
    environment.enable_compile_cache(settings.compute.compile_cache)
  try:
    return mesh_lib.make_mesh(settings.mesh)
  except ValueError as error:
    raise errors.UserError(str(error)) from error


def check_batches(settings: config_lib.Settings, mesh: Mesh) -> None:
  """Refuses batches and lengths that do not divide over the mesh.

  Raises:
    UserError: names the key, its value and the number of shards.
  """
  partition = partition_lib.Partition(mesh, settings.rules.as_dict())
  train, lengths = settings.train, settings.data.train.lengths
  rows = f'over {train.microbatches} microbatches and ' * (
    train.microbatches > 1
  )
  batch, length = partition.size('batch'), partition.size('length')
  for key, size, shards, split in (
    ('train.batch_size', train.batch_size, batch * train.microbatches, rows),
    ('train.eval_batch_size', train.eval_batch_size, batch, ''),
    ('data.encoder_length', lengths.encoder, length, ''),
    ('data.decoder_length', lengths.decoder, length, ''),
  ):
    if size % shards:
      raise errors.UserError(
        f'config.{key} is {size}; it must divide {split}over the mesh'
        f' {dict(mesh.shape)}, so by {shards}. Change it or config.mesh.'
      )


def check_attention(settings: config_lib.Settings, platform: str) -> None:
  """Refuses an attention backend that devices cannot run.

  Args:
    settings: of the job.
    platform: of its devices: 'cpu', 'gpu' or 'tpu'.

  Raises:
    UserError: names the key, its value and what the devices can run.
  """
  chosen = settings.compute.attention
  able = attention.on_platform(platform)
  if chosen not in able:
    where = sorted(attention.BACKENDS[chosen].capabilities.platforms)
    raise errors.UserError(
      f'config.compute.attention is {chosen!r}, which needs'
      f' {" or ".join(where)}; the devices are {platform}, which can run'
      f' {", ".join(able)}.'
    )


def with_attention_for(
  settings: config_lib.Settings, mesh: Mesh
) -> config_lib.Settings:
  """Settings of a run with attention that other devices can run, too.

  What was trained on TPUs is read elsewhere by the chunked backend, which
  honours every mask; that it is used is printed.
  """
  chosen, platform = settings.compute.attention, mesh.devices.flat[0].platform
  if chosen in attention.on_platform(platform):
    return settings
  print(
    f'attention: {chosen!r} does not run on {platform}; chunked is used',
    file=sys.stderr,
  )
  compute = dataclasses.replace(settings.compute, attention='chunked')
  return dataclasses.replace(settings, compute=compute)


def place_model(
  settings: config_lib.Settings,
  model: model_config.ModelConfig,
  mesh: Mesh,
) -> state_lib.Placement:
  """Builds a model as the settings compute, and says where it lives.

  Raises:
    UserError: a parameter does not divide over the mesh.
  """
  compute = settings.compute
  where = state_lib.Placement(
    build.build(
      model,
      dtype=jnp.dtype(compute.dtype),
      remat=compute.remat,
      attention_backend=compute.attention,
      attention_chunk=compute.attention_chunk,
      scan_unroll=compute.scan_unroll,
    ),
    mesh,
    settings.rules,
  )
  try:
    where.parameters  # noqa: B018  Checks divisibility.
  except ValueError as error:
    raise errors.UserError(
      f'{error} Change config.mesh, or'
      ' config.model.*.vocab_multiple if it is the vocabulary.'
    ) from error
  return where


@dataclasses.dataclass(frozen=True)
class Subject:
  """What a job trains, and how: the same from its first step to its last.

  Attributes:
    where: the model on its mesh.
    teacher: on the same mesh; None without distillation.
    optimizer: of all parameters.
    groups: parameters by the step from which they train.
    assignment: the group of every parameter, by path.
  """

  where: state_lib.Placement
  teacher: state_lib.Placement | None
  optimizer: optimizers.Optimizer
  groups: tuple[phases.Group, ...]
  assignment: dict[str, str]

  @classmethod
  def of(
    cls,
    settings: config_lib.Settings,
    where: state_lib.Placement,
    teacher: state_lib.Placement | None = None,
  ) -> 'Subject':
    """That of a job whose models are placed."""
    groups = phases.cross_attention_warmup(
      settings.train.cross_attention_warmup
    )
    return cls(
      where,
      teacher,
      optimizers.Optimizer(settings.optimizer),
      groups,
      phases.assign(where.model.table, groups),
    )

  def active(self, step: int) -> tuple[str, ...]:
    """Groups that train at a step."""
    return phases.active(self.groups, step)

  @property
  def all_groups(self) -> tuple[str, ...]:
    """Names of all groups: what trains in the end."""
    return tuple(group.name for group in self.groups)

  def abstract(self, active: Sequence[str]) -> state_lib.TrainState:
    """Shapes and shardings of the state where these groups train."""
    return state_lib.abstract(
      self.optimizer, self.assignment, active, self.where
    )

  def make_step(
    self, settings: config_lib.Settings, active: Sequence[str]
  ) -> step_lib.StepFunction:
    """The jitted step in which these groups train."""
    return step_lib.make_train_step(
      self.where,
      settings.loss,
      self.optimizer,
      self.assignment,
      active,
      step_lib.StepConfig(
        settings.train.microbatches, settings.optimizer.clip_norm
      ),
      self.teacher.model if self.teacher else None,
    )


@dataclasses.dataclass(frozen=True)
class Data:
  """What a job reads.

  Attributes:
    opened: the vocabularies.
    train: rows to train on.
    evaluation: rows held out.
  """

  opened: vocabularies.Opened
  train: records.RecordSet
  evaluation: records.RecordSet


def open_data(settings: config_lib.Settings) -> Data:
  """Opens vocabularies and records, making them first where they are missing.

  They are made in a process of its own, so that TensorFlow never enters this
  one.

  Raises:
    UserError: the records or the vocabularies are not the configuration's, or
      not the same for all processes.
  """
  if distributed.is_lead() and materialization.is_missing(settings.data):
    print('records are missing; encdec_adapt.materialize makes them')
    workers.run_in_subprocess(materialization.materialize, settings.data)
  distributed.barrier('records', distributed.MAKE_TIMEOUT)
  opened = settings.data.vocabularies.open()
  vocabulary_checks.check_sizes(settings, opened)
  train_set, eval_set = materialization.open_sets(settings.data, opened)
  distributed.require_same(
    'data',
    {
      'data.train': train_set.digests,
      'data.eval': eval_set.digests,
      'data.vocabularies': opened.describe(),
    },
  )
  return Data(opened, train_set, eval_set)


def reads_teacher_row(settings: config_lib.Settings) -> bool:
  """Whether batches need the teacher's fields.

  A teacher reads them, and so does a decoder-only model on pairs.
  """
  pairs = settings.data.train.encoder_length > 0
  alone = isinstance(settings.model, model_config.DecoderOnlyConfig)
  return bool(settings.loss.distillation) or (pairs and alone)


def step_flops(
  settings: config_lib.Settings, teacher: state_lib.Placement | None
) -> float:
  """Model FLOPs of one step, teacher's forward pass included."""
  lengths = settings.data.train.lengths
  sizes = lengths.encoder, lengths.decoder, lengths.teacher
  total = flops.TRAINING * model_flops.forward(settings.model, *sizes)
  if teacher:
    total += model_flops.forward(teacher.model.config, *sizes)
  return float(total * settings.train.batch_size)


def describe_batch(rows: batch_lib.Batch, opened: vocabularies.Opened) -> str:
  """The first example of a process's rows, decoded, field by field."""
  lines = ['the first example read for the first batch:']
  for field in ('encoder_tokens', 'decoder_tokens', 'targets'):
    if field in rows:
      side = 'encoder' if field.startswith('encoder') else 'decoder'
      tokens = rows[field][0][rows[f'{side}_segments'][0] == 1]
      text = opened.sides[side].decode(tokens, show_special=True, start=False)
      shown = text if len(text) < 160 else f'{text[:76]} ... {text[-76:]}'
      lines.append(f'  {field:<15}{len(tokens):>5} tokens  {shown!r}')
  return '\n'.join(lines)
