"""Metrics of a run: a JSONL file, and TensorBoard event files.

`metrics.jsonl` has a line for each (kind, step): `{"kind": "train", "step": 3,
"loss": ...}`; numbers that are not finite are strings ("NaN", "Infinity"),
since JSON has no such numbers. Every line goes to the kernel in a single write,
so that SIGKILL loses at most the line being written; for buckets see
`files.append_log`, and `flush` before a checkpoint. TensorBoard's record format
and messages are used without its file layer, which would import TensorFlow
where it is installed. This module must not import models or data.
"""

from collections.abc import Iterator, Mapping
import contextlib
import json
import math
import os
import socket
import sys
import time
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer import record_writer

from encdec_adapt.files import append_log, disk, paths

FILE = 'metrics.jsonl'
EVENTS = 'tensorboard'  # Folder of event files.

_NON_FINITE = ('NaN', 'Infinity', '-Infinity')  # Python's names in JSON.


class MetricWriter(contextlib.AbstractContextManager):
  """Appends records; on resume drops those beyond the restored step.

  A record of step s must be written before the checkpoint of step s is
  saved: the records kept at a restart are exactly those that are not computed
  again.

  Attributes:
    path: the JSONL file.
    evaluations: step of each evaluation that is kept -> the metric that
      decides which is the best.
    dropped: records that were dropped.
  """

  def __init__(
    self, folder: str | os.PathLike[str], first_step: int, selects: str = 'loss'
  ):
    """Opens the files, making the folder if need be.

    Args:
      folder: gets `metrics.jsonl` and the folder `tensorboard`.
      first_step: number of steps done before this start; records beyond it
        and a half-written line are dropped.
      selects: metric of evaluations that decides which is the best.

    Raises:
      UserError: the folder cannot be written.
    """
    self.path = paths.at(folder) / FILE
    events = self.path.parent / EVENTS
    with disk.writing(self.path.parent):
      events.mkdir(parents=True, exist_ok=True)
      self._log = append_log.Log(self.path)
      self.evaluations, self.dropped, records = {}, [], []
      for record in _records(self._log):
        is_later = record['step'] > first_step
        (self.dropped if is_later else records).append(record)
        if record['kind'] == 'eval' and not is_later:
          self.evaluations[record['step']] = _decode(record[selects])
      self._log.keep(records)
      self._events = _EventFile(events, first_step)

  def __exit__(self, *exception) -> None:
    self.close()

  def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
    """Appends a record.

    Args:
      kind: 'train', 'eval', ...
      step: higher than in the last record of this kind.
      values: numbers (numpy's and jax's too), or anything else that is JSON
        serialisable; TensorBoard shows the numbers, as `kind/name`.

    Raises:
      UserError: the disk is full, or gone.
    """
    plain = {name: _plain(value) for name, value in values.items()}
    encoded = {name: _encode(value) for name, value in plain.items()}
    record = {'kind': kind, 'step': step, **encoded}
    # TensorBoard has numbers only, and shows those that are not finite.
    scalars = {
      f'{kind}/{name}': float(value)
      for name, value in plain.items()
      if isinstance(value, int | float)
    }
    self._log.write(record)
    with disk.writing(self.path):
      self._events.write(step, scalars)

  def flush(self) -> None:
    """Writes everything through, so that SIGKILL loses nothing.

    Raises:
      UserError: the disk is full, or gone.
    """
    self._log.flush()
    with disk.writing(self.path):
      self._events.flush()

  def close(self) -> None:
    """Closes the files."""
    self._log.close()
    self._events.close()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Reads the records of a run, in the order they were written.

  Args:
    path: the JSONL file, or its folder.

  Returns:
    The records, without a last line that is still being written.
  """
  path = paths.at(path)
  path = path / FILE if path.is_dir() else path
  return [
    {name: _decode(value) for name, value in record.items()}
    for record in _records(append_log.Log(path))
  ]


class _EventFile:
  """A TensorBoard event file, written through at every record."""

  def __init__(self, folder: paths.Path, first_step: int):
    now = time.time()
    name = f'events.out.tfevents.{now:.6f}.{socket.gethostname()}.{os.getpid()}'
    self._file = append_log.append(folder / name)
    self._writer = record_writer.RecordWriter(self._file)
    self._add(wall_time=now, file_version='brain.Event:2')
    # Makes TensorBoard discard later steps of earlier files.
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._add(wall_time=now, step=first_step + 1, session_log=start)

  def write(self, step: int, scalars: Mapping[str, float]) -> None:
    """Adds scalars of a step by tag."""
    value = [
      summary_pb2.Summary.Value(tag=tag, simple_value=value)
      for tag, value in scalars.items()
    ]
    summary = summary_pb2.Summary(value=value)
    self._add(wall_time=time.time(), step=step, summary=summary)

  def _add(self, **fields: Any) -> None:
    self._writer.write(event_pb2.Event(**fields).SerializeToString())

  def flush(self) -> None:
    """Writes everything through."""
    self._file.flush()

  def close(self) -> None:
    """Closes the file."""
    self._writer.close()


def _records(log: append_log.Log) -> Iterator[dict[str, Any]]:
  """Yields the records of a log; warns of lines that are none."""
  for record, line in log.lines:
    if isinstance(record, dict) and {'kind', 'step'} <= record.keys():
      yield record
    else:
      # A damaged line must not keep the run from being resumed.
      print(f'Warning: {line} is not a record; ignored.', file=sys.stderr)


def _plain(value: Any) -> Any:
  """Converts numbers of numpy and jax to Python's."""
  return value.item() if hasattr(value, 'item') else value


def _encode(value: Any) -> Any:
  """Writes a number that is not finite as its name."""
  if isinstance(value, float) and not math.isfinite(value):
    return json.dumps(value)
  return value


def _decode(value: Any) -> Any:
  """Undoes `_encode`."""
  return float(value) if value in _NON_FINITE else value
