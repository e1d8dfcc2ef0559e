"""The shipped configurations, as the package `encdec_adapt.configs`.

The files (configurations, studies, plans, decoders) are in the folder configs/
of a checkout, or next to this module in an installed package. Importing
`encdec_adapt.configs.gemma2` works in both, and never imports a user's
top-level package `configs`.

This module must not import the files, and of the package only `base`.
"""

from collections.abc import Sequence
import pathlib

from encdec_adapt.base import errors

_PACKAGE = pathlib.Path(__file__).resolve().parent
FOLDER = _PACKAGE / 'configs'
if not FOLDER.is_dir():
  FOLDER = _PACKAGE.parent / 'configs'
# Makes this module a package with modules in FOLDER.
__path__ = [str(FOLDER)]


def path(name: str) -> str:
  """Returns the path of a shipped file or folder.

  Args:
    name: path relative to configs/, such as decoders/base.

  Returns:
    configs/NAME in the root of a checkout, as users type it (the manifests of
    records contain such paths); an absolute path elsewhere.
  """
  in_root = FOLDER.parent == pathlib.Path.cwd()
  return str(pathlib.Path('configs', name) if in_root else FOLDER / name)


def portable(text: str) -> str:
  """Replaces paths of shipped files in a text with configs/NAME.

  Digests of the result are the same in every folder and on every machine.

  Args:
    text: text with paths, such as the name of a source.
  """
  return text.replace(str(FOLDER), 'configs')


def locate(text: str, folders: Sequence[str] = ('', 'studies/')) -> str:
  """Returns the path of the configuration or study named by a flag.

  Args:
    text: FILE.py[:ARG], or the name of a shipped file, such as
      gemma2:size=2b_2b, or wang:size=cpu for a file in configs/studies.
    folders: folders to search; the first match is returned.

  Returns:
    FILE.py[:ARG].

  Raises:
    UserError: no shipped file has this name.
  """
  name, colon, argument = text.partition(':')
  folder, _, stem = name.rpartition('/')
  if folder not in ('', 'studies') or not stem.isidentifier():
    return text
  files = [*FOLDER.glob('*.py'), *FOLDER.glob('studies/*.py')]
  names = sorted(str(file.relative_to(FOLDER))[:-3] for file in files)
  for shipped in (parent + name for parent in folders):
    if shipped in names:
      return path(f'{shipped}.py') + colon + argument
  raise errors.UserError(
    f'{name!r} is not a shipped configuration; give the path of a file, such'
    f' as {name}.py, or one of {", ".join(names)}.'
  )
