"""Several processes of one job: starting them, meeting, agreeing."""

from collections.abc import Callable

import jax
from jax.experimental import multihost_utils
import numpy as np

from encdec_adapt.runtime import errors


def initialize(
  coordinator: str | None, processes: int | None, process: int | None
) -> None:
  """Joins the other processes of the job; one process needs nothing.

  Call before any other use of jax.

  Args:
    coordinator: `host:port` of process 0, the same on every process.
    processes: how many there are.
    process: which this is, from 0.

  Raises:
    UserError: only some of the three are given, or they are out of range.
  """
  given = (coordinator, processes, process)
  if all(value is None for value in given):
    return
  if any(value is None for value in given):
    raise errors.UserError(
      f'coordinator is {coordinator}, processes {processes} and process'
      f' {process}: give all three for a job of several processes, or none.'
    )
  if processes < 1 or not 0 <= process < processes:
    raise errors.UserError(
      f'process is {process} of {processes}; processes count from 0.'
    )
  host, colon, port = coordinator.rpartition(':')
  if not (host and colon and port.isdecimal()):
    raise errors.UserError(
      f'coordinator is {coordinator!r}; give host:port of process 0.'
    )
  if processes == 1:
    return
  # Only the CPU backend reads the first; the second lets every process agree
  # on the step to stop at when one of them is told to.
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.config.update('jax_enable_preemption_service', True)
  jax.distributed.initialize(
    coordinator_address=coordinator,
    num_processes=processes,
    process_id=process,
  )


def is_lead() -> bool:
  """Whether this process writes what is written once: logs, metrics, seals."""
  return jax.process_index() == 0


def barrier(name: str) -> None:
  """Waits until every process is here; at once if there is only one."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


def from_lead(find: Callable[[], int | None]) -> int | None:
  """Process 0 looks, every process is told.

  Args:
    find: called on process 0 only; returns a number from 0 or None.

  Returns:
    What process 0 found.
  """
  found = find() if is_lead() else None
  if jax.process_count() == 1:
    return found
  number = np.int32(-1 if found is None else found)
  agreed = int(multihost_utils.broadcast_one_to_all(number))
  return None if agreed < 0 else agreed
