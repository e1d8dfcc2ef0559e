"""Folders of checkpoints as a file system shows them: names, order, moves.

One folder per step, named by the number. Any other name is not a step.
"""

from collections.abc import Sequence
import os
import pathlib
import shutil
import sys

from encdec_adapt.runtime import disk

FOLDER = 'checkpoints'  # Inside a work directory.

_DELETING = 'deleting'
_DAMAGED = 'damaged'
# What kills leave behind: half written steps, half deleted steps.
_LEFTOVERS = ('*.orbax-checkpoint-tmp*', f'{_DELETING}-*')


def steps(folder: pathlib.Path) -> list[int]:
  """The steps in a folder, ascending; none if the folder does not exist."""
  if not folder.is_dir():
    return []
  return sorted(
    int(path.name)
    for path in folder.iterdir()
    if path.name.isdecimal() and path.is_dir()
  )


def locate(path: str | os.PathLike[str]) -> tuple[pathlib.Path, Sequence[int]]:
  """Finds what a user's path means.

  Args:
    path: a work directory, a folder of checkpoints, or one step in it.

  Returns:
    The folder of checkpoints, and the steps in it that are meant.
  """
  path = pathlib.Path(path).absolute()
  if path.name.isdecimal() and not (path / FOLDER).is_dir() and path.is_dir():
    if not steps(path):
      return path.parent, [int(path.name)]
  folder = path / FOLDER if (path / FOLDER).is_dir() else path
  return folder, steps(folder)


def clean(folder: pathlib.Path) -> None:
  """Removes what killed saves and deletions left behind."""
  for pattern in _LEFTOVERS:
    for path in folder.glob(pattern):
      shutil.rmtree(path)


def delete(folder: pathlib.Path, step: int) -> None:
  """Deletes a step. Killed halfway, it leaves nothing that looks like one."""
  shutil.rmtree(_move(folder / str(step), _DELETING))


def set_aside(folder: pathlib.Path, step: int, problems: list[str]) -> None:
  """Renames a damaged step to `damaged-...` and says so on standard error.

  Raises:
    UserError: the folder cannot be written.
  """
  try:
    moved = _move(folder / str(step), _DAMAGED)
  except OSError as error:
    raise disk.cannot_write(folder, error) from error
  warn(
    f'the checkpoint of step {step} is damaged: {"; ".join(problems)}. It is'
    f' set aside as {moved} (delete it when you like), and the one before it'
    ' is used.'
  )


def warn(text: str) -> None:
  """Prints a warning to standard error."""
  print(f'Warning: {text}', file=sys.stderr, flush=True)


def _move(path: pathlib.Path, prefix: str) -> pathlib.Path:
  """Renames step 12 to `prefix-00000012`, numbered if that is taken."""
  name = f'{prefix}-{int(path.name):08d}'
  target = path.with_name(name)
  number = 1
  while target.exists():
    number += 1
    target = path.with_name(f'{name}-{number}')
  return path.rename(target)
