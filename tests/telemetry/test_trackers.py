"""Trackers: what they show, one run for a resumed job, no job that they end."""

import json
import sys

import pytest
from tensorboard.compat.proto import event_pb2

from encdec_adapt.base import errors
from encdec_adapt.telemetry import metrics, trackers
from tests import event_files


@pytest.fixture
def account(tmp_path, monkeypatch):
  """Weights & Biases of a user without credentials, and its variables."""
  wandb = pytest.importorskip('wandb')
  monkeypatch.setenv('HOME', str(tmp_path))
  for name in ('WANDB_API_KEY', 'WANDB_MODE', 'WANDB_PROJECT', 'NETRC'):
    monkeypatch.delenv(name, raising=False)
  yield monkeypatch
  wandb.teardown()  # It reads the variables once.


def test_tensorboard_reads_the_events(tmp_path):
  tracked = ['tensorboard']
  with metrics.MetricWriter(tmp_path, 0, tracked=tracked) as writer:
    writer.write('train', 1, {'loss': 0.5, 'note': 'text'})
    # Written through: read before the file is closed.
    first, start, _, event = list(event_files.read(tmp_path))
  assert first.file_version == 'brain.Event:2'
  status = start.session_log.status
  assert (start.step, status) == (1, event_pb2.SessionLog.START)
  (value,) = event.summary.value
  assert (event.step, value.tag, value.simple_value) == (1, 'train/loss', 0.5)
  metrics.MetricWriter(tmp_path, 7, tracked=tracked).close()
  assert list(event_files.read(tmp_path))[-1].step == 8


@pytest.mark.long
def test_a_resumed_job_continues_its_run(account, tmp_path):
  account.setenv('WANDB_MODE', 'offline')
  trackers.check(['wandb'])
  for first in (0, 1):
    with metrics.MetricWriter(
      tmp_path, first, tracked=['wandb'], config={'seed': 7 + first}
    ) as writer:
      writer.write('train', first + 1, {'loss': 0.5, 'note': 'text'})
      writer.show('samples', first + 1, [{'row': 0, 'output': 'a\nb'}])
  sys.modules['wandb'].teardown()  # Writes everything.
  # One id for both starts.
  run = json.loads((tmp_path / trackers.RUN_ID).read_text())['id']
  files = sorted(tmp_path.glob('wandb/offline-run-*/*.wandb'))
  assert [path.name for path in files] == [f'run-{run}.wandb'] * 2
  for seed, path in zip((b'7', b'8'), files, strict=True):
    content = path.read_bytes()
    assert b'train/loss' in content and b'note' not in content
    assert b'seed' in content and seed in content
    (table,) = path.parent.glob('files/media/table/samples_*.json')
    assert json.loads(table.read_text())['data'] == [[0, 'a\nb']]


def test_a_tracker_that_fails_is_left_out(tmp_path, monkeypatch, capsys):
  class Broken(trackers.TensorBoard):
    def write(self, step, scalars):
      raise ConnectionError('no route')

  monkeypatch.setitem(trackers.TRACKERS, 'wandb', Broken)
  names = 'wandb', 'tensorboard'
  with metrics.MetricWriter(tmp_path, 0, tracked=names) as writer:
    for step in (1, 2):
      writer.write('train', step, {'loss': 0.5})
  (line,) = capsys.readouterr().err.splitlines()
  assert 'wandb failed' in line and 'no route' in line
  assert [x['step'] for x in metrics.read_metrics(tmp_path)] == [1, 2]
  assert [e.step for e in event_files.read(tmp_path)][-1] == 2
  # One that does not open.
  (tmp_path / 'b').mkdir()
  (tmp_path / 'b' / trackers.EVENTS).write_text('a file')
  with metrics.MetricWriter(tmp_path / 'b', 0, tracked=names) as writer:
    writer.write('train', 1, {'loss': 0.5})
  assert len(capsys.readouterr().err.splitlines()) == 2


def test_trackers_are_checked_before_work(account):
  with pytest.raises(errors.UserError, match='wnadb.*one of tensorboard, wan'):
    trackers.check_names(['tensorboard', 'wnadb'])
  with pytest.raises(errors.UserError, match='no credentials.*WANDB_MODE'):
    trackers.check(['tensorboard', 'wandb'])
  account.setitem(sys.modules, 'wandb', None)
  with pytest.raises(errors.UserError, match=r'pip install .*\[wandb\]'):
    trackers.check(['wandb'])
  trackers.check([])
