"""Facts that must be equal on all processes of a job.

A host with other versions, flags or data compiles other programs: devices then
deadlock in a collective, or silently compute wrong numbers.
`cluster.distributed.require_same` gathers the facts of all processes and
refuses to run if this module finds a difference.
"""

from collections.abc import Mapping, Sequence
import json
import os
from typing import Any

from encdec_adapt.telemetry import environment


def process_facts(flags: Mapping[str, Any]) -> dict[str, Any]:
  """Returns versions, source, compiler options and flags of this process.

  Queries no device, so that it works before jax connects the processes.

  Args:
    flags: nested mapping of the job's flags, JSON serializable.

  Returns:
    Flat mapping from dotted names to JSON values.
  """
  return {
    **environment.versions(),
    'source': environment.source_digest(),
    **environment.options(),
    # A variable of libtpu instead of XLA; it changes programs too.
    'libtpu_init_args': os.environ.get('LIBTPU_INIT_ARGS', ''),
    **environment.flat(flags),
  }


def describe_differences(processes: Mapping[str, Mapping[str, Any]]) -> str:
  """Describes every different fact, with its values and their processes.

  Args:
    processes: name of a process, such as `process 3 (host-c)` -> its facts.

  Returns:
    A paragraph for an error message; '' if all processes agree.
  """
  lines = []
  for field in dict.fromkeys(f for facts in processes.values() for f in facts):
    holders: dict[str, list[str]] = {}
    for name, facts in processes.items():
      value = json.dumps(facts[field]) if field in facts else 'absent'
      holders.setdefault(value, []).append(name)
    if len(holders) > 1:
      # Smallest group first: the user looks for the outlier.
      groups = sorted(holders.items(), key=lambda item: len(item[1]))
      values = (f'{value} on {_shorten(names, 3)}' for value, names in groups)
      lines.append(f'{field} is ' + ', '.join(values))
  if not lines:
    return ''
  return (
    'the processes of this job differ:'
    f' {_shorten(lines, 8, "; ")}. Start every process with the'
    ' same source, packages, environment and flags.'
  )


def _shorten(items: Sequence[str], limit: int, separator: str = ', ') -> str:
  more = len(items) - limit
  shown = separator.join(items[:limit])
  return f'{shown} and {more} more' if more > 0 else shown
