"""What all processes of a job must have alike, and what to say where not.

Other versions, flags or settings on one host make other programs there: the
devices then wait for each other for ever, or compute with each other's
numbers. Processes hand in facts where they first meet (`cluster.rendezvous`,
`cluster.distributed.agree`); these functions collect and compare them.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import os
from typing import Any

from encdec_adapt.telemetry import environment

# Seconds that the clocks of two hosts may be apart. Time servers keep hosts
# within milliseconds; ages of heartbeats and of locks are told by the clock.
CLOCK_BOUND = 5.0
_FIELDS_SHOWN = 8
_PROCESSES_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Member:
  """A process of the job, as it has introduced itself.

  Attributes:
    process: its number, from 0.
    host: name of its machine.
    facts: what has to be alike, by field; JSON can hold it.
    clock: seconds that its clock is ahead of process 0's, at least; negative
      behind; 0 where they may agree.
  """

  process: int
  host: str
  facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  clock: float = 0.0

  def __str__(self) -> str:
    """For messages: `process 3 (host-c)`."""
    return f'process {self.process} ({self.host})'


def facts(told: Mapping[str, Any]) -> dict[str, Any]:
  """What this process has, as far as it is known without its devices.

  Args:
    told: nested mapping of what it was told to do; JSON can hold it.
  """
  return {
    **environment.versions(),
    'source': environment.source_digest(),
    **environment.options(),
    'libtpu_init_args': os.environ.get('LIBTPU_INIT_ARGS', ''),
    **dict(environment.flat(told)),
  }


def clock_ahead(before: float, clock: float, after: float) -> float:
  """How far a clock is ahead of ours, at least; see `Member.clock`.

  Args:
    before: by our clock, a time before the other one was read, in seconds.
    clock: what the other one said.
    after: by our clock, a time after that.
  """
  return max(clock - after, 0.0) + min(clock - before, 0.0)


def problem(members: Sequence[Member]) -> str:
  """Says what a job of these processes cannot be run for.

  Args:
    members: all processes, process 0 first.

  Returns:
    A paragraph that names fields, processes, hosts and values; '' where all
    agree.
  """
  lead = members[0]
  lines = [
    f'the clock of {member} is at least {abs(member.clock):.1f} s'
    f' {"ahead of" if member.clock > 0 else "behind"} that of {lead}, and'
    f' {CLOCK_BOUND:g} s are allowed'
    for member in members
    if abs(member.clock) > CLOCK_BOUND
  ]
  remedy = 'Set the clocks, by a time server.' if lines else ''
  different = _differences(members)
  if different:
    lines += different
    remedy = (
      'Start every process with the same source, packages, environment and'
      f' flags. {remedy}'
    )
  if not lines:
    return ''
  more = len(lines) - _FIELDS_SHOWN
  shown = lines[:_FIELDS_SHOWN] + [f'and {more} more'] * (more > 0)
  return (
    f'the processes of this job differ: {"; ".join(shown)}. {remedy.strip()}'
  )


def _differences(members: Sequence[Member]) -> list[str]:
  """A line for every field that is not the same everywhere."""
  fields = dict.fromkeys(f for member in members for f in member.facts)
  lines = []
  for field in fields:
    holders: dict[str, list[Member]] = {}
    for member in members:
      value = 'absent'
      if field in member.facts:
        value = json.dumps(member.facts[field], sort_keys=True)
      holders.setdefault(value, []).append(member)
    if len(holders) > 1:
      # The few first: who differs from the many is who is looked for.
      few = sorted(holders.items(), key=lambda item: len(item[1]))
      lines.append(
        f'{field} is '
        + ', '.join(f'{value} on {_name(some)}' for value, some in few)
      )
  return lines


def _name(members: Sequence[Member]) -> str:
  """Some processes for a message, not more than one can read."""
  shown = ', '.join(map(str, members[:_PROCESSES_SHOWN]))
  more = len(members) - _PROCESSES_SHOWN
  return f'{shown} and {more} more' if more > 0 else shown
