"""Bad flags; real processes are in tests/multiproc."""

import socket

import pytest

from encdec_adapt.base import errors
from encdec_adapt.cluster import distributed
from tests import tiny


def test_one_process_needs_nothing():
  distributed.initialize(None, None, None)
  distributed.initialize('localhost:1234', 1, 0)
  assert distributed.is_lead()
  distributed.barrier('alone')
  distributed.require_same('alone', {'rows': 3})
  assert distributed.from_lead(lambda: 3) == 3


@pytest.mark.parametrize(
  'flags, message',
  [
    (('localhost:1234', None, None), 'give all three'),
    ((None, 2, 0), 'give all three'),
    (('localhost:1234', 2, 2), 'process is 2 of 2'),
    (('localhost:1234', 2, -1), 'process is -1 of 2'),
    (('localhost:1234', 0, 0), 'process is 0 of 0'),
    (('localhost', 2, 0), "coordinator is 'localhost'"),
    ((':80', 2, 0), "coordinator is ':80'"),
    (('h:70000', 2, 0), "coordinator is 'h:70000'"),
    (('auto', None, None), 'cannot be found; coordinator=auto needs'),
    (('auto', 2, 0), "coordinator is 'auto'"),
  ],
)
def test_bad_flags_are_named(flags, message):
  with pytest.raises(errors.UserError, match=message):
    distributed.initialize(*flags)


def test_machines_of_a_slice_that_do_not_answer_are_asked_again(monkeypatch):
  def ask(*args):
    raise RuntimeError('no address w-0')

  monkeypatch.setattr(
    distributed.clusters.ClusterEnv, 'auto_detect_unset_distributed_params', ask
  )
  with pytest.raises(errors.AbsentError, match='no address w-0'):
    distributed.initialize('auto', None, None)


def test_process_0_that_does_not_answer_is_named():
  address = f'127.0.0.1:{tiny.free_port()}'
  with pytest.raises(errors.AbsentError, match=f'process 0 at {address}'):
    distributed.initialize(address, 2, 1, timeout=0.1)


def test_a_port_in_use_is_named():
  port = tiny.free_port()
  with socket.create_server(('', port)):
    with pytest.raises(errors.UserError, match=f'port {port} of the'):
      distributed.initialize(f'127.0.0.1:{port}', 2, 0)
