"""Bad flags; that processes meet is tested in multiproc/."""

import jax
import pytest

from encdec_adapt.cli import errors
from encdec_adapt.cluster import distributed


def test_one_process_needs_nothing():
  distributed.initialize(None, None, None)
  distributed.initialize('localhost:1234', 1, 0)
  assert distributed.is_lead()
  distributed.barrier('alone')
  assert distributed.from_lead(lambda: None) is None
  assert distributed.from_lead(lambda: 3) == 3


@pytest.mark.parametrize(
  'flags, said',
  [
    (('localhost:1234', None, None), 'give all three'),
    ((None, 2, 0), 'give all three'),
    (('localhost:1234', 2, 2), 'process is 2 of 2'),
    (('localhost:1234', 0, 0), 'process is 0 of 0'),
    (('localhost:1234', 2, -1), 'process is -1 of 2'),
    (('localhost', 2, 0), "coordinator is 'localhost'"),
    ((':80', 2, 0), "coordinator is ':80'"),
    (('h:70000', 2, 0), "coordinator is 'h:70000'"),
    (('auto', None, None), 'cannot be found; coordinator=auto needs'),
    (('auto', 2, 0), "coordinator is 'auto'"),
    (('auto', 1, None), 'auto alone'),
  ],
)
def test_bad_flags_are_named(flags, said):
  with pytest.raises(errors.UserError, match=said):
    distributed.initialize(*flags)


@pytest.mark.parametrize(
  'raised, error, said',
  [
    # The first machine is not up yet; the metadata server does not answer.
    (RuntimeError('no address w-0'), errors.AbsentError, 'no address w-0'),
    (ConnectionError('metadata'), errors.AbsentError, 'start the job again'),
    (ValueError('of a format'), errors.UserError, 'coordinator=auto needs'),
  ],
)
def test_machines_that_do_not_answer_are_asked_again(
  monkeypatch, raised, error, said
):
  def ask(*args):
    raise raised

  monkeypatch.setattr(
    distributed.clusters.ClusterEnv, 'auto_detect_unset_distributed_params', ask
  )
  with pytest.raises(errors.UserError, match=said) as caught:
    distributed.initialize('auto', None, None)
  assert type(caught.value) is error


class _Client:
  """Of a coordination service whose other processes never come, or do."""

  def __init__(self, come):
    self.come, self.seconds, self.values = come, [], {}

  def wait_at_barrier(self, key, milliseconds):
    del key
    self.seconds.append(milliseconds / 1000)
    if not self.come:
      raise jax.errors.JaxRuntimeError('of the service')

  def key_value_set(self, key, value):
    self.values[key] = value

  def key_value_try_get(self, key):
    return self.values[key]

  def key_value_dir_get(self, folder):
    return [item for item in self.values.items() if item[0].startswith(folder)]


@pytest.fixture
def client(monkeypatch):
  """Makes meetings go to a client; gives what makes it."""

  def make(*, come):
    jax.devices()  # Not to be made while there is a client.
    made = _Client(come)
    state = distributed.jax_distributed.global_state
    monkeypatch.setattr(state, 'client', made)
    monkeypatch.setattr(state, 'process_id', 0)
    monkeypatch.setattr(state, 'num_processes', 2)
    # Put back, too: meetings are counted and named for the whole process.
    for held in ('_met', '_last'):
      monkeypatch.setattr(distributed, held, getattr(distributed, held))
    return made

  return make


def test_how_long_is_waited_is_by_what_comes_before(client):
  made = client(come=True)
  distributed.barrier('records', distributed.MAKING)
  assert distributed.from_lead(lambda: 3, 'checkpoint') == 3
  distributed.agree('devices', {'kind': 'cpu'}, distributed.PROMPT)
  hour = 3600.0
  assert made.seconds == [24 * hour, 6 * hour, hour / 2, hour / 2]


@pytest.mark.parametrize(
  'patience, said',
  [
    (distributed.PROMPT, "waited 1800 seconds at 'here' .* nothing long"),
    (distributed.READING, "waited 21600 seconds at 'here' .* checkpoint"),
    (distributed.MAKING, "waited 86400 seconds at 'here' .* making records"),
  ],
)
def test_a_wait_that_ends_says_where_and_why(
  client, monkeypatch, patience, said
):
  made = client(come=False)
  monkeypatch.setattr(distributed.time, 'monotonic', lambda: sum(made.seconds))
  with pytest.raises(errors.AbsentError, match=said):
    distributed.barrier('here', patience)


def test_a_wait_that_cannot_go_on_says_why(client, monkeypatch):
  made = client(come=False)

  def ask(folder):
    raise jax.errors.JaxRuntimeError('gone')

  monkeypatch.setattr(made, 'key_value_dir_get', ask)
  said = r"waited 0.0 seconds at 'here' for the other 1, .* of the service"
  with pytest.raises(errors.AbsentError, match=said):
    distributed.barrier('here')
