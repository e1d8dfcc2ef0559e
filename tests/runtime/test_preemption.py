import os
import signal

from encdec_adapt.runtime import preemption


def test_a_signal_becomes_a_flag_and_the_handler_is_put_back():
  before = signal.getsignal(signal.SIGTERM)
  with preemption.StopSignal() as stop:
    assert not stop.requested()
    for _ in range(2):
      os.kill(os.getpid(), signal.SIGTERM)
    assert stop.requested()
  assert signal.getsignal(signal.SIGTERM) is before
  assert stop.requested()


def test_a_handler_of_somebody_else_is_put_back():
  received = []

  def handler(number, frame):
    received.append(number)

  before = signal.signal(signal.SIGUSR1, handler)
  try:
    with preemption.StopSignal((signal.SIGUSR1,)) as stop:
      os.kill(os.getpid(), signal.SIGUSR1)
      assert stop.requested()
    assert received == []
    os.kill(os.getpid(), signal.SIGUSR1)
    assert received == [signal.SIGUSR1]
  finally:
    signal.signal(signal.SIGUSR1, before)
