"""Builds mesh, models and data for training and the other commands.

Functions take sections of the configuration; this module does not import
`config`. Only `training.jobs` and `training.start` read stored
models.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
import numpy as np

from encdec_adapt.base import errors
from encdec_adapt.checkpoints import checkpoint_section, manager
from encdec_adapt.cluster import distributed
from encdec_adapt.data import data_section
from encdec_adapt.data.making import materialization, process_pool
from encdec_adapt.data.records import loader, manifest_summary, record_sets
from encdec_adapt.models import adapters as adapters_lib
from encdec_adapt.models import build, execution, forward_flops, model_config
from encdec_adapt.objectives import framing
from encdec_adapt.ops import attention
from encdec_adapt.ops import partition as partition_lib
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.sharding import placement as placement_lib
from encdec_adapt.sharding import rules as rules_lib
from encdec_adapt.telemetry import environment, trackers
from encdec_adapt.tokenizers import (
  chat_format,
  special_ids,
  tokenizer_writer,
  vocabulary_pair,
)
from encdec_adapt.training import phases as phases_lib
from encdec_adapt.training import state as state_lib
from encdec_adapt.training.recipes import recipe as recipe_lib
from encdec_adapt.training.sections import train_section

# Special ids for rows of padding: only their shapes matter, so no vocabulary
# needs to be opened.
PADDING = special_ids.Framing(*[special_ids.SideIds(0, 0, 0)] * 2)

# -- Mesh ----------------------------------------------------------------------


def make_mesh(config: mesh_lib.MeshConfig, cache: str = '') -> Mesh:
  """Enables the compile cache and builds the mesh over all devices.

  Args:
    config: sizes of the axes.
    cache: folder of the compilation cache, '' for none.

  Raises:
    UserError: the sizes do not multiply to the number of devices.
  """
  if cache:
    environment.enable_compile_cache(cache)
  try:
    return mesh_lib.make_mesh(config)
  except ValueError as error:
    raise errors.UserError(str(error)) from error


def fingerprint(mesh: Mesh) -> dict[str, Any]:
  """Returns the environment and mesh that a bit-equal resume requires."""
  return environment.fingerprint() | {'mesh': dict(mesh.shape)}


def check_job(
  train: train_section.TrainConfig,
  data: data_section.DataConfig,
  compute: execution.ComputeConfig,
  mesh: Mesh,
  rules: rules_lib.Rules,
) -> None:
  """Checks a job against its devices, before any long work.

  Args:
    train: section `train` of the configuration.
    data: section `data`.
    compute: section `compute`.
    mesh: the device mesh.
    rules: mapping of logical to mesh axes.

  Raises:
    UserError: the devices cannot run the attention backend, batches do not
      divide over the mesh, a vocabulary is unsuitable, or a tracker is missing.
  """
  check_attention(compute.attention, mesh.devices.flat[0].platform)
  check_batches(train, data.train.lengths, mesh, rules)
  check_vocabularies(data)
  if distributed.is_lead():
    trackers.check(train.trackers)


def check_batches(
  train: train_section.TrainConfig,
  lengths: framing.Lengths,
  mesh: Mesh,
  rules: rules_lib.Rules,
  *,
  trains: bool = True,
) -> None:
  """Checks that batches and lengths divide over the mesh.

  Args:
    train: section `train` of the configuration.
    lengths: tokens of a row.
    mesh: the device mesh.
    rules: mapping of logical to mesh axes.
    trains: whether there are training batches, not just those of evaluation.

  Raises:
    UserError: names the key, its value and the number of shards.
  """
  partition = partition_lib.Partition(mesh, rules.as_dict())
  microbatches = ''
  if train.microbatches > 1:
    microbatches = f'over {train.microbatches} microbatches and '
  batch, length = partition.size('batch'), partition.size('length')
  for key, size, shards in (
    (
      'train.batch_size',
      train.batch_size if trains else 0,
      batch * train.microbatches,
    ),
    ('train.eval_batch_size', train.eval_batch_size, batch),
    ('data.encoder_length', lengths.encoder, length),
    ('data.decoder_length', lengths.decoder, length),
    ('train.rollouts.tokens', train.rollouts.tokens, length),
  ):
    if size % shards:
      parts = microbatches if key == 'train.batch_size' else ''
      raise errors.UserError(
        f'config.{key} is {size}; it must divide {parts}over the mesh'
        f' {dict(mesh.shape)}, so by {shards}. Change it or config.mesh.'
      )


def require_space(
  checkpoints: manager.Checkpoints,
  phases: phases_lib.Phases,
  config: checkpoint_section.CheckpointConfig,
  steps: int,
) -> None:
  """Checks the disk space for the checkpoints of a job.

  Args:
    checkpoints: the checkpoints of the job.
    phases: the phases of the job.
    config: section `checkpoint` of the configuration.
    steps: steps of the job; 0 (unknown) counts a single checkpoint.

  Raises:
    UserError: the disk has too little space.
  """
  every = config.interval(steps)
  saves = {*range(every, steps, every), steps}
  saves |= {group.start for group in phases.groups if group.start}
  checkpoints.require_space(phases.abstract(), sorted(saves))


# -- Models --------------------------------------------------------------------


def check_positions(
  model: model_config.ModelConfig, lengths: framing.Lengths
) -> None:
  """Checks that rows fit the learned positions of a model.

  Args:
    model: the model's shape.
    lengths: tokens of a row.

  Raises:
    UserError: see `model_config.check_positions`.
  """
  for name, side in model.architecture.sides(lengths.encoder > 0).items():
    remedy = f'shorten them by config.data.{side}_length'
    model_config.check_positions(model, {name: getattr(lengths, side)}, remedy)


def check_attention(chosen: str, platform: str) -> None:
  """Checks that the platform supports an attention backend.

  Args:
    chosen: `config.compute.attention`.
    platform: 'cpu', 'gpu' or 'tpu'.

  Raises:
    UserError: names the key, its value and the backends of the devices.
  """
  backends = attention.on_platform(platform)
  if chosen not in backends:
    platforms = sorted(attention.BACKENDS[chosen].platforms)
    raise errors.UserError(
      f'config.compute.attention is {chosen!r}, which needs'
      f' {" or ".join(platforms)}; the devices are {platform}, which can run'
      f' {", ".join(backends)}.'
    )


def check_stacks(
  compute: execution.ComputeConfig,
  model: model_config.ModelConfig,
  device: jax.Device,
) -> None:
  """Checks that the attention backend supports the masks and heads of a model.

  Of layers with heads of two dimensions one kind must fit; a note says which
  layers have 'chunked' attention.

  Args:
    compute: section `compute` of the configuration, without 'auto'.
    model: the model's shape.
    device: a device of the job.

  Raises:
    UserError: names what the backend does not support.
  """
  name = compute.attention
  for side, stack in model.stacks.items():
    spec = stack.mask('global').replace(
      memory=int(stack.cross_merged), aligned=not stack.cross_merged
    )
    widths = {layer.head_dim for layer in stack.kinds}
    taken = {x for x in widths if attention.for_heads(name, x) == name}
    attention.check(
      name,
      spec,
      compute.dtype,
      max(taken or widths),
      device,
      bias=stack.relative is not None,
    )
    if taken < widths and distributed.is_lead():
      print(
        f'note: layers of the {side} with heads of {max(widths)} have'
        f" 'chunked' attention, and {name!r} the others."
      )


def place_model(
  model: model_config.ModelConfig,
  compute: execution.ComputeConfig,
  mesh: Mesh | AbstractMesh,
  rules: rules_lib.Rules,
  adapters: adapters_lib.Adapters | None = None,
) -> state_lib.Placement:
  """Builds a model and the shardings of its parameters on the mesh.

  Args:
    model: the model's shape.
    compute: section `compute` of the configuration.
    mesh: the device mesh.
    rules: mapping of logical to mesh axes.
    adapters: adapters over the model, None for full training.

  Raises:
    UserError: a parameter does not divide over the mesh.
  """
  attention.BACKENDS[compute.attention].load()
  placement = state_lib.Placement(
    build.build(model, compute), mesh, rules, adapters=adapters
  )
  # Shardings of arrays that do not divide raise.
  try:
    placement.abstract_params()
    placement.abstract_base()
    # Also check the base: no adapter may have its vocabulary axis.
    dataclasses.replace(placement, adapters=None).abstract_params()
  except ValueError as error:
    raise errors.UserError(
      f'{error} Use another mesh (config.mesh), or another'
      ' config.model.*.vocab_multiple if it is the vocabulary.'
    ) from error
  return placement


def step_flops(
  recipe: recipe_lib.Recipe,
  rows: int,
  references: Iterable[model_config.ModelConfig] = (),
  frozen: bool = False,
) -> float:
  """Returns the model FLOPs of a training step on all devices.

  Args:
    recipe: the kind of training.
    rows: rows of the batch.
    references: frozen models, each with one forward pass.
    frozen: whether only adapters train, without gradients of the kernels.
  """
  row, lengths = recipe.rows, recipe.rows.lengths
  sizes = lengths.encoder, lengths.decoder, lengths.teacher, row.answers

  def forward(config: model_config.ModelConfig) -> int:
    return forward_flops.forward(config, *sizes, logits=row.logits)

  # References have no backward pass. Without kernel gradients, the backward
  # pass costs as much as the forward pass; adapters are not counted.
  passes = 2 if frozen else forward_flops.TRAINING
  total = passes * forward(recipe.model)
  return float((total + sum(map(forward, references))) * rows)


def job_flops(
  recipe: recipe_lib.Recipe,
  rows: int,
  references: Iterable[model_config.ModelConfig] = (),
  frozen: bool = False,
) -> float:
  """Returns the model FLOPs of a step, including sampling."""
  total = step_flops(recipe, rows, references, frozen)
  if sampling := recipe.sampling:
    # Reward models are not counted.
    sizes = recipe.rows.lengths.encoder, sampling.tokens
    prefill, decode = forward_flops.generation(recipe.model, *sizes)
    total += sampling.rows(rows) * (prefill + sampling.samples * decode)
  return total


# -- Data ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Data:
  """Vocabularies and records of a job.

  Attributes:
    vocabularies: the opened vocabularies of the two sides.
    train: rows to train on.
    evaluation: held-out rows for evaluation.
  """

  vocabularies: vocabulary_pair.Opened
  train: record_sets.RecordSet
  evaluation: record_sets.RecordSet


def check_vocabularies(data: data_section.DataConfig) -> None:
  """Checks vocabularies against the model's tables, before any long work.

  Untrained vocabularies are skipped: they will get the right size.

  Args:
    data: section `data` of the configuration.

  Raises:
    UserError: a vocabulary is missing or damaged, lacks the tokens of the chat
      format, has more tokens than the model's table has rows, or could not be
      exported.
  """
  choice = data.vocabularies
  if materialization.is_untrained(data):
    return
  opened = choice.open()
  chat_format.require(opened.decoder, data.chat_format)
  # A set: both sides may share a vocabulary.
  for vocabulary in {*opened.sides.values()}:
    tokenizer_writer.check_convertible(vocabulary)
  notes = opened.check_tables(data.table_sizes)
  # Materialization prints the same notes.
  if distributed.is_lead() and not materialization.is_missing(data):
    for note in notes:
      print(f'note: {note}')


def open_data(data: data_section.DataConfig) -> Data:
  """Opens vocabularies and records; materializes missing records first.

  Materialization runs in a separate process, so that the training process never
  imports TensorFlow (sources `tfds:` and `seqio:`).

  Args:
    data: section `data` of the configuration.

  Raises:
    UserError: the records or the vocabularies do not match the configuration,
      or differ between processes.
  """
  is_lead = distributed.is_lead()
  missing = is_lead and materialization.is_missing(data)
  if missing:
    print('records are missing; encdec_adapt.materialize makes them')
    process_pool.run_in_subprocess(materialization.materialize, data)
  # The other processes open the files of process 0.
  distributed.barrier('records', distributed.MAKE_TIMEOUT)
  # After the barrier: the vocabulary may have just been trained.
  opened = data.vocabularies.open()
  train_set, eval_set = materialization.open_sets(data, opened)
  if is_lead and not missing:  # Materialization has printed it.
    for records in (eval_set, train_set):
      summary = manifest_summary.describe(records.manifest)
      print(f'{records.folder}: {summary}')
  # A stale copy on one host would silently give it different rows.
  distributed.require_same(
    'data',
    {
      'data.train': train_set.digests,
      'data.eval': eval_set.digests,
      'data.vocabularies': opened.describe(),
    },
  )
  if data.development_rows:
    eval_set = eval_set.development(data.development_rows)
  return Data(opened, train_set, eval_set)


def reads_teacher_row(
  lengths: framing.Lengths, *models: model_config.ModelConfig
) -> bool:
  """Returns whether a model reads the teacher's fields of batches.

  Args:
    lengths: tokens of a row.
    *models: the models of the job.
  """
  sides = [model.architecture.sides(lengths.encoder > 0) for model in models]
  return any('teacher' in stacks.values() for stacks in sides)


def training_batches(
  record_set: record_sets.RecordSet,
  batch_size: int,
  placement: state_lib.Placement,
  **options: Any,
) -> loader.Loader:
  """Opens the training batches of this process; see `loader.Loader`."""
  rows = local_rows(batch_size, placement)
  return loader.Loader(record_set, batch_size, local=rows, **options)


def abstract_batch(
  placement: state_lib.Placement,
  rows: recipe_lib.Rows,
  batch_size: int,
  *,
  teacher: bool,
) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns shapes and shardings of a training batch.

  Args:
    placement: the trained model and its mesh.
    rows: the rows of the recipe.
    batch_size: rows of the batch.
    teacher: whether to include the teacher's fields.
  """
  shapes = {
    name: jax.ShapeDtypeStruct((batch_size, *value.shape[1:]), value.dtype)
    for name, value in rows.padding(PADDING, teacher=teacher).items()
  }
  axes = placement_lib.batch_axes(shapes, rows.axes)
  shardings = placement_lib.shardings(
    shapes, axes, placement.mesh, placement.rules
  )
  return jax.tree.map(
    lambda leaf, sharding: leaf.update(sharding=sharding), shapes, shardings
  )


def evaluation_batches(
  record_set: record_sets.RecordSet,
  batch_size: int,
  placement: state_lib.Placement,
  **options: Any,
) -> Iterator[framing.Batch]:
  """Opens this process's held-out batches; see `loader.evaluation_batches`."""
  rows = local_rows(batch_size, placement)
  return loader.evaluation_batches(
    record_set, batch_size, local=rows, **options
  )


def local_rows(batch_size: int, placement: state_lib.Placement) -> list[int]:
  """Returns the indices of this process's rows in a global batch."""
  shards = placement_lib.row_shards(placement.mesh, placement.rules)
  return shards.rows(batch_size)


def describe_batch(
  rows: Mapping[str, Any],
  opened: vocabulary_pair.Opened,
  labels: Sequence[str] = (),
) -> str:
  """Decodes the first example of a process's rows, field by field.

  Args:
    rows: the rows.
    opened: vocabularies of the tokens.
    labels: names of the target labels; empty if targets are tokens.
  """
  lines = ['the first example read for the first batch:']
  for field in ('encoder_tokens', 'decoder_tokens', 'targets'):
    if field in rows:
      side = field.partition('_')[0]
      if side == 'targets':
        # Targets of encoder-only models align with the encoder's tokens.
        side = 'decoder' if 'decoder_tokens' in rows else 'encoder'
      # Rows are packed: segment 1 is the first example, or its first text.
      texts = 1
      if 'owners' in rows:
        is_text = rows['roles'][0] > 0
        texts = int(np.sum(is_text & (rows['owners'][0] == 0)))
      mask = rows[f'{side}_segments'][0] == np.arange(1, texts + 1)[:, None]
      if labels and field == 'targets':
        # Positions of weight 0 have no label.
        ids = rows[field][0][mask[0] & (rows['weights'][0] > 0)]
        lines.append(f'  labels         {[labels[i] for i in ids]}')
        continue
      # Several answers are several rows.
      parts = np.broadcast_to(rows[field][0], mask.shape)
      for row, selected in zip(parts, mask, strict=True):
        tokens = row[selected]
        text = opened.sides[side].decode(tokens, show_special=True, start=False)
        shown = text if len(text) < 160 else f'{text[:76]} ... {text[-76:]}'
        lines.append(f'  {field:<15}{len(tokens):>5} tokens  {shown!r}')
  return '\n'.join(lines)
