"""Memory that did not suffice: how that is said, and what to ask then."""

from collections.abc import Iterator
import contextlib
import re
import shlex

import jax

from encdec_adapt.cli import errors
from encdec_adapt.planning import chips, stored

# Of resources that are exhausted, messages of a network may be the ones.
_SAID = re.compile(
  'Ran out of memory|RESOURCE_EXHAUSTED.*(out of memory|allocat|hbm)',
  re.IGNORECASE | re.DOTALL,
)
# Of a device's memory, and no other that a chip has.
_NEEDED = re.compile(
  r'(?:Used |temporaries \()(?P<number>[\d.]+)(?P<unit>[KMGT])'
  r'\)? (?:of [\d.]+[KMGT]? |exceeds available )hbm',
  re.IGNORECASE,
)
_EXAMPLE = 'v5e:4x4'


def needed(message: str) -> float | None:
  """Bytes that a program needs, of the compiler's complaint; None: another.

  Of what a chip computes in (vmem, smem) no plan can make less be needed: that
  is another complaint.
  """
  found = _NEEDED.search(message)
  if not found:
    return None
  power = ' KMGT'.index(found['unit'])
  return float(found['number']) * 1024**power


@contextlib.contextmanager
def explained(config_flag) -> Iterator[None]:
  """Turns devices out of memory into an error that says what to ask.

  A job that is started again would meet the same.

  Args:
    config_flag: of the job's configuration.

  Raises:
    UserError: of a compiler, or a device, that had too little memory.
  """
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    message = str(error)
    if needed(message) is None and not _SAID.search(message):
      raise
    raise errors.UserError(_advice(message, config_flag)) from error


def _advice(message: str, config_flag) -> str:
  """What failed, and the plan of these devices that says what would do."""
  where, note = chips.slice_of(jax.devices()), ''
  limit = (jax.local_devices()[0].memory_stats() or {}).get('bytes_limit')
  if where is None:
    where = chips.parse(_EXAMPLE)
    note = f' (with the chips that are meant in the place of {_EXAMPLE})'
    limit = None
  flags = stored.flags(stored.question(config_flag, where), ['train', 'eval'])
  if limit:
    flags.append(f'--hbm_gib={limit / 2**30:.1f}')
  command = ['python', '-m', 'encdec_adapt.plan', *flags]
  return (
    'the devices have too little memory for this configuration:'
    f' {message.splitlines()[0].rstrip(".")}. What it needs, and flags with'
    f' which it would fit, says `{shlex.join(command)}`{note}. What was saved'
    ' is continued by the same command with such flags.'
  )
