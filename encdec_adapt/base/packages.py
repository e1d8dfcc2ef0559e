"""Optional packages: the extras of setup.py.

Of the package, this module must import only `errors`.
"""

import importlib.util
import pathlib

from encdec_adapt.base import errors

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def require(purpose: str, extra: str, *modules: str) -> None:
  """Checks that packages are installed, without importing them.

  Args:
    purpose: subject of the error, such as 'serving'.
    extra: the extra of setup.py with the packages.
    *modules: top-level modules of the packages.

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
    # pip adds the extra to the installed package, without looking up its name.
    return f"pip install 'encdec_adapt[{extra}]'"
  folder = '.' if pathlib.Path.cwd() == _ROOT else _ROOT
  return f"pip install -e '{folder}[{extra}]'"
