"""Imports TensorFlow, for sources that are read with it: TFDS and SeqIO.

This module imports TensorFlow only when `import_module` is called.
"""

import contextlib
import importlib
import os
from types import ModuleType

from encdec_adapt.base import packages


def import_module(name: str, purpose: str) -> ModuleType:
  """Imports a module that imports TensorFlow (ten seconds, 800 MB).

  Args:
    name: name of the module.
    purpose: the source that needs it, the subject of the error.

  Returns:
    The module.

  Raises:
    UserError: TensorFlow, SeqIO or TFDS is not installed.
  """
  modules = 'seqio', 'tensorflow', 'tensorflow_datasets'
  packages.require(purpose, 'seqio', *modules)
  # TensorFlow reads it once, when it is loaded. Level 3 hides errors, too, as
  # which it logs missing GPUs.
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  import tensorflow as tf

  # TensorFlow would allocate all memory of a GPU, which JAX may need, unless
  # the caller has used its devices before.
  with contextlib.suppress(RuntimeError):
    tf.config.set_visible_devices([], 'GPU')
  return importlib.import_module(name)
