"""Saves, verifies, retains and restores checkpoints.

Only this module, `streaming` and `orbax_folder` import Orbax. A checkpoint
folder has one folder per step, named by the step number, with the items `state`
(the pytree), `data` (the data position) and `meta` (config, versions,
fingerprint), and a checksum manifest (`checksums`), because Orbax restores
flipped bytes silently.

A save copies the state to host memory and returns; a background thread waits
for Orbax to commit, reads the metadata and one array back, syncs, writes the
manifest, and only then deletes steps outside the retention. The next start may
find:
- `<step>.orbax-checkpoint-tmp`, `deleting-*`, and in a bucket a step without
  `commit_success.txt`: leftovers of a killed process; removed.
- a committed step without a manifest (killed in between): Orbax commits last,
  with a rename or in a bucket with that object. The step is read in full, array
  by array, and gets a manifest, or is moved aside.
- a step that differs from its manifest: moved aside to `damaged-<step>` with a
  warning, and the previous step is used. Orbax would otherwise silently skip
  saving that step again. If no undamaged step is left, the user decides
  (`check_not_lost`).
- a step with a manifest and an unreadable file: an error; the step stays.

With several processes, process 0 writes manifests, renames and deletes, and
broadcasts the result; every process calls every public method. The folder is on
a mounted file system or in a bucket.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
import contextlib
import dataclasses
import logging
import math
import os
import sys
from typing import Any
import warnings

import jax
import orbax.checkpoint as ocp

from encdec_adapt.base import errors, saved_keys
from encdec_adapt.checkpoints import (
  checkpoint_section,
  checksums,
  orbax_folder,
  state_leaves,
  step_folders,
)
from encdec_adapt.cluster import distributed
from encdec_adapt.files import disk, paths

FOLDER = step_folders.FOLDER  # Inside a work directory.

_LOSS = 'held_out_loss'  # In `meta` of evaluated steps.
_STATE, _DATA, _META = 'state', 'data', 'meta'
# A different model differs in every leaf: a few are enough.
_DIFFERENCES_SHOWN = 5
# Orbax times a save with the system clock, which may jump: the timeout is a
# century. The job's watchdog ends a hanging save.
_ASYNC = ocp.AsyncOptions(
  timeout_secs=100 * 365 * 86_400, create_directories_asynchronously=False
)

_Config = checkpoint_section.CheckpointConfig
_Path = str | os.PathLike[str]


class CheckpointError(RuntimeError):
  """A checkpoint was not saved."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """A readable step in a checkpoint folder.

  All processes restore together; each may call the other methods alone.

  Attributes:
    folder: the checkpoint folder.
    step: number of the step.
  """

  folder: paths.Path
  step: int

  @property
  def path(self) -> paths.Path:
    """Folder of the step."""
    return self.folder / str(self.step)

  def read_meta(self) -> dict[str, Any]:
    """Returns the saved `meta`; its `config` is translated to current keys."""
    meta = self._read_json(_META)
    if 'config' in meta:
      meta['config'] = saved_keys.translate(meta['config'])
    return meta

  def read_data(self) -> dict[str, Any]:
    """Returns the saved `data`."""
    return self._read_json(_DATA)

  def read_loss(self) -> float | None:
    """Returns the saved held-out loss, or None."""
    return self.read_meta().get(_LOSS)

  def _read_json(self, item: str) -> dict[str, Any]:
    # Not with a Checkpointer: its `restore` waits for all processes.
    return ocp.JsonCheckpointHandler().restore(self.path / item)

  def open_state(self) -> orbax_folder.OrbaxFolder:
    """Opens the state, to read arrays by name.

    PRNG keys appear as their stored integers.
    """
    return orbax_folder.OrbaxFolder(self.path / _STATE)

  def require_same(self, abstract: Any, *, partial: bool = False) -> None:
    """Checks that the stored state matches `abstract`; reads no arrays.

    Args:
      abstract: see `restore`.
      partial: see `restore`.

    Raises:
      UserError: a leaf is missing or has another shape or dtype.
    """
    differences = state_leaves.differences(
      self.open_state().arrays, abstract, partial=partial
    )
    if differences:
      more = len(differences) - _DIFFERENCES_SHOWN
      raise errors.UserError(
        f'The checkpoint {self.path} is of another model: '
        + '; '.join(differences[:_DIFFERENCES_SHOWN])
        + (f'; and {more} more leaves' if more > 0 else '')
        + '. Use the config it was made with (its meta item holds it), or'
        ' another checkpoint.'
      )

  def restore(self, abstract: Any, *, partial: bool = False) -> Any:
    """Restores the state with the shardings of `abstract`.

    Args:
      abstract: pytree of `jax.ShapeDtypeStruct`; the mesh may differ from the
        saved mesh. Leaves without a sharding go to the first local device.
      partial: `abstract` may lack leaves of the checkpoint, and floating
        dtypes may differ: values are cast.

    Returns:
      The tree of `abstract` with arrays as leaves.

    Raises:
      UserError: a leaf is missing or has another shape or dtype; raised before
        any array is read.
    """
    abstract = jax.tree.map(state_leaves.with_sharding, abstract)
    # Orbax's errors name neither the leaf nor the config to use.
    self.require_same(abstract, partial=partial)
    arguments = ocp.args.PyTreeRestore(
      item=abstract,
      restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
      partial_restore=partial,
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
      return checkpointer.restore(self.path / _STATE, args=arguments)

  def restore_params(self, abstract_params: Any) -> Any:
    """Restores only the parameters, or a subset of them.

    Args:
      abstract_params: a nested dict of `jax.ShapeDtypeStruct`, possibly a
        subset of the checkpoint's parameters. Floating dtypes are cast.

    Returns:
      The tree of `abstract_params` with arrays as leaves.

    Raises:
      UserError: the checkpoint's parameters have other paths or shapes.
    """
    return self.restore({'params': abstract_params}, partial=True)['params']

  def read_through(self, most: int | None = None) -> None:
    """Reads every item, array by array, and discards the values.

    Args:
      most: maximum number of arrays to read, smallest first; None for all.

    Raises:
      Exception: an item cannot be read; Orbax has no exception type for this.
    """
    self.read_data()
    self.read_meta()
    state = self.open_state()
    sizes = {x: math.prod(shape) for x, (shape, _) in state.arrays.items()}
    for name in sorted(sizes, key=sizes.get)[:most]:
      state.read([name])


class Checkpoints(contextlib.AbstractContextManager):
  """The checkpoints of a running job.

  Opening removes the leftovers of killed saves and deletions, so the caller
  must hold the lock of the work directory. Use as a context manager, or call
  `close`. Nothing can be saved after a failed save.
  """

  def __init__(self, folder: _Path, config: _Config = _Config()):
    """Opens the folder; creates it if it does not exist.

    Args:
      folder: the checkpoint folder.
      config: section `checkpoint`, with the retention rules.

    Raises:
      UserError: the folder cannot be written, or Orbax cannot read its path.
    """
    _hide_logged_errors()
    self._config = config
    self.folder = step_folders.absolute(folder)
    if distributed.is_lead():
      disk.require_writable(self.folder)
      step_folders.clean(self.folder)
    # Orbax lists the steps on opening: leftovers must be removed before.
    distributed.barrier('checkpoints-open')
    self._orbax = ocp.CheckpointManager(
      self.folder,
      item_handlers={
        # Weights barely compress, and compression doubles the save time.
        _STATE: ocp.PyTreeCheckpointHandler(use_compression=False),
        _DATA: ocp.JsonCheckpointHandler(),
        _META: ocp.JsonCheckpointHandler(),
      },
      options=ocp.CheckpointManagerOptions(create=False, async_options=_ASYNC),
    )
    # A single thread: saves complete in order.
    self._threads = futures.ThreadPoolExecutor(1, 'checkpoints')
    self._pending: futures.Future | None = None
    self._failed = False

  def __exit__(self, kind, error, traceback) -> None:
    """Completes the last save, even if the body raised an exception.

    After an exception, a failed save only prints a warning. If another process
    is missing, the save cannot complete and is not awaited.
    """
    if error is None:
      self.close()
    elif isinstance(error, Exception) and not isinstance(
      error, errors.AbsentError
    ):
      try:
        self.close()
      except Exception as save_error:  # The body raises its error.
        causes = error.__cause__, save_error.__cause__
        if not all(map(disk.full_disk, causes)):  # One report is enough.
          step_folders.warn(f'the last save failed too: {save_error}')

  def at(self, step: int) -> Checkpoint:
    """Returns a step for reading; does not verify it."""
    return Checkpoint(self.folder, step)

  def all_steps(self) -> list[int]:
    """Returns the committed steps, ascending, verified or not."""
    return step_folders.steps(self.folder)

  def save(
    self,
    step: int,
    state: Any,
    *,
    data: dict[str, Any],
    meta: dict[str, Any],
    loss: float | None = None,
  ) -> None:
    """Starts saving a step; returns once the state is in host memory.

    The state's buffers may be donated afterwards. Waits for the previous
    save, manifest included, and raises its error.

    Args:
      step: step number, above all steps in the folder.
      state: a pytree of jax arrays.
      data: data position; JSON types.
      meta: config, versions, fingerprint; JSON types.
      loss: held-out loss of the state; None if not evaluated.

    Raises:
      CheckpointError: this or the previous save failed.
      UserError: the disk is full.
    """
    self.wait()
    # Non-finite losses are not stored: they cannot be compared.
    if loss is not None and math.isfinite(loss):
      meta = {**meta, _LOSS: loss}
    try:
      items = {
        _STATE: ocp.args.PyTreeSave(state),
        _DATA: ocp.args.JsonSave(data),
        _META: ocp.args.JsonSave(meta),
      }
      started = self._orbax.save(step, args=ocp.args.Composite(**items))
    except Exception as error:
      raise self._not_saved(step, error) from error
    # Orbax silently skips a step at or below its latest.
    if not started:
      raise self._not_saved(
        step, f'the folder holds step {self._orbax.latest_step()} already'
      )
    self._pending = self._threads.submit(self._finalise, step)

  def wait(self) -> None:
    """Waits until the last save is complete on every process.

    Raises:
      CheckpointError: the save failed.
      UserError: the disk is full.
    """
    self._join()
    distributed.barrier('checkpoints-wait')

  def close(self) -> None:
    """Waits for this process's part of the last save, then stops threads.

    Raises:
      CheckpointError: the last save failed.
      UserError: the disk is full.
    """
    try:
      self._join()
    finally:
      self._threads.shutdown()
      # Orbax would raise the same failure again and mask the job's error.
      ignored = (Exception,) if self._failed else ()
      with contextlib.suppress(*ignored):
        self._orbax.close()

  def latest(self) -> Checkpoint | None:
    """Returns the newest undamaged checkpoint; None if there is none.

    Newer damaged steps are moved aside, with a warning on standard error, and
    can be saved again.

    Raises:
      UserError: a step cannot be read.
    """
    self.wait()
    step = distributed.from_lead(self._newest_verified, 'checkpoints-latest')
    # Orbax caches the steps, and would skip saving steps moved aside.
    self._orbax.reload()
    return None if step is None else self.at(step)

  def discard(self, first: int) -> int | None:
    """Deletes the steps from `first` on; nothing can be saved afterwards.

    Returns:
      The step that now represents the run: the best with `keep_best`, else the
      newest; None if no step is left.
    """
    self.wait()

    def delete() -> int | None:
      steps = self.all_steps()[::-1]
      for step in [x for x in steps if x >= first]:
        step_folders.delete(self.folder, step)
        steps.remove(step)
      ranked = _best_first(self.folder, steps) if self._config.keep_best else ()
      return next(iter(ranked or steps), None)

    return distributed.from_lead(delete, 'checkpoints-discard')

  def check_not_lost(self) -> None:
    """Checks that no damaged steps were moved aside, before a start at step 0.

    Raises:
      UserError: names the steps moved aside, now or at an earlier start.
    """
    damaged = distributed.from_lead(
      lambda: step_folders.damaged(self.folder), 'checkpoints-lost'
    )
    if damaged:
      raise errors.UserError(
        f'all checkpoints in {self.folder} are damaged and were moved aside as'
        f' {", ".join(damaged)}. Restore an undamaged copy of one, named by its'
        " step's number; or remove these folders, and the job begins again at"
        ' step 0, without its metrics.'
      )

  def require_space(self, abstract_state: Any, saves: Iterable[int]) -> None:
    """Checks that the disk has space for the job's checkpoints.

    The estimate is the uncompressed size of the peak number of checkpoints,
    including the checkpoint being written, minus those already on disk.

    Args:
      abstract_state: the largest saved state.
      saves: steps at which the job saves, ascending; may include already saved
        steps.

    Raises:
      UserError: there is too little free space.
    """
    existing = self.all_steps()
    missing = self._config.peak_count(existing, saves) - len(existing)
    disk.require_space(
      self.folder,
      missing * state_leaves.total_bytes(abstract_state),
      label=f'{missing} checkpoints',
      remedy=', or keep fewer (config.checkpoint.keep and .keep_every)',
    )

  def _not_saved(self, step: int, why: object) -> Exception:
    self._failed = True
    if full := disk.full_disk(why):
      return disk.cannot_write(self.folder, full)
    return CheckpointError(
      f'The checkpoint of step {step} was not saved in {self.folder}: {why}'
    )

  def _join(self) -> None:
    pending, self._pending = self._pending, None
    if pending is not None:
      pending.result()

  def _finalise(self, step: int) -> None:
    """Waits for the commit, then completes the save (background thread).

    Raises:
      CheckpointError: the save failed.
      UserError: the disk is full.
    """
    try:
      self._orbax.wait_until_finished()
      if distributed.is_lead():
        # In a bucket, a manifest could be written for a missing folder.
        if not self.at(step).path.is_dir():
          raise FileNotFoundError(f'{self.at(step).path} is not there')
        # Orbax may commit arrays that it cannot read back.
        self.at(step).read_through(1)
        checksums.write(self.at(step).path)
        self._delete_retired()
    except Exception as error:
      raise self._not_saved(step, error) from error

  def _delete_retired(self) -> None:
    # A step without a manifest may be unreadable: if it counted towards `keep`,
    # readable checkpoints would be deleted instead.
    complete = [
      step
      for step in self.all_steps()
      if checksums.has_manifest(self.at(step).path)
    ]
    losses: dict[int, float | None] = dict.fromkeys(complete)
    if self._config.keep_best:
      losses = _read_losses(self.folder, complete)
    best = next(iter(_by_loss(losses)), None)
    for step in self._config.retired(complete, best):
      if step in losses:  # An unreadable step may be the best.
        step_folders.delete(self.folder, step)

  def _newest_verified(self) -> int | None:
    """Returns the newest undamaged step; moves newer damaged steps aside."""
    for step in reversed(self.all_steps()):
      checkpoint = self.at(step)
      if checksums.has_manifest(checkpoint.path):
        problems = checksums.problems(checkpoint.path)
      else:
        problems = _complete_if_readable(checkpoint)
      if not problems:
        return step
      step_folders.move_aside(self.folder, step, problems)
    return None


def _hide_logged_errors() -> None:
  for name in ('absl', 'asyncio'):
    logging.getLogger(name).addFilter(lambda x: x.levelno < logging.ERROR)
  warnings.filterwarnings('ignore', 'coroutine .* was never awaited')
  # TensorStore's writes outlive the event loop of a failed save.
  sys.unraisablehook = lambda error: (
    'Event loop is closed' in str(error.exc_value)
    or sys.__unraisablehook__(error)
  )


def open_latest(path: _Path) -> Checkpoint:
  """Opens the newest undamaged checkpoint of a run, which may be in progress.

  Changes nothing: damaged steps, and steps without a manifest yet, are skipped
  with a warning.

  Args:
    path: a work directory, or its checkpoint folder.

  Raises:
    UserError: there is no complete checkpoint.
  """
  return _open_first(path, path, lambda _, steps: steps)


def open_best(path: _Path) -> Checkpoint:
  """Opens the undamaged checkpoint of a run with the lowest held-out loss.

  Without losses, opens the newest; otherwise like `open_latest`.
  """
  return _open_first(path, path, _best_first)


def open_step(path: _Path, step: int) -> Checkpoint:
  """Opens a step of a run; otherwise like `open_latest`.

  Raises:
    UserError: the step is missing or damaged.
  """
  return _open_first(
    f'{path}@{step}', path, lambda _, steps: [step] if step in steps else []
  )


def _read_losses(
  folder: paths.Path, steps: Iterable[int]
) -> dict[int, float | None]:
  losses = {}
  for step in steps:
    # The step may be damaged, or a running job may be deleting it.
    with contextlib.suppress(Exception):
      losses[step] = Checkpoint(folder, step).read_loss()
  return losses


def _by_loss(losses: Mapping[int, float | None]) -> list[int]:
  ranked = [step for step, loss in losses.items() if loss is not None]
  return sorted(ranked, key=lambda step: (losses[step], step))


def _best_first(folder: paths.Path, steps: Sequence[int]) -> list[int]:
  ranked = _by_loss(_read_losses(folder, steps))
  return ranked + [step for step in steps if step not in ranked]


def _open_first(
  name: _Path, path: _Path, order: Callable[[paths.Path, Any], Iterable[int]]
) -> Checkpoint:
  """Opens the first undamaged step, chosen by process 0.

  Args:
    name: name of the run, for messages.
    path: a work directory, or its checkpoint folder.
    order: gets the checkpoint folder and its steps, newest first; returns the
      steps to try in turn.
  """
  folder = step_folders.locate(path)

  def choose() -> int | None:
    steps = step_folders.steps(folder)
    step = step_folders.first_undamaged(folder, order(folder, steps[::-1]))
    # A running job may have deleted all listed steps and saved others.
    again = step is None and steps != step_folders.steps(folder)
    return choose() if again else step

  step = distributed.from_lead(choose, 'checkpoints-open')
  if step is None:
    steps = ', '.join(map(str, step_folders.steps(folder))) or 'none'
    raise errors.UserError(
      f'{name} has no undamaged checkpoint; {folder} holds the steps {steps}.'
      ' Name an undamaged one as RUN@STEP, or give the work directory of'
      ' another run (config.checkpoint.keep and .keep_every decide what a job'
      ' keeps).'
    )
  return Checkpoint(folder, step)


def _complete_if_readable(checkpoint: Checkpoint) -> list[str]:
  try:
    checkpoint.read_through()
  except Exception as error:  # Orbax has no exception type for damage.
    return [f'it has no checksum manifest and cannot be read ({error})']
  checksums.write(checkpoint.path)
  step_folders.warn(f'{checkpoint.path} had no checksum manifest; it has now.')
  return []
