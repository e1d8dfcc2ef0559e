"""TensorFlow import for TFDS and SeqIO sources.

Only `import_module` imports TensorFlow.
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
    purpose: source that needs it, for the error.

  Returns:
    The module.

  Raises:
    UserError: TensorFlow, SeqIO or TFDS is not installed.
  """
  modules = 'seqio', 'tensorflow', 'tensorflow_datasets'
  packages.require(purpose, 'seqio', *modules)
  # Read once, when TensorFlow is loaded. Level 3 also hides errors, because
  # TensorFlow logs missing GPUs as errors.
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  import tensorflow as tf

  # TensorFlow would allocate all GPU memory, which JAX may need. The call fails
  # if TensorFlow has already initialised its devices.
  with contextlib.suppress(RuntimeError):
    tf.config.set_visible_devices([], 'GPU')
  return importlib.import_module(name)
