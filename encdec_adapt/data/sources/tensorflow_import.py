"""Imports TensorFlow without the lines it prints while it starts.

TensorFlow 2.21 writes about missing GPUs and CPU features to stderr before any
level of logging applies. TensorFlow only reads text here, so they mislead.

This module imports TensorFlow only when `import_quietly` is called.
"""

from collections.abc import Iterator
import contextlib
import importlib
import os
import sys
import tempfile
from types import ModuleType

from encdec_adapt.base import packages


def require(purpose: str = 'making records') -> None:
  """Raises UserError where TensorFlow, SeqIO or TFDS is not installed.

  Args:
    purpose: the activity that needs them, the subject of the error.
  """
  packages.require(
    purpose, 'data', 'seqio', 'tensorflow', 'tensorflow_datasets'
  )


def import_quietly(name: str) -> ModuleType:
  """Imports a module that imports TensorFlow.

  Output to stderr is shown only if the import fails.

  Raises:
    UserError: TensorFlow is not installed.
  """
  require()
  # TensorFlow reads this once, when it is loaded.
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  if 'tensorflow' in sys.modules:
    return importlib.import_module(name)
  with _captured_stderr():
    module = importlib.import_module(name)
    import tensorflow as tf

    # TensorFlow would allocate all memory of a GPU, which JAX may need. The
    # first query of devices prints, too, so it belongs to this block.
    tf.config.set_visible_devices([], 'GPU')
    return module


@contextlib.contextmanager
def _captured_stderr() -> Iterator[None]:
  # Python's buffer would otherwise be written into the file, and be lost.
  sys.stderr.flush()
  # C++ writes to descriptor 2 itself: replacing `sys.stderr` has no effect.
  stderr_copy = os.dup(2)
  with tempfile.TemporaryFile() as file:
    os.dup2(file.fileno(), 2)
    try:
      yield
    except BaseException:
      file.seek(0)
      os.write(stderr_copy, file.read())
      raise
    finally:
      os.dup2(stderr_copy, 2)
      os.close(stderr_copy)
