"""A training job on a queued resource, across preemptions.

The status of a job is what its workers print as their last line. The status
of gcloud is not: of several slices it keeps one status per number of a worker
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
# Seconds. A failure after so long begins a new count of failures in a row.
_LONG = 3600
# Of a request. The rest: it waits, or is being made.
ACTIVE = 'ACTIVE'
ABSENT = 'ABSENT'  # Ours: there is no such request, or slice.
UNKNOWN = 'UNKNOWN'  # Ours: a look failed, which says nothing of what is there.
# Of a request that has been active, or of a slice: its machines are taken away.
GONE = {ABSENT, 'SUSPENDING', 'SUSPENDED', 'DELETING', 'FAILED'}
GONE |= {'PREEMPTED', 'TERMINATED', 'STOPPED'}
# Looks in a row that may fail, and requests: half an hour of them.
_BORNE = 30
DISK = 'disk'  # Instead of a gs:// folder: the records are on a data disk.


class End(enum.Enum):
  """How an attempt ended."""

  DONE = 'done'
  RESTART = 'told to stop, and saved'
  REFUSED = 'refused its input'
  FAILED = 'failed'
  NOT_SET_UP = 'could not be set up'
  UNFIT = 'cannot be set up like this'
  LOST = 'was lost from sight'


def judge(statuses: typing.Mapping[str, int], gcloud: int) -> End:
  """How an attempt ended.

  Args:
    statuses: of the job, by slice.worker; of workers that said it.
    gcloud: status of the command that ran it on all workers.
  """
  found = set(statuses.values())
  if found == {0} and gcloud == 0:
    return End.DONE
  if found - {0, commands.RESTART, commands.USER_ERROR}:
    return End.FAILED
  if commands.RESTART in found:
    return End.RESTART
  if commands.USER_ERROR in found:
    return End.REFUSED
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
    """Nothing is created yet.

    Args:
      resource: as the flags describe it.
      shell: that commands go through.
      records: gs:// folder that every worker gets a copy of; `DISK`; or ''.
      poll_seconds: between two looks at the resource.
      grace_seconds: for a preemption to show in the resource's state, and
        for workers that are taken away to save.
    """
    self.resource = resource
    self.shell = shell
    self.records = records
    self.poll_seconds = poll_seconds
    self.grace_seconds = grace_seconds
    self.folder = pathlib.Path('runs') / 'launch' / resource.name
    # Looks that have failed in a row; the first one must not.
    self._failed_looks = _BORNE
    # Requests of it likewise, until it has been there.
    self._failed_requests = _BORNE
    self._source = ''  # Checksum of the archive that workers are given.

  # -- resource --------------------------------------------------------------

  def state(self) -> str:
    """State of the request; `UNKNOWN` where the look failed."""
    return self._look(self.resource.describe())

  def gone(self) -> bool | None:
    """Whether machines are taken away; None if it cannot be seen now."""
    states = {self.state()}
    if ACTIVE in states:
      states |= {
        self._look(self.resource.describe_node(node))
        for node in self.resource.nodes
      }
    if states & GONE:
      return True
    return None if UNKNOWN in states else False

  def _look(self, command: list[str]) -> str:
    """The state that a command prints, which may fail for a while.

    Raises:
      LaunchError: it is the first look, or one too many has failed.
    """
    status, answer, complaint = self.shell.ask(command)
    if status == 0 or 'NOT_FOUND' in complaint:
      self._failed_looks = 0
      return ABSENT if status else answer
    said = f'`{shlex.join(command)}` ended with status {status}:'
    said += f' {" ".join(complaint.split())}'
    if self._failed_looks >= _BORNE:
      raise commands.LaunchError(
        f'{said} What runs there goes on; the same command shows it again.'
      )
    self._failed_looks += 1
    self.shell.note(
      f'a look failed ({self._failed_looks} in a row, {_BORNE} are borne):'
      f' {said}'
    )
    return UNKNOWN

  def bring_up(self, *, again: bool = False) -> None:
    """Creates the resource unless it is there, and waits until it is active.

    Args:
      again: it has been active before; a request that the cloud took back
        or failed to fill is deleted and made anew.

    Raises:
      LaunchError: the request failed, or too many in a row.
    """
    self.shell.show(self.resource.describe())
    if self.shell.dry_run:
      self.shell.note('where there is none')
      self.shell.run(self.resource.create())
      self.shell.note(f'until it says {ACTIVE}')
      self.shell.show(self.resource.describe())
      self.shell.note('where it says FAILED, what the cloud says of it')
      self.shell.show(self.resource.explain())
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
    """Creates or deletes the resource, which may fail for a while.

    Returns:
      Whether it succeeded; if not, it is to be tried at the next look.

    Raises:
      LaunchError: there has been no resource yet, or one too many has failed.
    """
    if self._failed_requests >= _BORNE:
      self.shell.require(command)
    elif status := self.shell.run(command):
      self._failed_requests += 1
      self.shell.note(
        f'a request failed with status {status} ({self._failed_requests} in a'
        f' row, {_BORNE} are borne); it is tried again'
      )
      return False
    self._failed_requests = 0
    return True

  def set_up(self) -> int:
    """Copies the source and installs from the lock file; returns a status."""
    archive = self.folder / 'encdec_adapt.tar.gz'
    self._source = self.shell.pack(archive)
    copy = self.resource.copy([str(archive), 'launch/tpu_vm/worker.sh'])
    return self.shell.run(copy) or self.on_workers(
      'setup', self._source, self.records
    )

  def on_workers(self, *arguments: str) -> int:
    """Runs worker.sh on all workers; returns a status.

    With dry_run, its commands are shown, too.

    Args:
      *arguments: its own; empty ones are left out.
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
      arguments: of encdec_adapt.train.
      max_restarts: how many times the job is started again, in all.
      retries: how many times in a row after a failure on healthy machines,
        each within an hour of its start.

    Returns:
      0, or the status to leave with.
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
      refused = end in (End.REFUSED, End.UNFIT)
      preempted = self.was_preempted(wait=not refused)
      if preempted:
        self.shell.note('preempted: made anew, and continued')
        self.take_down()
        failures = 0
      elif refused:
        return commands.USER_ERROR
      elif end is End.RESTART:
        failures = 0
      else:
        lasted = time.monotonic() - began
        failures = 1 if lasted > _LONG else failures + 1
        if failures > retries:
          raise commands.LaunchError(
            f'the job failed {failures} times in a row on machines that are'
            f' there (--retries={retries}); read'
            f' {self.folder / "log.txt"}, and delete what it ran on with the'
            ' verb delete.'
          )
    raise commands.LaunchError(
      f'the job was started again --max_restarts={max_restarts} times; give'
      ' the same command again to go on.'
    )

  def _rehearse(self, arguments: list[str]) -> int:
    """Shows what `train` would run."""
    self.bring_up()
    self.set_up()
    self.on_workers(*self._run(arguments))
    self.shell.note(f'every {self.poll_seconds:g} s while it runs')
    self.shell.show(self.resource.describe())
    for node in self.resource.nodes:
      self.shell.show(self.resource.describe_node(node))
    self.shell.note('after a preemption, and then from the top again')
    self.take_down()
    return 0

  def attempt(self, arguments: list[str]) -> tuple[End, dict[str, int]]:
    """Runs the job on all workers, showing their lines as they come.

    Returns:
      How it ended, and the status that each worker said.
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
      # The job itself is no child of this connection.
      process.terminate()
    status = process.wait()
    reader.join()
    if statuses:  # Otherwise it may be running still, to be found again.
      self._count_attempt()
    return judge(statuses, status), statuses

  def was_preempted(self, *, wait: bool) -> bool:
    """Whether machines are gone, which may show a while after they left."""
    patience = self.grace_seconds if wait else 0
    deadline = time.monotonic() + patience
    while not (gone := self.gone()):
      if gone is not None and time.monotonic() >= deadline:
        return False
      time.sleep(min(self.poll_seconds, patience or self.poll_seconds))
    return True

  def take_down(self) -> None:
    """Deletes the resource, and what is left of its machines.

    Raises:
      LaunchError: too many requests in a row have failed.
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
    """Returns when the command has ended, or its machines are gone."""
    while True:
      try:
        process.wait(self.poll_seconds)
        return
      except subprocess.TimeoutExpired:
        pass
      if self.gone():
        self.shell.note('machines are being taken away')
        try:
          process.wait(self.grace_seconds)
        except subprocess.TimeoutExpired:
          pass
        return

  def _show(self, lines: typing.Iterable[str], statuses: dict) -> None:
    """Prints and keeps the lines of all workers; notes what they end with."""
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
    """Arguments of worker.sh that run the job, or show it again."""
    attempt = f'attempt-{self._attempts() + 1}'
    return ['run', self._source, attempt, *arguments]

  def _attempts(self) -> int:
    """How many attempts have ended, over all launches with this name."""
    path = commands.ROOT / self.folder / 'attempts'
    return int(path.read_text()) if path.exists() else 0

  def _count_attempt(self) -> None:
    path = commands.ROOT / self.folder / 'attempts'
    path.write_text(f'{self._attempts() + 1}\n')


def _worker(*arguments: str) -> str:
  """Command line of worker.sh; empty arguments are left out."""
  return shlex.join(['bash', 'worker.sh', *filter(None, arguments)])


def _count(statuses: typing.Mapping[str, int]) -> str:
  """How many workers ended with which status."""
  if not statuses:
    return 'no worker said its status'
  counts = collections.Counter(statuses.values())
  return ', '.join(
    f'{count} of {len(statuses)} workers with status {status}'
    for status, count in sorted(counts.items())
  )
