"""`materialize --teacher`: stores a teacher's probabilities of all targets.

The teacher reads the training rows in batches of `config.train.eval_batch_size`
on `config.mesh`, shard by shard of the record set; draws are keyed by the seed
and the number of a row. So the bytes of a shard depend neither on the number of
workers nor on restarts, on the same kind of devices.
"""

from collections.abc import Callable
import dataclasses
import itertools
import pathlib
from typing import Any

import jax
import numpy as np

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.cluster import lock
from encdec_adapt.conversion import initial_state, model_on_disk
from encdec_adapt.data.making import materialization, process_pool
from encdec_adapt.data.records import (
  loader,
  record_copy,
  record_sets,
  record_writing,
  row_order,
  stored_teacher,
)
from encdec_adapt.files import disk, paths
from encdec_adapt.ops import partition, sparse_teacher
from encdec_adapt.sharding import compiler, placement
from encdec_adapt.training import setup
from encdec_adapt.training import state as state_lib
from encdec_adapt.training import step as step_lib
from encdec_adapt.training.losses import distillation

_Entries = dict[record_writing.ShardKey, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class _Job:
  """Shards that a process makes.

  Attributes:
    settings: configuration, of which `teacher` names the model.
    folder: local folder of the stored teacher.
    spec: its settings.
    shards: first row and end of each shard.
  """

  settings: config_lib.Settings
  folder: pathlib.Path
  spec: stored_teacher.TeacherSpec
  shards: dict[record_writing.ShardKey, tuple[int, int]]

  def __str__(self) -> str:
    return f'{len(self.shards)} shards of the stored teacher {self.folder}'


def store(
  settings: config_lib.Settings, checkpoint: str, form: str, tokens: int
) -> None:
  """Stores a teacher's probabilities for the training records that exist.

  Args:
    settings: the configuration.
    checkpoint: the teacher, as in `config.teacher.checkpoint`.
    form: one of `sparse_teacher.FORMS`.
    tokens: tokens of each target.

  Raises:
    UserError: the teacher cannot predict the targets or has another
      vocabulary, the folder has another stored teacher, or the disk is full.
  """
  teacher = dataclasses.replace(settings.teacher, checkpoint=checkpoint)
  settings = dataclasses.replace(settings, teacher=teacher)
  mesh = setup.make_mesh(settings.mesh, settings.compute.compile_cache)
  device = mesh.devices.flat[0]
  settings = settings.on(device.platform)
  source, records = _open(settings)
  size = source.model.decoder.outputs
  if tokens > size:
    raise errors.UserError(
      f'--teacher_tokens={tokens}, and the vocabulary has {size:,} tokens.'
    )
  spec = stored_teacher.TeacherSpec(
    records=records.digests,
    teacher=checkpoint,
    fingerprint=source.fingerprint,
    form=form,
    tokens=tokens,
    vocab_size=size,
    seed=settings.data.seed,
    rows=settings.train.eval_batch_size,
    devices=f'{device.device_kind} {dict(mesh.shape)}',
    dtypes=[settings.compute.dtype, _dtype(settings)],
    shards=records.spec.shards,
  )
  folder = paths.at(settings.data.folder) / f'teacher-{form}-{tokens}'
  with lock.hold(folder):
    _make(settings, records, spec, folder)
  print(
    f'{folder}: train with --config.loss.kind=distill'
    f' --config.teacher.checkpoint=stored:{folder}'
  )


def _make(
  settings: config_lib.Settings,
  records: record_sets.RecordSet,
  spec: stored_teacher.TeacherSpec,
  folder: paths.Path,
) -> None:
  """Makes the shards that are missing, and the manifest."""
  local = record_copy.local_folder(folder)
  if (folder / stored_teacher.MANIFEST).exists():
    manifest = stored_teacher.read_manifest(folder)
    if differences := [
      f'{name} is {manifest["spec"].get(name)!r} there and {value!r} here'
      for name, value in dataclasses.asdict(spec).items()
      if manifest['spec'].get(name) != value
    ]:
      raise errors.UserError(
        f'{folder} has another stored teacher: {"; ".join(differences)}. Remove'
        ' it, or name another config.data.folder.'
      )
    if local != folder:
      record_copy.fetch(folder, manifest['shards'])
  keys = record_writing.shard_keys(records.spec, records.parts)
  described = record_sets.shards(records.manifest).values()
  ends = itertools.accumulate((x['rows'] for x in described), initial=0)
  ranges = dict(zip(keys, itertools.pairwise(ends), strict=True))
  entries = {
    key: record_writing.finished_shard(local, spec, key) for key in keys
  }
  counts = dict(zip(keys, (x['target_tokens'] for x in described), strict=True))
  missing = [key for key in keys if entries[key] is None]
  targets = sum(counts[key] for key in missing)
  nbytes = targets * spec.token_bytes
  print(
    f'{folder}: {len(missing)} of {len(keys)} shards to make, {targets:,}'
    f' targets of {spec.token_bytes:,} bytes: {disk.format_bytes(nbytes)}',
    flush=True,
  )
  disk.require_space(local, nbytes, label='the probabilities of the teacher')
  # Processes cannot share an accelerator.
  on_cpu = jax.default_backend() == 'cpu'
  workers = min(settings.data.workers, len(missing)) if on_cpu else 1
  jobs = [
    _Job(
      settings, local, spec, {key: ranges[key] for key in missing[i::workers]}
    )
    for i in range(workers if missing else 0)
  ]
  for _, made in process_pool.run_jobs(_write_shards, jobs, workers):
    entries |= made
  names = (record_writing.shard_path(local, spec, key) for key in keys)
  shards = {
    name.relative_to(local).as_posix(): entries[key]
    for name, key in zip(names, keys, strict=True)
  }
  stored_teacher.write_manifest(local, spec, shards)
  if local != folder:
    paths.upload(local, folder, stored_teacher.MANIFEST)


def _dtype(settings: config_lib.Settings) -> str:
  """Returns the dtype of the teacher's parameters."""
  return settings.teacher.dtype or settings.compute.dtype


def _open(
  settings: config_lib.Settings,
) -> tuple[model_on_disk.StoredModel, record_sets.RecordSet]:
  """Opens the teacher and the training records."""
  data, loss = settings.data, distillation.Distillation()
  loss.check(settings.model, data.objectives)
  source = initial_state.open_reference(
    loss, settings.teacher, settings.model, data.vocabularies
  )
  records, _ = materialization.open_sets(data, data.vocabularies.open())
  return source, records


def _write_shards(job: _Job) -> _Entries:
  """Makes shards; returns their entries in the manifest."""
  settings, spec = job.settings, job.spec
  source, records = _open(settings)
  mesh = setup.make_mesh(settings.mesh, settings.compute.compile_cache)
  # Batches of these rows only.
  train = dataclasses.replace(
    settings.train, batch_size=spec.rows, microbatches=1
  )
  lengths = records.spec.lengths
  setup.check_batches(train, lengths, mesh, settings.rules)
  placed = setup.place_model(
    source.model, settings.compute, mesh, settings.rules
  )
  placed = dataclasses.replace(placed, dtype=_dtype(settings))
  params = source.read(placed)
  choose = _program(placed, spec, lengths.decoder, settings.loss.chunk)
  teacher_row = setup.reads_teacher_row(lengths, source.model)
  entries = {}
  for key, (start, stop) in job.shards.items():
    with record_writing.ShardWriter(job.folder, spec, key) as writer:
      targets = 0
      for first in range(start, stop, spec.rows):
        numbers = np.arange(first, first + spec.rows)
        numbers[numbers >= stop] = row_order.FILLER
        batch = loader.frame_rows(records, numbers, lengths, teacher_row)
        numbers = batch.pop('row')
        placed_batch = step_lib.place_batch(batch, placed)
        ids, weights = map(np.asarray, choose(params, numbers, placed_batch))
        counts = np.sum(batch['decoder_segments'] > 0, axis=1)
        for i in np.flatnonzero(numbers >= 0):
          n = counts[i]
          writer.write_bytes(spec.encode(ids[i, :n], weights[i, :n]))
        targets += int(counts.sum())
      entries[key] = writer.finish(target_tokens=targets)
    print(f'stored teacher: rows {start:,} to {stop:,}', flush=True)
  return entries


def _program(
  placed: state_lib.Placement,
  spec: stored_teacher.TeacherSpec,
  length: int,
  chunk: int,
) -> Callable[..., tuple[jax.Array, jax.Array]]:
  """Returns the jitted (params, row numbers [B], batch) -> ids, weights."""
  model, stack = placed.model, placed.model.config.decoder

  def run(params, rows, batch):
    with partition.use(placed.mesh, placed.rules.as_dict()):
      hidden = model.architecture.predict(model, params, batch)
      key = jax.random.key(spec.seed)
      draws = jax.vmap(
        lambda row: jax.random.uniform(
          jax.random.fold_in(key, row), (length, spec.tokens)
        )
      )(rows)
      return sparse_teacher.choose(
        hidden,
        model.head(params),
        draws,
        form=spec.form,
        vocab_size=stack.outputs,
        softcap=stack.final_softcap,
        chunk=chunk,
      )

  return jax.jit(
    run,
    out_shardings=placement.replicated(placed.mesh),
    compiler_options=compiler.options(placed.mesh),
  )
