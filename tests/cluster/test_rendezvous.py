"""Who is missing, who differs, and who has gone, over real connections."""

from concurrent import futures
import re
import socket
import threading
import time

import pytest

from encdec_adapt.cli import errors
from encdec_adapt.cluster import agreement, rendezvous
from tests import tiny


def member(number, **facts):
  return agreement.Member(number, f'host-{number}', facts)


class Job:
  """Processes of a job, each in a thread."""

  def __init__(self, count):
    """Nobody has come yet."""
    self.count, self.port = count, tiny.free_port()
    self.said = []
    self._pool = futures.ThreadPoolExecutor()

  def start(self, number, seconds=20.0, count=None, **facts):
    """Starts a process; its line comes as a future."""
    own, count = member(number, **facts), count or self.count
    if number == 0:
      return self._pool.submit(
        rendezvous.gather, self.port, count, own, seconds, self.said.append
      )
    return self._pool.submit(
      *(rendezvous.join, '127.0.0.1', self.port, count, own, seconds),
      self.said.append,
    )

  def lines(self, **options):
    """Starts all; their lines."""
    return [f.result(30) for f in [self.start(n) for n in range(self.count)]]


def watched(line):
  """What a line says of who is gone, or fails, as a future."""
  told = futures.Future()
  line.watch(told.set_result, lambda *failed: told.set_result(failed))
  return told


def hang_up(line):
  """What the kernel does for a process that is killed."""
  for peer in line._peers:
    peer.socket.shutdown(socket.SHUT_RDWR)


def test_all_come_and_one_is_gone():
  zero, one, two = Job(3).lines()
  told = [watched(zero), watched(one)]
  hang_up(two)
  for future in told:
    assert future.result(10) == (
      'process 2 (host-2) is gone: its connection is closed'
    )


def test_process_0_is_gone():
  zero, *others = Job(3).lines()
  told = [watched(line) for line in others]
  hang_up(zero)
  for future in told:
    assert future.result(10).startswith('process 0 (127.0.0.1) is gone')


def test_who_leaves_in_order_is_not_missed():
  zero, one, two = Job(3).lines()
  told = watched(zero)
  two.leave()
  hang_up(two)
  time.sleep(0.2)
  assert not told.done()
  hang_up(one)
  assert told.result(10).startswith('process 1 (host-1) is gone')


@pytest.mark.parametrize('failing', [0, 1, 2])
def test_one_that_fails_ends_all_with_its_words_and_status(failing):
  lines = Job(3).lines()
  told = [watched(line) for line in lines]
  lines[failing].fail('process N failed: no room', 2)
  hang_up(lines[failing])
  for number, future in enumerate(told):
    if number != failing:
      assert future.result(10) == ('process N failed: no room', 2)
  # That the others go is what it told them to do.
  assert not told[failing].done()


def test_the_one_that_is_missing_is_named_to_all():
  job = Job(4)
  came = [job.start(0, seconds=1.0), job.start(1), job.start(3)]
  for future in came:
    with pytest.raises(errors.AbsentError) as raised:
      future.result(30)
    message = str(raised.value)
    assert (
      'after 1 s, 3 of 4 processes are here; missing: process 2.' in message
    )
    assert 'process 1 (host-1), process 3 (host-3)' in message


def test_news_of_who_is_missing(monkeypatch):
  monkeypatch.setattr(rendezvous, '_NEWS', 0.1)
  monkeypatch.setattr(rendezvous, '_AGAIN', 0.02)
  job = Job(2)
  with pytest.raises(errors.AbsentError):
    job.start(0, seconds=0.35).result(30)
  assert '1 of 2 processes are here; missing: process 1.' in job.said[0]
  assert len(job.said) >= 2
  job.said.clear()
  with pytest.raises(errors.AbsentError, match='has not answered in 0.4 s'):
    job.start(1, seconds=0.4).result(30)
  assert job.said[0].startswith(
    f'waiting for process 0 at 127.0.0.1:{job.port}'
  )


def test_what_differs_ends_all_with_the_same_words():
  job = Job(3)
  started = [job.start(n, steps=20 + (n == 2)) for n in range(3)]
  for future in started:
    with pytest.raises(errors.UserError) as raised:
      future.result(30)
    assert not isinstance(raised.value, errors.AbsentError)
    assert (
      'steps is 21 on process 2 (host-2), 20 on process 0 (host-0), process 1'
      ' (host-1).'
    ) in str(raised.value)


def test_a_clock_that_is_wrong_ends_all(monkeypatch):
  real, here = time.time, threading.local()
  monkeypatch.setattr(
    time, 'time', lambda: real() + getattr(here, 'wrong', 0.0)
  )
  job = Job(2)

  def join():
    here.wrong = -60.0
    return rendezvous.join('127.0.0.1', job.port, 2, member(1), 20.0, print)

  for future in (job.start(0), job._pool.submit(join)):
    with pytest.raises(errors.UserError) as raised:
      future.result(30)
    found = re.search(
      r'the clock of process 1 \(host-1\) is at least (.*) s behind that of'
      r' process 0 \(host-0\)',
      str(raised.value),
    )
    assert 55 < float(found[1]) <= 60


def test_two_of_one_number():
  job = Job(3)
  first = job.start(1)
  zero = job.start(0)
  second = job.start(1)
  for future in (zero, first, second):
    with pytest.raises(errors.UserError, match='have the same number; give'):
      future.result(30)


def test_another_count():
  job = Job(3)
  for future in (job.start(0), job.start(1, count=2)):
    with pytest.raises(errors.UserError, match='was told of 2 processes, and'):
      future.result(30)


def test_one_that_was_started_again_takes_its_own_place():
  job = Job(3)
  zero = job.start(0)
  gone = rendezvous._reach('127.0.0.1', job.port, 20.0, print)
  gone.send(process=1, processes=3, host='h', clock=time.time(), facts={})
  gone.close()
  lines = [job.start(n).result for n in (1, 2)]
  assert [line(30) for line in lines] and zero.result(30)


def test_strangers_are_sent_away(monkeypatch):
  monkeypatch.setattr(rendezvous, '_ANSWER', 0.2)
  job = Job(2)
  zero = job.start(0)
  for words in (b'GET / HTTP/1.1\r\n', b'7\n', b'{"process": "x"}\n', b''):
    while True:
      try:
        stranger = socket.create_connection(('127.0.0.1', job.port), 5)
        break
      except ConnectionRefusedError:
        time.sleep(0.01)
    with stranger:
      stranger.sendall(words)
      assert stranger.recv(100) == b'{"ready": true}\n'
      assert not stranger.recv(100)
  job.start(1).result(30)
  zero.result(30)


def test_a_port_that_is_taken_is_named():
  job = Job(2)
  with socket.create_server(('', job.port)):
    with pytest.raises(errors.UserError) as raised:
      job.start(0).result(30)
  assert f'port {job.port} of the coordinator' in str(raised.value)


def test_process_0_that_ends_before_all_came():
  job = Job(2)
  with socket.create_server(('', job.port)) as server:
    one = job.start(1)
    connection, _ = server.accept()
    with connection:
      connection.sendall(b'{"ready": true}\n')
      connection.makefile('rb').readline()
    with pytest.raises(errors.AbsentError, match='ended before all processes'):
      one.result(30)
