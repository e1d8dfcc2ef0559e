"""Suggests a planning command for out-of-memory errors.

This module must not import programs: the printed command plans them.
"""

from collections.abc import Iterator
import contextlib
import shlex

import jax

from encdec_adapt.base import errors
from encdec_adapt.planner import chips, stored_plans
from encdec_adapt.sharding import compiler

_EXAMPLE = 'v5e:4x4'


@contextlib.contextmanager
def explained(config_flag) -> Iterator[None]:
  """Turns out-of-memory errors into user errors with a planning command.

  Args:
    config_flag: flag of the job's configuration.

  Raises:
    UserError: the compiler or a device ran out of device memory.
  """
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    message = str(error)
    if not compiler.ran_out_of_memory(message):
      raise
    raise errors.UserError(_advice(message, config_flag)) from error


def _advice(message: str, config_flag) -> str:
  hardware, note = chips.slice_of(jax.devices()), ''
  # The limit of JAX's allocator is below the chip's memory; on GPUs
  # XLA_PYTHON_CLIENT_MEM_FRACTION sets it.
  limit = (jax.local_devices()[0].memory_stats() or {}).get('bytes_limit')
  if hardware is None:
    hardware, limit = chips.parse(_EXAMPLE), None
    note = f' (with your chips in the place of {_EXAMPLE})'
  # Includes evaluation: its batches may be the ones that do not fit.
  request = stored_plans.request(config_flag, hardware)
  flags = stored_plans.flags(request, ['train', 'eval'])
  if limit:
    flags.append(f'--hbm_gib={limit / 2**30:.1f}')
  command = ['python', '-m', 'encdec_adapt.plan', *flags]
  return (
    'the devices have too little memory for this configuration:'
    f' {message.splitlines()[0].rstrip(".")}. `{shlex.join(command)}`{note}'
    ' prints the memory that it needs, and flags with which it would fit. A'
    ' run that has saved checkpoints resumes with the same command and such'
    ' flags.'
  )
