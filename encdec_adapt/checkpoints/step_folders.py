"""Folders of checkpoints as they are stored: names, order, moves.

One folder per step, named by the number. Any other name is not a step, nor is
in a bucket one without the object by which Orbax commits.
"""

from collections.abc import Iterator, Sequence
import os
import sys

from encdec_adapt.checkpoints import checksums
from encdec_adapt.cli import errors
from encdec_adapt.files import disk, paths

FOLDER = 'checkpoints'  # Inside a work directory.

_DELETING = 'deleting'
_DAMAGED = 'damaged'
# What kills leave behind: half written steps, half deleted steps.
_LEFTOVERS = ('*.orbax-checkpoint-tmp*', f'{_DELETING}-*')
# Orbax puts it last, in a bucket; source: its path/atomicity.py.
COMMITTED = 'commit_success.txt'
_MARKERS = (checksums.FILE, COMMITTED)


def steps(folder: paths.Path) -> list[int]:
  """The steps in a folder, ascending; none if the folder does not exist."""
  return sorted(int(p.name) for p in _numbered(folder) if _is_committed(p))


def _numbered(folder: paths.Path) -> Iterator[paths.Path]:
  """Folders that are named like steps."""
  if folder.is_dir():
    for path in folder.iterdir():
      if path.name.isdecimal() and path.is_dir():
        yield path


def _is_committed(path: paths.Path) -> bool:
  """Whether all of a step is there; a file system shows no other."""
  return not paths.is_bucket(path) or (path / COMMITTED).exists()


def locate(path: str | os.PathLike[str]) -> tuple[paths.Path, Sequence[int]]:
  """Finds what a user's path means.

  Args:
    path: a work directory, a folder of checkpoints, or one step in it.

  Returns:
    The folder of checkpoints, and the steps in it that are meant.
  """
  path = paths.absolute(path)
  if path.name.isdecimal() and not (path / FOLDER).is_dir() and path.is_dir():
    if not steps(path):
      return path.parent, [int(path.name)]
  folder = path / FOLDER if (path / FOLDER).is_dir() else path
  return folder, steps(folder)


def clean(folder: paths.Path) -> None:
  """Removes what killed saves and deletions left behind."""
  for pattern in _LEFTOVERS:
    for path in folder.glob(pattern):
      paths.remove(path)
  for path in _numbered(folder):
    if not _is_committed(path):
      paths.remove(path)


def delete(folder: paths.Path, step: int) -> None:
  """Deletes a step. Killed halfway, it leaves nothing that looks like one."""
  path = folder / str(step)
  if not paths.is_bucket(folder):
    path = _move(path, _DELETING)
  paths.remove(path, _MARKERS)


def set_aside(folder: paths.Path, step: int, problems: list[str]) -> str:
  """Renames a damaged step to `damaged-...` and says so on standard error.

  The warning tells which step, unverified, is the one before it.

  Returns:
    The new name.

  Raises:
    UserError: the folder cannot be written.
  """
  try:
    moved = _move(folder / str(step), _DAMAGED)
  except OSError as error:
    raise disk.cannot_write(folder, error) from error
  older = [other for other in steps(folder) if other < step]
  before = f'the one before it is of step {older[-1]}' if older else ''
  warn(
    f'the checkpoint of step {step} is damaged: {"; ".join(problems)}. It is'
    f' set aside as {moved} (delete it when you like);'
    f' {before or "there is none before it"}.'
  )
  return moved.name


def damaged(folder: paths.Path) -> list[str]:
  """Names of the damaged steps that were set aside, in order."""
  return sorted(path.name for path in folder.glob(f'{_DAMAGED}-*'))


def lost(folder: paths.Path, names: list[str]) -> errors.UserError:
  """The error to raise where only damaged steps are left."""
  return errors.UserError(
    f'{folder} has no sound checkpoint any more: those that there were are'
    f' damaged and set aside as {", ".join(names)}. Put a sound copy of one'
    " back, named by its step's number; or remove these folders, and the job"
    ' starts anew at step 0, without its metrics.'
  )


def warn(text: str) -> None:
  """Prints a warning to standard error."""
  print(f'Warning: {text}', file=sys.stderr, flush=True)


def _move(path: paths.Path, prefix: str) -> paths.Path:
  """Moves step 12 to `prefix-00000012`, numbered if that is taken."""
  name = f'{prefix}-{int(path.name):08d}'
  target = path.with_name(name)
  number = 1
  while target.exists():
    number += 1
    target = path.with_name(f'{name}-{number}')
  paths.move(path, target, _MARKERS)
  return target
