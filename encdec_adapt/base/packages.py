"""Packages that not every job needs: the extras of setup.py.

This module must not import anything of the package but `errors`.
"""

import importlib.util
import pathlib

from encdec_adapt.base import errors

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def require(purpose: str, extra: str, *modules: str) -> None:
  """Refuses work whose packages are not installed; imports none of them.

  Args:
    purpose: what needs them, the subject of the error, such as 'serving'.
    extra: the extra of setup.py that installs them.
    *modules: their top-level modules.

  Raises:
    UserError: a module is missing; says how to install the extra.
  """
  for module in modules:
    if importlib.util.find_spec(module) is None:
      raise errors.UserError(
        f'{purpose} needs {module}: {install_command(extra)}'
      )


def install_command(extra: str) -> str:
  """Returns the shell command that installs an extra.

  Args:
    extra: name of the extra in setup.py.
  """
  if not (_ROOT / 'setup.py').is_file():
    # pip completes the installed package; the name is looked up nowhere.
    return f"pip install 'encdec_adapt[{extra}]'"
  folder = '.' if pathlib.Path.cwd() == _ROOT else _ROOT
  return f"pip install -e '{folder}[{extra}]'"
