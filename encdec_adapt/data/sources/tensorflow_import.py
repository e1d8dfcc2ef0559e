"""Imports TensorFlow without the lines it prints while it starts.

TensorFlow 2.21 writes of missing GPUs and CPU features to stderr before any
level of logging applies. TensorFlow only reads text here, so they mislead.
"""

from collections.abc import Iterator
import contextlib
import importlib
import os
import sys
import tempfile
from types import ModuleType


def import_quietly(name: str) -> ModuleType:
  """Imports a module that imports TensorFlow.

  What is written to stderr meanwhile is shown only if the import fails.
  """
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  if 'tensorflow' in sys.modules:
    return importlib.import_module(name)
  with _stderr_held_back():
    module = importlib.import_module(name)
    import tensorflow as tf

    # TensorFlow would take all memory of a GPU. (The first query prints, too.)
    tf.config.set_visible_devices([], 'GPU')
    return module


@contextlib.contextmanager
def _stderr_held_back() -> Iterator[None]:
  """Holds back what C++ code writes to stderr; shows it after an exception."""
  sys.stderr.flush()
  kept = os.dup(2)
  with tempfile.TemporaryFile() as file:
    os.dup2(file.fileno(), 2)
    try:
      yield
    except BaseException:
      file.seek(0)
      os.write(kept, file.read())
      raise
    finally:
      os.dup2(kept, 2)
      os.close(kept)
