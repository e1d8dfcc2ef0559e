"""A training job on a queued resource, across preemptions.

The status of a job is that in the last line of each worker. gcloud's own status
does not suffice: for several slices it keeps one status per worker number
(Google Cloud CLI 528, `SSHIntoPreppedNodes`).
"""

from __future__ import annotations

import collections
import enum
import pathlib
import re
import shlex
import subprocess
import threading
import time
import typing

from launch import commands
from launch.tpu_vm import resource as resource_lib

_ENDED = re.compile(r'\[(\d+\.\d+)\] launch: ended with status (\d+)')
# Seconds after which a failure is not consecutive to the one before.
_LONG = 3600
# States of a request; all others mean that it is queued or being created.
ACTIVE = 'ACTIVE'
ABSENT = 'ABSENT'  # Ours: the request or slice does not exist.
UNKNOWN = 'UNKNOWN'  # Ours: the status query failed.
# States of a request that was active, or of a slice, whose machines are gone.
GONE = {ABSENT, 'SUSPENDING', 'SUSPENDED', 'DELETING', 'FAILED'}
GONE |= {'PREEMPTED', 'TERMINATED', 'STOPPED'}
# Tolerated consecutive failures of status queries, and of requests: half an
# hour of them.
_TOLERATED = 30
DISK = 'disk'  # `Job.records` where the records are on a data disk.


class End(enum.Enum):
  """How an attempt ended."""

  DONE = 'done'
  RESTART = 'was stopped after a save'
  REFUSED = 'refused its input'
  DIVERGED = 'diverged'
  FAILED = 'failed'
  NOT_SET_UP = 'could not be set up'
  UNFIT = 'cannot be set up with these flags'
  LOST = 'lost its connection'


def judge(statuses: typing.Mapping[str, int], gcloud: int) -> End:
  """Decides how an attempt ended.

  Args:
    statuses: exit status of the job by slice.worker, where it was reported.
    gcloud: status of the command that ran the job on all workers.
  """
  found = set(statuses.values())
  if found == {0} and gcloud == 0:
    return End.DONE
  if found - {0, commands.RESTART, commands.USER_ERROR, commands.DIVERGED}:
    return End.FAILED
  if commands.RESTART in found:
    return End.RESTART
  if commands.USER_ERROR in found:
    return End.REFUSED
  if commands.DIVERGED in found:
    return End.DIVERGED
  return End.LOST


class Job:
  """A training job and the resource that it runs on."""

  def __init__(
    self,
    resource: resource_lib.Resource,
    shell: commands.Shell,
    *,
    records: str = '',
    poll_seconds: float = 60.0,
    grace_seconds: float = 120.0,
  ):
    """Makes a job; nothing is created in the cloud.

    Args:
      resource: the resource.
      shell: runs the commands.
      records: gs:// folder that every worker copies; `DISK`; or ''.
      poll_seconds: time between two status queries.
      grace_seconds: time for a preemption to appear in the resource's state,
        and for preempted workers to save.
    """
    self.resource = resource
    self.shell = shell
    self.records = records
    self.poll_seconds = poll_seconds
    self.grace_seconds = grace_seconds
    self.folder = pathlib.Path('runs') / 'launch' / resource.name
    # Consecutive failures; the first query and request must succeed.
    self._failed_queries = _TOLERATED
    self._failed_requests = _TOLERATED
    self._source = ''  # Checksum of the source archive.

  # -- resource --------------------------------------------------------------

  def state(self) -> str:
    """Returns the state of the request; `UNKNOWN` if the query failed."""
    return self._query(self.resource.describe())

  def gone(self) -> bool | None:
    """Returns whether machines were preempted; None if a query failed."""
    states = {self.state()}
    if ACTIVE in states:
      states |= {
        self._query(self.resource.describe_node(node))
        for node in self.resource.nodes
      }
    if states & GONE:
      return True
    return None if UNKNOWN in states else False

  def _query(self, command: list[str]) -> str:
    """Runs a status query, tolerating failures; returns the state.

    Raises:
      LaunchError: the first query failed, or too many consecutive ones.
    """
    status, answer, stderr = self.shell.ask(command)
    if status == 0 or 'NOT_FOUND' in stderr:
      self._failed_queries = 0
      return ABSENT if status else answer
    message = f'`{shlex.join(command)}` ended with status {status}:'
    message += f' {" ".join(stderr.split())}'
    if self._failed_queries >= _TOLERATED:
      raise commands.LaunchError(
        f'{message} The job keeps running; the same command shows it again.'
      )
    self._failed_queries += 1
    self.shell.note(
      f'status query failed ({self._failed_queries} of {_TOLERATED} tolerated):'
      f' {message}'
    )
    return UNKNOWN

  def bring_up(self, *, again: bool = False) -> None:
    """Creates the resource unless it exists, and waits until it is active.

    Args:
      again: the resource has been active; a request that the cloud suspended
        or failed to fill is deleted and created again.

    Raises:
      LaunchError: the request failed, or too many consecutive ones.
    """
    self.shell.show(self.resource.describe())
    if self.shell.dry_run:
      self.shell.note('if it does not exist')
      self.shell.run(self.resource.create())
      self.shell.note(f'until it prints {ACTIVE}')
      self.shell.show(self.resource.describe())
      return
    seen = None
    while (state := self.state()) != ACTIVE:
      if state != seen:
        self.shell.note(f'{self.resource.name}: {state}')
      if state == ABSENT:
        self._request(self.resource.create())
      elif state == 'FAILED' and not again:
        _, reason, _ = self.shell.ask(self.resource.explain())
        raise commands.LaunchError(
          f'the cloud could not fill the request {self.resource.name}:'
          f' {" ".join(reason.split())}. Delete it with the verb delete, and'
          ' ask for another --zone, --tier or --accelerator.'
        )
      elif state in ('SUSPENDED', 'FAILED'):
        if self._request(self.resource.delete()):
          continue
      seen = state
      time.sleep(self.poll_seconds)
    self._failed_requests = 0
    self.shell.note(f'{self.resource.name}: {ACTIVE}')

  def _request(self, command: list[str]) -> bool:
    """Creates or deletes the resource, tolerating failures.

    Returns:
      Whether the request succeeded; if not, the caller retries.

    Raises:
      LaunchError: the first request failed, or too many consecutive ones.
    """
    if self._failed_requests >= _TOLERATED:
      self.shell.require(command)
    elif status := self.shell.run(command):
      self._failed_requests += 1
      self.shell.note(
        f'request failed with status {status} ({self._failed_requests} of'
        f' {_TOLERATED} tolerated)'
      )
      return False
    self._failed_requests = 0
    return True

  def set_up(self) -> int:
    """Copies the source and installs the lock file; returns a status."""
    archive = self.folder / 'encdec_adapt.tar.gz'
    self._source = self.shell.pack(archive)
    copy = self.resource.copy([str(archive), 'launch/tpu_vm/worker.sh'])
    return self.shell.run(copy) or self.on_workers(
      'setup', self._source, self.records
    )

  def on_workers(self, *arguments: str) -> int:
    """Runs worker.sh on all workers; returns a status.

    With dry_run, the commands of worker.sh are printed too.

    Args:
      *arguments: arguments of worker.sh; empty ones are left out.
    """
    status = self.shell.run(self.resource.on_workers(_worker(*arguments)))
    self.shell.rehearse(
      ['bash', 'launch/tpu_vm/worker.sh', '--dry_run']
      + list(filter(None, arguments))
    )
    return status

  # -- job -------------------------------------------------------------------

  def train(
    self, arguments: list[str], *, max_restarts: int, retries: int
  ) -> int:
    """Runs the job to its end, through preemptions.

    Args:
      arguments: environment variables, and flags of encdec_adapt.train.
      max_restarts: maximum number of restarts.
      retries: maximum number of consecutive failures on healthy machines,
        each within an hour of its start.

    Returns:
      0, or the exit status.
    """
    if self.shell.dry_run:
      return self._rehearse(arguments)
    failures = 0
    for number in range(max_restarts + 1):
      self.bring_up(again=number > 0)
      began = time.monotonic()
      status = self.set_up()
      if status:
        unfit = status == commands.USER_ERROR
        end, statuses = End.UNFIT if unfit else End.NOT_SET_UP, {}
      else:
        end, statuses = self.attempt(arguments)
      if end is End.DONE:
        self.shell.note('the job is done')
        return 0
      self.shell.note(f'the job {end.value}: {_count(statuses)}')
      refused = end in (End.REFUSED, End.DIVERGED, End.UNFIT)
      preempted = self.was_preempted(wait=not refused)
      if preempted:
        self.shell.note('preempted: created again and resumed')
        self.take_down()
        failures = 0
      elif refused:
        return max(statuses.values(), default=commands.USER_ERROR)
      elif end is End.RESTART:
        failures = 0
      else:
        lasted = time.monotonic() - began
        failures = 1 if lasted > _LONG else failures + 1
        if failures > retries:
          raise commands.LaunchError(
            f'the job failed {failures} times in a row on healthy machines'
            f' (--retries={retries}); read {self.folder / "log.txt"}. The'
            ' machines still exist: delete them with the verb delete.'
          )
    raise commands.LaunchError(
      f'the job was restarted --max_restarts={max_restarts} times; give the'
      ' same command to resume it.'
    )

  def _rehearse(self, arguments: list[str]) -> int:
    self.bring_up()
    self.set_up()
    self.on_workers(*self._run(arguments))
    self.shell.note(f'every {self.poll_seconds:g} s while it runs')
    self.shell.show(self.resource.describe())
    for node in self.resource.nodes:
      self.shell.show(self.resource.describe_node(node))
    self.shell.note('after a preemption, then from the beginning')
    self.take_down()
    return 0

  def attempt(self, arguments: list[str]) -> tuple[End, dict[str, int]]:
    """Runs the job on all workers and prints their lines.

    Returns:
      How the attempt ended, and the reported status of each worker.
    """
    statuses: dict[str, int] = {}
    process = self.shell.start(
      self.resource.on_workers(_worker(*self._run(arguments)))
    )
    reader = threading.Thread(
      target=self._show, args=(process.stdout, statuses), daemon=True
    )
    reader.start()
    try:
      self._watch(process)
    finally:
      # The job survives: it is not a child of this connection.
      process.terminate()
    status = process.wait()
    reader.join()
    if statuses:  # Otherwise it may still run, and is found again.
      self._count_attempt()
    return judge(statuses, status), statuses

  def was_preempted(self, *, wait: bool) -> bool:
    """Returns whether machines are gone; waits until their state shows it."""
    patience = self.grace_seconds if wait else 0
    deadline = time.monotonic() + patience
    while not (gone := self.gone()):
      if gone is not None and time.monotonic() >= deadline:
        return False
      time.sleep(min(self.poll_seconds, patience or self.poll_seconds))
    return True

  def take_down(self) -> None:
    """Deletes the resource and its remaining machines.

    Raises:
      LaunchError: too many consecutive requests failed.
    """
    if self.shell.dry_run:
      self.shell.show(self.resource.delete())
      return
    while (state := self.state()) != ABSENT:
      busy = state in ('SUSPENDING', 'DELETING', UNKNOWN)
      if not busy and self._request(self.resource.delete()):
        return
      time.sleep(self.poll_seconds)

  def _watch(self, process: subprocess.Popen) -> None:
    while True:
      try:
        process.wait(self.poll_seconds)
        return
      except subprocess.TimeoutExpired:
        pass
      if self.gone():
        self.shell.note('machines are being preempted')
        try:
          process.wait(self.grace_seconds)
        except subprocess.TimeoutExpired:
          pass
        return

  def _show(self, lines: typing.Iterable[str], statuses: dict) -> None:
    path = commands.ROOT / self.folder / 'log.txt'
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, 'a', encoding='utf-8') as log:
      for line in lines:
        print(line, end='', flush=True)
        log.write(line)
        log.flush()
        ended = _ENDED.match(line)
        if ended:
          statuses[ended[1]] = int(ended[2])

  def _run(self, arguments: list[str]) -> list[str]:
    """Returns the arguments of worker.sh that run the job or show it again."""
    attempt = f'attempt-{self._attempts() + 1}'
    return ['run', self._source, attempt, *arguments]

  def _attempts(self) -> int:
    """Returns the number of ended attempts of all launches of this name."""
    path = commands.ROOT / self.folder / 'attempts'
    return int(path.read_text()) if path.exists() else 0

  def _count_attempt(self) -> None:
    path = commands.ROOT / self.folder / 'attempts'
    path.write_text(f'{self._attempts() + 1}\n')


def _worker(*arguments: str) -> str:
  return shlex.join(['bash', 'worker.sh', *filter(None, arguments)])


def _count(statuses: typing.Mapping[str, int]) -> str:
  if not statuses:
    return 'no worker reported a status'
  counts = collections.Counter(statuses.values())
  return ', '.join(
    f'{count} of {len(statuses)} workers with status {status}'
    for status, count in sorted(counts.items())
  )
