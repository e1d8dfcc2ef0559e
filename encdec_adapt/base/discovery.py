"""Modules of a package that are found, not listed.

Objectives and losses are such modules: adding one changes no other file. This
module must not import anything of the package.
"""

from collections.abc import Iterator
import importlib
import pkgutil
from types import ModuleType


def modules_of(package: ModuleType) -> Iterator[ModuleType]:
  """Imports and yields the modules of a package, in alphabetical order.

  Args:
    package: the package, which may be half imported: a module of it may call
      this, and is yielded as it is.
  """
  for module in pkgutil.iter_modules(package.__path__):
    yield importlib.import_module(f'{package.__name__}.{module.name}')
