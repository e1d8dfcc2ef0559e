"""Automatic discovery of the modules of a package.

Objectives, sources and losses are discovered, so that additions change no other
file. This module must not import anything of the package.
"""

from collections.abc import Iterator
import importlib
import pkgutil
from types import ModuleType


def modules_of(package: ModuleType) -> Iterator[ModuleType]:
  """Imports and yields the modules of a package, in alphabetical order.

  Args:
    package: the package, possibly partially imported: a module in it may call
      this function, and is yielded as is.
  """
  for module in pkgutil.iter_modules(package.__path__):
    yield importlib.import_module(f'{package.__name__}.{module.name}')
