"""Builds what training and the other commands share: mesh, models, data.

Functions take the sections of the configuration that they need. Nothing here
reads other models on disk; `conversion.initial_state` does.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from encdec_adapt.base import errors
from encdec_adapt.cluster import distributed
from encdec_adapt.data import data_section
from encdec_adapt.data.making import materialization, process_pool
from encdec_adapt.data.records import loader, record_sets
from encdec_adapt.models import (
  build,
  execution,
  forward_flops,
  model_config,
)
from encdec_adapt.objectives import framing
from encdec_adapt.ops import attention
from encdec_adapt.ops import partition as partition_lib
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import placement
from encdec_adapt.sharding import rules as rules_lib
from encdec_adapt.telemetry import environment
from encdec_adapt.tokenizers import tokenizer_writer, vocabulary_pair
from encdec_adapt.training import state as state_lib
from encdec_adapt.training import train_section

# -- Mesh ----------------------------------------------------------------------


def make_mesh(config: mesh_lib.MeshConfig, cache: str = '') -> Mesh:
  """Enables the compile cache and makes the mesh over all devices.

  Args:
    config: sizes of the axes.
    cache: folder of compiled programs, '' for none.

  Raises:
    UserError: the sizes do not multiply to the number of devices.
  """
  if cache:
    environment.enable_compile_cache(cache)
  try:
    return mesh_lib.make_mesh(config)
  except ValueError as error:
    raise errors.UserError(str(error)) from error


def check_batches(
  train: train_section.TrainConfig,
  lengths: framing.Lengths,
  mesh: Mesh,
  rules: rules_lib.Rules,
) -> None:
  """Checks that batches and lengths divide over the mesh.

  Args:
    train: section `train` of the configuration.
    lengths: tokens of a row.
    mesh: the device mesh.
    rules: meaning of logical axes on it.

  Raises:
    UserError: names the key, its value and the number of shards.
  """
  partition = partition_lib.Partition(mesh, rules.as_dict())
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


# -- Models --------------------------------------------------------------------


def check_attention(chosen: str, platform: str) -> None:
  """Checks that devices can run an attention backend.

  Args:
    chosen: `config.compute.attention`.
    platform: 'cpu', 'gpu' or 'tpu'.

  Raises:
    UserError: names the key, its value and what the devices can run.
  """
  able = attention.on_platform(platform)
  if chosen not in able:
    needed = sorted(attention.BACKENDS[chosen].platforms)
    raise errors.UserError(
      f'config.compute.attention is {chosen!r}, which needs'
      f' {" or ".join(needed)}; the devices are {platform}, which can run'
      f' {", ".join(able)}.'
    )


def place_model(
  model: model_config.ModelConfig,
  compute: execution.ComputeConfig,
  mesh: Mesh | AbstractMesh,
  rules: rules_lib.Rules,
) -> state_lib.Placement:
  """Builds a model and the shardings of its parameters on the mesh.

  Args:
    model: the model's shape.
    compute: section `compute` of the configuration.
    mesh: the device mesh.
    rules: meaning of logical axes on it.

  Raises:
    UserError: a parameter does not divide over the mesh.
  """
  where = state_lib.Placement(build.build(model, compute), mesh, rules)
  try:
    where.parameters  # noqa: B018  Checks divisibility.
  except ValueError as error:
    raise errors.UserError(
      f'{error} Use another mesh (config.mesh), or another'
      ' config.model.*.vocab_multiple if it is the vocabulary.'
    ) from error
  return where


def step_flops(
  model: model_config.ModelConfig,
  lengths: framing.Lengths,
  rows: int,
  references: Iterable[model_config.ModelConfig] = (),
) -> float:
  """Returns the model FLOPs of a training step on all devices.

  Args:
    model: the trained model.
    lengths: tokens of a row.
    rows: rows of the batch.
    references: models that add a forward pass each.
  """
  sizes = lengths.encoder, lengths.decoder, lengths.teacher
  total = forward_flops.TRAINING * forward_flops.forward(model, *sizes)
  total += sum(forward_flops.forward(frozen, *sizes) for frozen in references)
  return float(total * rows)


# -- Data ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Data:
  """Vocabularies and records of a job.

  Attributes:
    vocabularies: the opened vocabularies of the two sides.
    train: rows to train on.
    evaluation: held-out rows.
  """

  vocabularies: vocabulary_pair.Opened
  train: record_sets.RecordSet
  evaluation: record_sets.RecordSet


def check_vocabularies(data: data_section.DataConfig) -> None:
  """Checks vocabularies against the model's tables, before any long work.

  A vocabulary that is still to be trained gets the right size.

  Args:
    data: section `data` of the configuration.

  Raises:
    UserError: one is missing or damaged, has more tokens than the model's
      table has rows, or could not be exported.
  """
  choice = data.vocabularies
  if data.train_vocabulary and not vocabulary_pair.exists(choice.decoder):
    return
  opened = choice.open()
  for vocabulary in {*opened.sides.values()}:
    tokenizer_writer.check_convertible(vocabulary)
  for note in opened.check_tables(data.table_sizes):
    if distributed.is_lead():
      print(f'note: {note}')


def open_data(data: data_section.DataConfig) -> Data:
  """Opens vocabularies and records; makes them first if they are missing.

  They are made in a separate process, so that this one never imports
  TensorFlow.

  Args:
    data: section `data` of the configuration.

  Raises:
    UserError: the records or the vocabularies do not match the configuration,
      or differ between processes.
  """
  if distributed.is_lead() and materialization.is_missing(data):
    print('records are missing; encdec_adapt.materialize makes them')
    process_pool.run_in_subprocess(materialization.materialize, data)
  distributed.barrier('records', distributed.MAKE_TIMEOUT)
  opened = data.vocabularies.open()
  train_set, eval_set = materialization.open_sets(data, opened)
  distributed.require_same(
    'data',
    {
      'data.train': train_set.digests,
      'data.eval': eval_set.digests,
      'data.vocabularies': opened.describe(),
    },
  )
  return Data(opened, train_set, eval_set)


def reads_teacher_row(
  lengths: framing.Lengths, *models: model_config.ModelConfig
) -> bool:
  """Returns whether batches need the teacher's fields, which a model reads.

  Args:
    lengths: tokens of a row.
    *models: the models that read the batches.
  """
  sides = [model.architecture.sides(lengths.encoder > 0) for model in models]
  return any('teacher' in stacks.values() for stacks in sides)


def training_batches(
  record_set: record_sets.RecordSet,
  batch_size: int,
  where: state_lib.Placement,
  **options: Any,
) -> loader.Loader:
  """Opens the training batches of this process; see `loader.Loader`."""
  shards = placement.row_shards(where.mesh, where.rules)
  return loader.Loader(
    record_set,
    record_set.spec.lengths,
    batch_size,
    local=shards.rows(batch_size),
    **options,
  )


def evaluation_batches(
  record_set: record_sets.RecordSet,
  batch_size: int,
  where: state_lib.Placement,
  **options: Any,
) -> Iterator[framing.Batch]:
  """Opens the held-out batches of this process.

  See `loader.evaluation_batches`.
  """
  shards = placement.row_shards(where.mesh, where.rules)
  return loader.evaluation_batches(
    record_set,
    record_set.spec.lengths,
    batch_size,
    local=shards.rows(batch_size),
    **options,
  )


def describe_batch(
  rows: Mapping[str, Any],
  opened: vocabulary_pair.Opened,
  labels: Sequence[str] = (),
) -> str:
  """Decodes the first example of a process's rows, field by field.

  Args:
    rows: the rows.
    opened: vocabularies of the tokens.
    labels: names of the targets; without any they are tokens.
  """
  lines = ['the first example read for the first batch:']
  for field in ('encoder_tokens', 'decoder_tokens', 'targets'):
    if field in rows:
      side = field.partition('_')[0]
      if side == 'targets':
        # Those of an encoder-only model stand where it reads the tokens.
        side = 'decoder' if 'decoder_tokens' in rows else 'encoder'
      inside = rows[f'{side}_segments'][0] == 1
      tokens = rows[field][0][inside]
      if labels and field == 'targets':
        known = tokens[rows['weights'][0][inside] > 0]
        lines.append(f'  labels         {[labels[i] for i in known]}')
        continue
      text = opened.sides[side].decode(tokens, show_special=True, start=False)
      shown = text if len(text) < 160 else f'{text[:76]} ... {text[-76:]}'
      lines.append(f'  {field:<15}{len(tokens):>5} tokens  {shown!r}')
  return '\n'.join(lines)
