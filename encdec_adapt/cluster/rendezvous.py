"""Who is there at the start, and who has gone since.

Before jax connects the processes of a job, each reports to process 0, at the
port where jax's coordination service will be. jax's own start aborts every
process where one is missing, after five minutes and without naming it. Here
process 0 says who is missing while it waits, and compares what all of them
have (`cluster.agreement`); what it finds wrong ends all that came, with the
same words.

The connections stay open. A process that dies closes its own, whatever killed
it, and a machine that vanishes stops answering; process 0 tells the others.
Devices would wait for it for ever, and jax notices after 100 seconds.

Messages are lines of JSON. Process 0 says `{"ready"}`; the other `{"process",
"processes", "host", "clock", "facts"}`; process 0 `{"problem", "absent"}` when
it knows; later whoever ends in order `{"left"}`, who fails `{"failed",
"status"}`, which process 0 passes on, and process 0 `{"lost"}`.
"""

from collections.abc import Callable
import contextlib
import json
import selectors
import socket
import threading
import time
from typing import Any

from encdec_adapt.cli import errors
from encdec_adapt.cluster import agreement

_Report = Callable[[str], None]

_ANSWER = 10.0  # Seconds that a process may take to say who it is.
_AGAIN = 0.5  # Between two attempts to reach process 0.
_LAST_WORD = 1.0  # Seconds that an end takes to reach all.
_NEWS = 30.0  # Between two lines about who is missing.
_LONGEST = 1 << 22  # Bytes of a message.
# A machine that vanishes is given up after 30 s and 3 questions, 10 s apart.
_KEEPALIVE = {'TCP_KEEPIDLE': 30, 'TCP_KEEPINTVL': 10, 'TCP_KEEPCNT': 3}


class _Peer:
  """One connection, and who is at its other end."""

  def __init__(self, connection: socket.socket):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
      if hasattr(socket, name):  # Linux has all of them.
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    self.socket = connection
    self.lines = connection.makefile('rb')
    self.member: agreement.Member | None = None

  def send(self, **message: Any) -> None:
    """Sends a line; nothing where nobody is there any more."""
    with contextlib.suppress(OSError):  # Reading will tell.
      self.socket.sendall(json.dumps(message).encode() + b'\n')

  def receive(self) -> dict[str, Any] | None:
    """The next line; None where there will be none.

    Raises:
      ValueError: what speaks there is no process of ours.
    """
    try:
      line = self.lines.readline(_LONGEST)
    except TimeoutError as error:
      raise ValueError('nothing was said') from error
    except OSError:
      return None
    if not line:
      return None
    message = json.loads(line)
    if not isinstance(message, dict):
      raise ValueError(f'{message!r} is no message')
    return message

  def close(self) -> None:
    """Closes the connection."""
    self.lines.close()
    self.socket.close()


class Line:
  """The open connections of a process: to process 0, or to all others."""

  def __init__(self, peers: list[_Peer]):
    """Use `gather` or `join`."""
    self._peers = peers
    self._failing = threading.Event()

  def watch(self, lost: _Report, failed: Callable[[str, int], None]) -> None:
    """Calls one of two, once, in a thread, when a process is gone or fails.

    Args:
      lost: gets a line that names the process and its host.
      failed: gets what the process said, and the status it ends with.
    """
    threading.Thread(
      target=self._watch, args=(lost, failed), daemon=True
    ).start()

  def fail(self, message: str, status: int) -> None:
    """Tells the others that this process fails, and that they end with it.

    Args:
      message: why.
      status: that all end with.
    """
    self._failing.set()
    self._pass_on({'failed': message, 'status': status})

  def _pass_on(self, said: dict[str, Any], source: _Peer | None = None) -> None:
    """Sends an end to all but who it is from, and lets them go first."""
    others = [peer for peer in self._peers if peer is not source]
    for peer in others:
      peer.send(**said)
    # Without process 0 jax aborts them, whatever they are told.
    if any(peer.member.process for peer in others):
      time.sleep(_LAST_WORD)

  def leave(self) -> None:
    """Says that this process ends in order; the others do not miss it."""
    for peer in self._peers:
      peer.send(left=True)

  def _watch(self, lost: _Report, failed: Callable[[str, int], None]) -> None:
    with selectors.DefaultSelector() as selector:
      for peer in self._peers:
        selector.register(peer.socket, selectors.EVENT_READ, peer)
      while selector.get_map():
        for key, _ in selector.select():
          message = key.data.receive()
          if self._failing.is_set():
            return  # They end because they were told to.
          if message is None:
            text = f'{key.data.member} is gone: its connection is closed'
            message = {'lost': text}
          elif message.get('left'):
            selector.unregister(key.data.socket)
            continue
          self._pass_on(message, key.data)
          if 'failed' in message:
            failed(message['failed'], message['status'])
          else:
            lost(message['lost'])
          return


def gather(
  port: int, count: int, own: agreement.Member, seconds: float, say: _Report
) -> Line:
  """Waits, as process 0, until all are here, and compares them.

  Args:
    port: to listen at.
    count: of the processes of the job.
    own: process 0.
    seconds: to wait.
    say: gets a line now and then about who is missing.

  Returns:
    The connections to the others.

  Raises:
    AbsentError: some did not come.
    UserError: the port is taken; the processes differ, or two have the same
      number. The others raise the same.
  """
  peers: dict[int, _Peer] = {}
  absent, problem = False, ''
  began = time.monotonic()
  with _listen(port) as server:
    while len(peers) < count - 1 and not problem:
      waited = time.monotonic() - began
      if waited >= seconds:
        absent, problem = True, _missing(peers, count, waited)
        break
      server.settimeout(min(_NEWS, seconds - waited))
      try:
        peer = _Peer(server.accept()[0])
      except TimeoutError:
        if time.monotonic() - began < seconds:
          say(_missing(peers, count, time.monotonic() - began))
        continue
      problem = _admit(peer, peers, count)
  everybody = [own, *(peers[number].member for number in sorted(peers))]
  problem = problem or agreement.problem(everybody)
  for peer in peers.values():
    peer.send(problem=problem, absent=absent)
  if problem:
    raise (errors.AbsentError if absent else errors.UserError)(problem)
  return Line(list(peers.values()))


def _listen(port: int) -> socket.socket:
  """A server on all addresses of this machine, as jax's will be."""
  dual = socket.has_dualstack_ipv6()
  family = socket.AF_INET6 if dual else socket.AF_INET
  try:
    return socket.create_server(
      ('', port), family=family, dualstack_ipv6=dual, backlog=1024
    )
  except OSError as error:
    raise errors.UserError(
      f'port {port} of the coordinator cannot be listened at'
      f' ({error.strerror}); if another job has it, give another port in'
      ' --coordinator, to all processes.'
    ) from error


def _admit(peer: _Peer, peers: dict[int, _Peer], count: int) -> str:
  """Asks who has come, and adds it.

  Returns:
    What is wrong with it, or ''. What is no process of ours is sent away.
  """
  peer.socket.settimeout(_ANSWER)
  before = time.time()
  peer.send(ready=True)
  try:
    said = peer.receive()
    after = time.time()
    number, clock = int(said['process']), float(said['clock'])
    peer.member = agreement.Member(
      number,
      str(said['host']),
      dict(said['facts']),
      agreement.clock_ahead(before, clock, after),
    )
    processes = int(said['processes'])
  except (ValueError, KeyError, TypeError):
    peer.close()
    return ''
  peer.socket.settimeout(None)
  other = peers.get(number)
  if other and _is_closed(other):  # It was started again.
    other.close()
    other = None
  if processes != count or not 0 < number < count:
    problem = (
      f'{peer.member} was told of {processes} processes, and process 0 of'
      f' {count}; start all with the same --processes.'
    )
  elif other:
    problem = (
      f'{other.member} and {peer.member} have the same number; give each'
      ' process its own --process.'
    )
  else:
    peers[number] = peer
    return ''
  peer.send(problem=problem, absent=False)
  return problem


def _is_closed(peer: _Peer) -> bool:
  """Whether a process that has nothing to say yet is gone."""
  try:
    peek = socket.MSG_PEEK | socket.MSG_DONTWAIT
    return not peer.socket.recv(1, peek)
  except BlockingIOError:
    return False
  except OSError:
    return True


def _missing(peers: dict[int, _Peer], count: int, waited: float) -> str:
  """Who has not come after so many seconds."""
  missing = [n for n in range(1, count) if n not in peers]
  names = ', '.join(map(str, missing[:10])) + ', ...' * (len(missing) > 10)
  here = ', '.join(str(peers[n].member) for n in sorted(peers)[:3])
  return (
    f'after {waited:.0f} s, {1 + len(peers)} of {count} processes are here;'
    f' missing: process {names}. See what they say, and whether their machines'
    ' are up'
    + (f'; those that came: process 0, {here}' if here else '')
    + (', ...' if len(peers) > 3 else '')
    + '.'
  )


def join(
  host: str,
  port: int,
  count: int,
  own: agreement.Member,
  seconds: float,
  say: _Report,
) -> Line:
  """Reports, as another process, to process 0, and waits for its word.

  Args:
    host: of process 0.
    port: of process 0.
    count: of the processes of the job.
    own: this process.
    seconds: to wait for process 0 to answer.
    say: gets a line now and then while it does not.

  Returns:
    The connection to process 0.

  Raises:
    AbsentError: process 0 does not answer, or says that some did not come.
    UserError: process 0 finds the processes to differ.
  """
  peer = _reach(host, port, seconds, say)
  peer.send(
    process=own.process,
    processes=count,
    host=own.host,
    clock=time.time(),
    facts=own.facts,
  )
  peer.socket.settimeout(None)
  said = peer.receive()
  if said is None:
    raise errors.AbsentError(
      f'process 0 at {host}:{port} ended before all processes had come; see'
      ' what it says.'
    )
  if said['problem']:
    raise (errors.AbsentError if said['absent'] else errors.UserError)(
      said['problem']
    )
  return Line([peer])


def _reach(host: str, port: int, seconds: float, say: _Report) -> _Peer:
  """A connection to process 0, which may not have started yet."""
  began = time.monotonic()
  told = began
  while True:
    try:
      peer = _Peer(socket.create_connection((host, port), _ANSWER))
    except OSError as error:
      reason = error.strerror or str(error)
    else:
      # An older job's coordinator may be there still; it speaks otherwise.
      with contextlib.suppress(ValueError):
        if peer.receive() is not None:
          peer.member = agreement.Member(0, host)
          return peer
      peer.close()
      reason = 'what is there is no process of this job'
    now = time.monotonic()
    if now - began >= seconds:
      raise errors.AbsentError(
        f'process 0 at {host}:{port} has not answered in {seconds:g} s'
        f' ({reason}); see what it says, whether its machine is up, and'
        ' whether its port can be reached from here.'
      )
    if now - told >= _NEWS:
      told = now
      say(
        f'waiting for process 0 at {host}:{port} for {now - began:.0f} s'
        f' ({reason})'
      )
    time.sleep(min(_AGAIN, began + seconds - now))
