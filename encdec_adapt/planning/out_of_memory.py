"""Out-of-memory errors: recognised, and answered with a planning command."""

from collections.abc import Iterator
import contextlib
import re
import shlex

import jax

from encdec_adapt.base import errors
from encdec_adapt.planning import chips, stored_plans

# RESOURCE_EXHAUSTED alone may also be a network error.
_EXHAUSTED = re.compile(
  'Ran out of memory|RESOURCE_EXHAUSTED.*(out of memory|allocat|hbm)',
  re.IGNORECASE | re.DOTALL,
)
# Device memory only, not vmem or smem.
_NEEDED = re.compile(
  r'(?:Used |temporaries \()(?P<number>[\d.]+)(?P<unit>[KMGT])'
  r'\)? (?:of [\d.]+[KMGT]? |exceeds available )hbm',
  re.IGNORECASE,
)
_EXAMPLE = 'v5e:4x4'


def needed(message: str) -> float | None:
  """Returns bytes of device memory that the compiler needed, or None.

  Args:
    message: error of the compiler. A lack of vmem or smem gives None: no plan
      reduces what a program needs of those.
  """
  found = _NEEDED.search(message)
  if not found:
    return None
  power = ' KMGT'.index(found['unit'])
  return float(found['number']) * 1024**power


@contextlib.contextmanager
def explained(config_flag) -> Iterator[None]:
  """Turns out-of-memory errors into user errors that name a command.

  Args:
    config_flag: flag of the job's configuration.

  Raises:
    UserError: the compiler or a device ran out of device memory.
  """
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    message = str(error)
    if needed(message) is None and not _EXHAUSTED.search(message):
      raise
    raise errors.UserError(_advice(message, config_flag)) from error


def _advice(message: str, config_flag) -> str:
  """Returns what failed, and the command that plans these devices."""
  where, note = chips.slice_of(jax.devices()), ''
  limit = (jax.local_devices()[0].memory_stats() or {}).get('bytes_limit')
  if where is None:
    where, limit = chips.parse(_EXAMPLE), None
    note = f' (with your chips in the place of {_EXAMPLE})'
  flags = stored_plans.flags(
    stored_plans.request(config_flag, where), ['train', 'eval']
  )
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
