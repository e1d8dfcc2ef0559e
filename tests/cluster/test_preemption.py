"""One process; that several agree on a step is tested in tests/multiproc."""

import os
import signal

import pytest

from encdec_adapt.cluster import preemption


def test_ctrl_c_stops_after_the_step_and_again_at_once(capsys):
  handler = signal.getsignal(signal.SIGINT)
  with preemption.StopSignal() as stop:
    signal.raise_signal(signal.SIGINT)
    assert stop.reached(1)
    assert capsys.readouterr().out.startswith('interrupted: saves')
    with pytest.raises(KeyboardInterrupt):
      signal.raise_signal(signal.SIGINT)
  assert signal.getsignal(signal.SIGINT) is handler


def test_a_signal_is_remembered_and_the_handler_is_restored():
  received = []

  def handler(number, frame):
    received.append(number)

  before = signal.signal(signal.SIGTERM, handler)
  try:
    with preemption.StopSignal() as stop:
      assert not stop.reached(1)
      for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
      assert stop.reached(2)
    assert received == []
    os.kill(os.getpid(), signal.SIGTERM)
    assert received == [signal.SIGTERM]
  finally:
    signal.signal(signal.SIGTERM, before)
