"""Checkpoints: Orbax writes the bytes, a seal of ours says they are true.

The only module that imports Orbax, but for `streamed` and `orbax_folder`. A
folder of checkpoints holds one folder per step, named by the number, with the
items `state` (the pytree), `data` (the position in the data) and `meta`
(config, versions, fingerprint), and `seal.json` (checkpoints/checksums.py).

A save copies the state to host memory and returns; a background thread waits
for Orbax to commit, syncs and seals the step, and only then deletes what
retention no longer keeps. What can be found at the next start:
- `<step>.orbax-checkpoint-tmp`, `deleting-*`, and in a bucket a step without
  `commit_success.txt`: left by a kill; removed.
- a committed step without a seal (killed between the two): Orbax commits by
  a rename, or in a bucket by that object, once all is written, so it is read
  in full, array by array, and sealed if that succeeds, else set aside.
- a sealed step whose files differ from the seal: set aside under the name
  `damaged-<step>`, with a warning, and the one before it is used. Orbax would
  restore flipped bytes without complaint, and would then silently refuse to
  save that step again. Where none is left, people decide (`check_not_lost`).
- a step that the disk does not let be read: an error, and it stays.

With several processes, process 0 seals, renames and deletes, and tells the
others what it found; every process calls every public method. The folder is
on a mounted file system or in a bucket.
"""

import collections
from collections.abc import Iterable, Sequence
from concurrent import futures
import dataclasses
import os
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from encdec_adapt.checkpoints import (
  checksums,
  retention,
  state_leaves,
  step_folders,
)
from encdec_adapt.cli import errors
from encdec_adapt.cluster import distributed
from encdec_adapt.files import disk, paths

FOLDER = step_folders.FOLDER  # Inside a work directory.

_STATE, _DATA, _META = 'state', 'data', 'meta'
_DIFFERENCES_SHOWN = 5

_Path = str | os.PathLike[str]


class CheckpointError(RuntimeError):
  """A save that did not happen."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
  """One step in a folder of checkpoints, for reading.

  Attributes:
    folder: the folder of checkpoints.
    step: the step.
  """

  folder: paths.Path
  step: int

  @property
  def path(self) -> paths.Path:
    """The step's own folder."""
    return self.folder / str(self.step)

  def read_meta(self) -> dict[str, Any]:
    """The `meta` given to `save`."""
    return self._read_json(_META)

  def read_data(self) -> dict[str, Any]:
    """The `data` given to `save`."""
    return self._read_json(_DATA)

  def _read_json(self, item: str) -> dict[str, Any]:
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer:
      return checkpointer.restore(self.path / item)

  def stored_leaves(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and dtype of every array of the state, by path.

    Reads no array. Random keys appear as the integers they are stored as.
    """
    metadata = ocp.PyTreeCheckpointHandler().metadata(self.path / _STATE)
    return {
      state_leaves.path_string(path): (tuple(leaf.shape), np.dtype(leaf.dtype))
      for path, leaf in jax.tree_util.tree_leaves_with_path(metadata.tree)
    }

  def require_same(self, abstract: Any, *, partial: bool = False) -> None:
    """Refuses a state that is not the one asked for; reads no array.

    Args:
      abstract: as of `restore`, like `partial`.
      partial: see there.

    Raises:
      UserError: a leaf is missing or has another shape or dtype.
    """
    differences = state_leaves.differences(
      self.stored_leaves(), abstract, partial=partial
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
    """Reads the state onto the shardings asked for.

    Args:
      abstract: the state's tree with `jax.ShapeDtypeStruct` leaves. A leaf
        without a sharding goes to the first local device.
      partial: `abstract` may lack leaves of the checkpoint, and its floating
        dtypes may differ from the checkpoint's: values are cast.

    Returns:
      The tree of `abstract` with arrays as leaves.

    Raises:
      UserError: a leaf is missing or has another shape or dtype; found
        before any array is read.
    """
    abstract = jax.tree.map(_with_sharding, abstract)
    self.require_same(abstract, partial=partial)
    arguments = ocp.args.PyTreeRestore(
      item=abstract,
      restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
      partial_restore=partial,
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
      restored = checkpointer.restore(self.path / _STATE, args=arguments)
    for path, leaf in jax.tree_util.tree_leaves_with_path(restored):
      if not isinstance(leaf, jax.Array):
        raise TypeError(
          f'{state_leaves.path_string(path)} was restored as {type(leaf)}.'
        )
    return restored

  def restore_params(self, abstract_params: Any, *, key: str = 'params') -> Any:
    """Reads the parameters, or some of them, and nothing else of the state.

    Args:
      abstract_params: a nested dict of `jax.ShapeDtypeStruct`; may lack
        branches of the checkpoint's parameters. Floating dtypes are cast.
      key: where in the state the parameters are.

    Returns:
      The tree of `abstract_params` with arrays as leaves.

    Raises:
      UserError: the checkpoint's parameters have other paths or shapes.
    """
    return self.restore({key: abstract_params}, partial=True)[key]

  def problems(self) -> list[str]:
    """What is wrong with a sealed step; empty if it is as it was written.

    Raises:
      UserError: it cannot be read, so that it is not known.
    """
    return checksums.problems(self.path)

  def read_through(self) -> None:
    """Reads every item, one array at a time, and keeps nothing.

    Raises:
      Exception: of whatever kind the item that cannot be read leads to.
    """
    self.read_data()
    self.read_meta()
    metadata = ocp.PyTreeCheckpointHandler().metadata(self.path / _STATE)
    leaves, structure = jax.tree_util.tree_flatten(metadata.tree)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
      for index in range(len(leaves)):
        item = [ocp.PLACEHOLDER] * len(leaves)
        item[index] = 0
        checkpointer.restore(
          self.path / _STATE,
          args=ocp.args.PyTreeRestore(
            item=structure.unflatten(item),
            restore_args=structure.unflatten(
              [ocp.RestoreArgs(restore_type=np.ndarray)] * len(leaves)
            ),
          ),
        )


class Checkpoints:
  """The checkpoints of a running job: saves, seals, keeps, verifies.

  Opening it removes what killed saves and deletions left behind, so the
  caller holds the work directory's lock. Use as a context manager, or call
  `close`.
  """

  def __init__(
    self, folder: _Path, *, keep: int = 2, keep_every: int | None = None
  ):
    """Opens the folder, making it if need be.

    Args:
      folder: of the checkpoints.
      keep: the newest so many sealed steps are kept; at least 1.
      keep_every: multiples of this step are kept for ever.

    Raises:
      UserError: a number is out of range, or the folder cannot be written.
    """
    self._retention = retention.Retention(keep, keep_every)
    self.folder = paths.absolute(folder)
    if distributed.is_lead():
      disk.require_writable(self.folder)
      step_folders.clean(self.folder)
    distributed.barrier('checkpoints-open')
    self._manager: ocp.CheckpointManager | None = self._open_manager()
    self._threads = futures.ThreadPoolExecutor(1, 'seal')
    self._pending: futures.Future | None = None
    self._pending_step: int | None = None
    self._sound: set[int] = set()
    # The first thing that is wrong with what was set aside at this start.
    self._aside = collections.defaultdict[str, list[str]](list)

  def __enter__(self) -> 'Checkpoints':
    return self

  def __exit__(self, kind, error, traceback) -> None:
    """Completes the last save, after a failure too; then says if that failed.

    A missing peer does not finish its part, so nothing is completed then.
    """
    if error is None:
      self.close()
    elif isinstance(error, Exception) and not isinstance(
      error, errors.AbsentError
    ):
      try:
        self.close()
      except Exception as failed:  # The first error is the one to raise.
        step_folders.warn(f'the last save failed too: {failed}')

  def at(self, step: int) -> Checkpoint:
    """The step, for reading. Says nothing about whether it is sound."""
    return Checkpoint(self.folder, step)

  def all_steps(self) -> list[int]:
    """Committed steps, ascending, verified or not."""
    return step_folders.steps(self.folder)

  def save(
    self, step: int, state: Any, *, data: dict[str, Any], meta: dict[str, Any]
  ) -> None:
    """Starts saving a step; returns once the state is in host memory.

    The state's buffers may be donated afterwards. Waits for the save before
    this one, sealing included, and raises what went wrong with it.

    Args:
      step: higher than every step in the folder.
      state: a pytree of jax arrays.
      data: what JSON can hold: the position in the data.
      meta: what JSON can hold: config, versions, fingerprint.

    Raises:
      CheckpointError: this save, or the one before it, did not happen.
    """
    self.wait()
    try:
      started = self._orbax.save(
        step,
        args=ocp.args.Composite(
          **{
            _STATE: ocp.args.PyTreeSave(state),
            _DATA: ocp.args.JsonSave(data),
            _META: ocp.args.JsonSave(meta),
          }
        ),
      )
    except Exception as error:
      self._drop_manager(error)
      raise self._not_saved(step, error) from error
    if not started:
      raise self._not_saved(
        step, f'the folder holds step {self._orbax.latest_step()} already'
      )
    self._sound.discard(step)
    self._pending_step = step
    self._pending = self._threads.submit(self._finalise, step)

  def wait(self) -> None:
    """Waits until the last save is sealed, on every process.

    Raises:
      CheckpointError: it did not happen.
    """
    self._join()
    distributed.barrier('checkpoints-wait')

  def close(self) -> None:
    """Waits for this process's part in the last save, releases threads.

    Raises:
      CheckpointError: the last save did not happen.
    """
    try:
      self._join()
    finally:
      self._threads.shutdown()
      if self._manager is not None:
        self._manager.close()

  def latest(self) -> int | None:
    """The newest step that is as it was written; None if there is none.

    Damaged steps above it are set aside, with a warning on standard error,
    and can be saved again.

    Raises:
      UserError: a step cannot be read, so that it is not known.
    """
    self.wait()
    found = distributed.from_lead(self._newest_sound, 'checkpoints-latest')
    # Orbax remembers steps; those set aside would be refused to a new save.
    self._orbax.reload()
    return found

  def check_not_lost(self) -> None:
    """Refuses to start anew where there were steps, and none is sound.

    Raises:
      UserError: names what was set aside, now or at an earlier start.
    """
    damaged = distributed.from_lead(
      lambda: [
        name + ''.join(f' ({problems})' for problems in self._aside[name])
        for name in step_folders.damaged(self.folder)
      ],
      'checkpoints-lost',
    )
    if damaged:
      raise step_folders.lost(self.folder, damaged)

  def restore(self, step: int, abstract_state: Any) -> Any:
    """Reads a verified step onto the shardings of `abstract_state`.

    Args:
      step: as returned by `latest`, or any other in the folder.
      abstract_state: the state's tree with `jax.ShapeDtypeStruct` leaves,
        each with its sharding; the mesh may differ from the one saved from.

    Raises:
      UserError: the step is absent or damaged (it is then set aside), or it
        is of another model.
    """
    self.wait()
    sound = distributed.from_lead(
      lambda: step if self._is_sound(step) else None, 'checkpoints-restore'
    )
    if sound is None:
      self._orbax.reload()
      raise errors.UserError(
        f'There is no sound checkpoint of step {step} in {self.folder}; it'
        f' has steps {self.all_steps()}.'
      )
    return self.at(step).restore(abstract_state)

  def read_meta(self, step: int) -> dict[str, Any]:
    """The `meta` given to `save`."""
    return self.at(step).read_meta()

  def read_data(self, step: int) -> dict[str, Any]:
    """The `data` given to `save`."""
    return self.at(step).read_data()

  def require_space(self, abstract_state: Any, saves: Iterable[int]) -> None:
    """Refuses a disk that cannot hold the checkpoints this job will keep.

    Counts the most that there are at a time by the rules of retention, the
    one being written too, less those that are there already, uncompressed.

    Args:
      abstract_state: what is saved at most.
      saves: the steps at which the job saves, ascending; those that it has
        behind it may be among them.

    Raises:
      UserError: there is too little free space.
    """
    there = self.all_steps()
    missing = self._retention.most(there, saves) - len(there)
    disk.require_space(
      self.folder,
      missing * state_leaves.total_bytes(abstract_state),
      what=f'{missing} checkpoints',
      remedy=', or keep fewer (config.checkpoint.keep and .keep_every)',
    )

  def _open_manager(self) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(
      self.folder,
      item_handlers={
        # Weights do not shrink, and compressing takes as long as the rest.
        _STATE: ocp.PyTreeCheckpointHandler(use_compression=False),
        _DATA: ocp.JsonCheckpointHandler(),
        _META: ocp.JsonCheckpointHandler(),
      },
      options=ocp.CheckpointManagerOptions(create=False),
    )

  @property
  def _orbax(self) -> ocp.CheckpointManager:
    """The manager; opened anew where a save had failed."""
    if self._manager is None:
      self._manager = self._open_manager()
    return self._manager

  def _drop_manager(self, failure: Exception) -> None:
    """A manager whose save failed raises that error for ever after."""
    manager, self._manager = self._manager, None
    if manager is None:
      return
    try:
      manager.close()
    except Exception as error:  # The failure that is being reported.
      if not errors.user_error_behind(failure):
        step_folders.warn(f'closing the checkpoint manager: {error}')

  def _not_saved(self, step: int, why: object) -> CheckpointError:
    return CheckpointError(
      f'The checkpoint of step {step} was not saved in {self.folder}: {why}'
    )

  def _join(self) -> None:
    """Waits for the finalising thread and raises what it met."""
    pending, self._pending = self._pending, None
    if pending is None:
      return
    try:
      pending.result()
    except Exception as error:
      self._drop_manager(error)
      raise self._not_saved(self._pending_step, error) from error

  def _finalise(self, step: int) -> None:
    """In the background: commit, seal, then drop what is not kept."""
    self._orbax.wait_until_finished()
    if not distributed.is_lead():
      return
    if not self.at(step).path.is_dir():
      raise FileNotFoundError(f'{self.at(step).path} is not there')
    checksums.write(self.at(step).path)
    self._retire()

  def _retire(self) -> None:
    steps = [
      s for s in self.all_steps() if checksums.is_sealed(self.at(s).path)
    ]
    for step in self._retention.retired(steps):
      step_folders.delete(self.folder, step)

  def _newest_sound(self) -> int | None:
    for step in reversed(self.all_steps()):
      if self._is_sound(step):
        return step
    return None

  def _is_sound(self, step: int) -> bool:
    """Verifies a step, sealing or setting it aside as need be."""
    if step in self._sound:
      return True
    checkpoint = self.at(step)
    if not checkpoint.path.is_dir():
      return False
    if checksums.is_sealed(checkpoint.path):
      found = checkpoint.problems()
    else:
      found = _seal_if_readable(checkpoint)
    if found:
      name = step_folders.set_aside(self.folder, step, found)
      self._aside[name].append(found[0])
      return False
    self._sound.add(step)
    return True


def open_latest(path: _Path) -> Checkpoint:
  """Finds the newest sound checkpoint of a run, which may be running.

  Changes nothing there: a damaged step is passed over with a warning, and so
  is a step that is not sealed yet.

  Args:
    path: a work directory, its folder of checkpoints, or one step in it.

  Raises:
    UserError: there is no sealed checkpoint, or the step named is damaged.
  """
  folder, steps = step_folders.locate(path)
  step = distributed.from_lead(
    lambda: _newest_sealed(folder, steps), 'checkpoints-open-latest'
  )
  if step is None:
    raise errors.UserError(
      f'There is no sound checkpoint in {path}. Give a work directory with a'
      f' folder {FOLDER!r}, that folder, or one step in it.'
    )
  return Checkpoint(folder, step)


def _newest_sealed(folder: paths.Path, steps: Sequence[int]) -> int | None:
  for step in reversed(steps):
    checkpoint = Checkpoint(folder, step)
    if not checksums.is_sealed(checkpoint.path):
      found = ['it is not sealed (yet)']
    else:
      found = checkpoint.problems()
    if not found:
      return step
    step_folders.warn(f'passing over {checkpoint.path}: {"; ".join(found)}')
  return None


def _seal_if_readable(checkpoint: Checkpoint) -> list[str]:
  try:
    checkpoint.read_through()
  except Exception as error:  # Damage has no one type: any failure counts,
    checksums.require_readable(
      checkpoint.path
    )  # unless the disk gives no answer.
    return [f'it has no seal and cannot be read ({error})']
  checksums.write(checkpoint.path)
  step_folders.warn(f'{checkpoint.path} was not sealed yet; it is now.')
  return []


def _with_sharding(leaf: Any) -> Any:
  if getattr(leaf, 'sharding', None) is not None:
    return leaf
  if jax.process_count() > 1:
    raise ValueError('With several processes every leaf needs a sharding.')
  sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
