"""Layout of a checkpoint folder: names, lists and renames steps.

There is one folder per step, named by the step number. Other names are not
steps, nor, in a bucket, are folders without Orbax's commit object.
"""

from collections.abc import Iterable, Iterator
import os
import sys

from encdec_adapt.base import errors
from encdec_adapt.checkpoints import checksums
from encdec_adapt.files import disk, paths

FOLDER = 'checkpoints'  # Inside a work directory.

_DELETING = 'deleting'
_DAMAGED = 'damaged'
# Leftovers of killed processes: partially written or deleted steps.
_LEFTOVERS = ('*.orbax-checkpoint-tmp*', f'{_DELETING}-*')
# Written last by Orbax in a bucket; source: its path/atomicity.py.
COMMITTED = 'commit_success.txt'
_MARKERS = (checksums.FILE, COMMITTED)


def steps(folder: paths.Path) -> list[int]:
  """Returns the committed steps in a folder, ascending; none if missing."""
  return sorted(int(p.name) for p in _numbered(folder) if _is_committed(p))


def _numbered(folder: paths.Path) -> Iterator[paths.Path]:
  if folder.is_dir():
    for path in folder.iterdir():
      if path.name.isdecimal() and path.is_dir():
        yield path


def _is_committed(path: paths.Path) -> bool:
  # On file systems Orbax commits with a rename, so the name is enough.
  return not paths.is_bucket(path) or (path / COMMITTED).exists()


def absolute(path: str | os.PathLike[str]) -> paths.Path:
  """Returns the absolute path of a folder for Orbax.

  All paths passed to Orbax go through here.

  Raises:
    UserError: Orbax could write checkpoints there, but not read them.
  """
  path = paths.absolute(path)
  # Orbax finds array metadata by globbing the whole path, and TensorStore
  # accepts only UTF-8 paths (no surrogates).
  bad = {x for x in str(path) if x in '[]*?\\' or '\ud800' <= x <= '\udfff'}
  if bad:
    raise errors.UserError(
      f'{path} has {" ".join(map(ascii, sorted(bad)))} in it, and checkpoints'
      ' below it cannot be read; rename the folder, or choose another.'
    )
  return path


def locate(path: str | os.PathLike[str]) -> paths.Path:
  """Resolves a user's path to a checkpoint folder.

  Args:
    path: a work directory or a checkpoint folder.

  Raises:
    UserError: see `absolute`.
  """
  path = absolute(path)
  return path / FOLDER if (path / FOLDER).is_dir() else path


def first_undamaged(folder: paths.Path, steps: Iterable[int]) -> int | None:
  """Returns the first step that matches its manifest, or None.

  Damaged or unverified steps before it are skipped with a warning.

  Raises:
    UserError: a step cannot be read.
  """
  for step in steps:
    path = folder / str(step)
    # Not moved aside: a running job may be about to write the manifest.
    problems = ['it has no checksum manifest (yet)']
    if checksums.has_manifest(path):
      problems = checksums.problems(path)
    if not problems:
      return step
    warn(f'skipping {path}: {"; ".join(problems)}')
  return None


def clean(folder: paths.Path) -> None:
  """Removes the leftovers of killed saves and deletions."""
  for pattern in _LEFTOVERS:
    for path in folder.glob(pattern):
      paths.remove(path)
  for path in _numbered(folder):
    if not _is_committed(path):
      paths.remove(path)


def delete(folder: paths.Path, step: int) -> None:
  """Deletes a step; if killed halfway, no apparent step remains."""
  path = folder / str(step)
  # Buckets have no renames: moving would copy every object. Removing the
  # markers first has the same effect.
  if not paths.is_bucket(folder):
    path = _move(path, _DELETING)
  paths.remove(path, _MARKERS)


def move_aside(folder: paths.Path, step: int, problems: list[str]) -> None:
  """Renames a damaged step to `damaged-...` with a warning.

  Raises:
    UserError: the folder cannot be written.
  """
  with disk.writing(folder):
    moved = _move(folder / str(step), _DAMAGED)
  warn(
    f'the checkpoint of step {step} is damaged: {"; ".join(problems)}. It was'
    f' moved to {moved}; delete it when it is of no use.'
  )


def damaged(folder: paths.Path) -> list[str]:
  """Returns the sorted names of damaged steps moved aside."""
  return sorted(path.name for path in folder.glob(f'{_DAMAGED}-*'))


def warn(text: str) -> None:
  """Prints a warning to standard error."""
  print(f'Warning: {text}', file=sys.stderr, flush=True)


def _move(path: paths.Path, prefix: str) -> paths.Path:
  name = f'{prefix}-{int(path.name):08d}'
  target = path.with_name(name)
  number = 1
  while target.exists():
    number += 1
    target = path.with_name(f'{name}-{number}')
  paths.move(path, target, _MARKERS)
  return target
