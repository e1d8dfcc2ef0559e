"""`materialize --teacher`: stores a teacher's probabilities of all targets.

The teacher reads the training rows in batches of `config.train.eval_batch_size`
on `config.mesh`, one shard of the record set at a time; random numbers depend
only on the seed and the row number. On the same kind of devices, the bytes of a
shard therefore depend neither on the number of workers nor on restarts.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
import itertools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors, keys
from encdec_adapt.cluster import lock
from encdec_adapt.data.making import materialization, process_pool
from encdec_adapt.data.records import (
  loader,
  record_copy,
  record_sets,
  record_writing,
  row_order,
  stored_teacher,
)
from encdec_adapt.files import atomic, disk, paths
from encdec_adapt.models import execution
from encdec_adapt.ops import partition, sparse_teacher
from encdec_adapt.sharding import compiler, placement
from encdec_adapt.stored import model_on_disk
from encdec_adapt.tokenizers import special_ids
from encdec_adapt.training import setup
from encdec_adapt.training import state as state_lib
from encdec_adapt.training import step as step_lib
from encdec_adapt.training.jobs import job_models
from encdec_adapt.training.losses import distillation as distillation_loss
from encdec_adapt.training.losses import loss as loss_lib
from encdec_adapt.training.recipes import distillation_recipe
from encdec_adapt.training.recipes import recipe as recipe_lib
from encdec_adapt.training.sections import teacher_section

_Ranges = Mapping[record_writing.ShardKey, tuple[int, int]]


def store(
  settings: config_lib.Settings, checkpoint: str, form: str, tokens: int
) -> None:
  """Stores a teacher's probabilities for the existing training records.

  Args:
    settings: the configuration.
    checkpoint: the teacher, as in `config.teacher.checkpoint`.
    form: one of `sparse_teacher.FORMS`.
    tokens: stored tokens per target.

  Raises:
    UserError: the teacher cannot predict the targets or has another
      vocabulary, the folder has another stored teacher, or the disk is full.
  """
  recipe = _recipe(settings, checkpoint)
  mesh = setup.make_mesh(settings.mesh, settings.compute.compile_cache)
  device = mesh.devices.flat[0]
  compute = settings.compute.on(device.platform)
  rows = settings.train.eval_batch_size
  lengths = settings.data.train.lengths
  # Batches have `eval_batch_size` rows.
  setup.check_batches(
    settings.train, lengths, mesh, settings.rules, trains=False
  )
  source, records, _ = _open(settings, recipe)
  size = source.model.decoder.outputs
  if tokens > size:
    raise errors.UserError(
      f'--teacher_tokens={tokens}, and the vocabulary has {size:,} tokens.'
    )
  spec = stored_teacher.TeacherSpec(
    records.digests,
    records.spec.shards,
    checkpoint,
    source.fingerprint,
    form,
    tokens,
    size,
    settings.data.seed,
    rows,
    f'{device.device_kind} {dict(mesh.shape)} {compute.dtype}'
    f' {settings.teacher.dtype}',
  )
  folder = paths.at(settings.data.folder) / f'teacher-{form}-{tokens}'
  with lock.hold(folder):
    _make(settings, compute, recipe, records, spec, folder)
  print(
    f'{folder}: train with --config.loss.kind=distill'
    f' --config.teacher.checkpoint=stored:{folder}'
  )


def _recipe(
  settings: config_lib.Settings, checkpoint: str
) -> distillation_recipe.Distillation:
  """Returns the distillation recipe with this teacher and default options."""
  loss = distillation_loss.Distillation
  return distillation_recipe.Distillation.of(
    recipe_lib.Sections(
      loss,
      keys.defaults(loss),
      settings.model,
      settings.data,
      settings.init,
      teacher_section.TeacherConfig(checkpoint, settings.teacher.dtype),
      settings.train,
      settings.checkpoint,
      settings.evaluation,
    )
  )


def _open(
  settings: config_lib.Settings, recipe: distillation_recipe.Distillation
) -> tuple[
  model_on_disk.StoredModel, record_sets.RecordSet, special_ids.SideIds
]:
  data = settings.data
  source = job_models.open_frozen_model(
    recipe.frozen[loss_lib.TEACHER],
    settings.model,
    data.vocabularies,
    data.train.lengths,
  )
  opened = data.vocabularies.open()
  records, _ = materialization.open_sets(data, opened)
  return source, records, opened.decoder.ids


def _make(
  settings: config_lib.Settings,
  compute: execution.ComputeConfig,
  recipe: distillation_recipe.Distillation,
  records: record_sets.RecordSet,
  spec: stored_teacher.TeacherSpec,
  folder: paths.Path,
) -> None:
  local = record_copy.local_folder(folder)
  if (folder / stored_teacher.MANIFEST).exists():
    found, shards = stored_teacher.read_manifest(folder)
    if found != spec:
      raise errors.UserError(
        f'{folder} has another stored teacher, {found}; here it would be'
        f' {spec}. Remove it, or name another config.data.folder.'
      )
    if local != folder:
      record_copy.fetch(folder, shards)
  keys = record_writing.shard_keys(records.spec, records.parts)
  described = record_sets.shards(records.manifest).values()
  ends = itertools.accumulate((x['rows'] for x in described), initial=0)
  ranges = dict(zip(keys, itertools.pairwise(ends), strict=True))
  entries = {k: record_writing.finished_shard(local, spec, k) for k in keys}
  missing = [key for key in keys if entries[key] is None]
  counts = dict(zip(keys, (x['target_tokens'] for x in described), strict=True))
  targets = sum(counts[key] for key in missing)
  nbytes = targets * spec.token_bytes
  print(
    f'{folder}: {len(missing)} of {len(keys)} shards to make, {targets:,}'
    f' targets of {spec.token_bytes:,} bytes: {disk.format_bytes(nbytes)}',
    flush=True,
  )
  disk.require_space(local, nbytes, label='the probabilities of the teacher')
  # Processes cannot share an accelerator.
  workers = settings.data.workers if jax.default_backend() == 'cpu' else 1
  groups = [missing[i::workers] for i in range(workers)]
  jobs = [{key: ranges[key] for key in group} for group in groups if group]
  write = functools.partial(
    _write_shards, settings, compute, recipe, spec, local
  )
  for _, made in process_pool.run_jobs(write, jobs, workers):
    entries |= made
  shards = {
    record_writing.shard_path(local, spec, key)
    .relative_to(local)
    .as_posix(): entries[key]
    for key in keys
  }
  content = {'spec': dataclasses.asdict(spec), 'shards': shards}
  atomic.write_json(local / stored_teacher.MANIFEST, content)
  if local != folder:
    paths.upload(local, folder, stored_teacher.MANIFEST)


def _write_shards(
  settings: config_lib.Settings,
  compute: execution.ComputeConfig,
  recipe: distillation_recipe.Distillation,
  spec: stored_teacher.TeacherSpec,
  folder: pathlib.Path,
  shards: _Ranges,
) -> dict[record_writing.ShardKey, dict[str, Any]]:
  source, records, special = _open(settings, recipe)
  mesh = setup.make_mesh(settings.mesh, settings.compute.compile_cache)
  placed = setup.place_model(source.model, compute, mesh, settings.rules)
  dtype = settings.teacher.dtype or compute.dtype
  placed = dataclasses.replace(placed, dtype=dtype)
  params = source.read(placed)
  choose = _program(placed, spec, recipe.loss)
  teacher_row = setup.reads_teacher_row(records.spec.lengths, source.model)
  entries = {}

  def encoded(start: int, stop: int) -> Iterator[bytes]:
    for first in range(start, stop, spec.rows):
      numbers = np.arange(first, first + spec.rows)
      numbers[numbers >= stop] = row_order.FILLER
      batch = loader.read_batch(records, numbers, teacher_row)
      numbers = batch.pop('row')
      batch = recipe.rows.transform(batch, special)
      arrays = choose(params, numbers, step_lib.place_batch(batch, placed))
      ids, weights = map(np.asarray, arrays)
      for i in np.flatnonzero(numbers >= 0):
        n = np.sum(batch['decoder_segments'][i] > 0)
        yield spec.encode(ids[i, :n], weights[i, :n])

  for key, (start, stop) in shards.items():
    with record_writing.ShardWriter(folder, spec, key) as writer:
      for record in encoded(start, stop):
        writer.write_bytes(record)
      entries[key] = writer.finish()
    print(f'stored teacher: rows {start:,} to {stop:,}', flush=True)
  return entries


def _program(
  placed: state_lib.Placement,
  spec: stored_teacher.TeacherSpec,
  loss: distillation_loss.Distillation,
) -> Callable[..., tuple[jax.Array, jax.Array]]:
  """Returns the jitted (params, row numbers [B], batch) -> ids, weights."""
  model, stack = placed.model, placed.model.config.decoder

  def run(params, rows, batch):
    with partition.use(placed.mesh, placed.rules.as_dict()):
      read = loss.teacher_batch(batch)
      hidden = model.architecture.predict(model, params, read)
      key, shape = jax.random.key(spec.seed), (hidden.shape[1], spec.tokens)
      keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)
      ids, weights = sparse_teacher.choose(
        *model.projection(params, hidden),
        jax.vmap(lambda key: jax.random.uniform(key, shape))(keys),
        form=spec.form,
        vocab_size=stack.outputs,
        softcap=stack.final_softcap,
      )
      sentinels = loss.sentinels(batch)
      if sentinels is not None:  # Weights of equal ids add up.
        sentinels = sentinels[..., None]
        ids = jnp.where(sentinels < 0, ids, sentinels)
      return ids, weights

  return jax.jit(
    run,
    out_shardings=placement.replicated(placed.mesh),
    compiler_options=compiler.options(placed.mesh),
  )
