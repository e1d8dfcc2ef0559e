"""Metrics of a run: a JSONL file to compute with, event files to look at.

`metrics.jsonl` has one line per (kind, step): `{"kind": "train", "step": 3,
"loss": ...}`. Every line goes to the kernel in one write, so SIGKILL loses at
most the line being written; in a bucket, `growing` says what it loses, and
`flush` before a checkpoint sees to it that this is computed again.
TensorBoard's record format and messages are
used without its file layer, which would import TensorFlow where installed.
"""

from collections.abc import Iterator, Mapping
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

# JSON has no such numbers, and a loss that became one must stay visible.
_NON_FINITE = {'NaN': math.nan, 'Infinity': math.inf, '-Infinity': -math.inf}


class MetricWriter:
  """Appends records; on resume drops those beyond the restored step.

  A record of step s must be written before the checkpoint of step s is
  saved: what is kept at the restart is exactly what is not computed again.

  Attributes:
    path: of the JSONL file.
    dropped: the records that were dropped.
  """

  def __init__(self, folder: str | os.PathLike[str], first_step: int):
    """Opens the files, making the folder if need be.

    Args:
      folder: gets `metrics.jsonl` and the folder `tensorboard`.
      first_step: steps done at this start; records beyond it are dropped,
        a half-written line too.

    Raises:
      UserError: the folder cannot be written.
    """
    self.path = paths.at(folder) / FILE
    events = self.path.parent / EVENTS
    try:
      events.mkdir(parents=True, exist_ok=True)
      self._last, self.dropped = _drop_beyond(self.path, first_step)
      self._lines = append_log.append(self.path)
      self._events = _EventFile(events, first_step)
    except OSError as error:
      raise disk.cannot_write(self.path.parent, error) from error

  def __enter__(self) -> 'MetricWriter':
    return self

  def __exit__(self, *exception) -> None:
    self.close()

  def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
    """Appends one record.

    Args:
      kind: 'train', 'eval', ...
      step: higher than in the last record of this kind.
      values: numbers (numpy's and jax's too), or anything else JSON can
        hold; TensorBoard shows the numbers, as `kind/name`.

    Raises:
      ValueError: this kind has a record of this step or a later one.
      UserError: the disk is full, or gone.
    """
    if step <= self._last.get(kind, -1):
      raise ValueError(
        f'metrics of kind {kind!r} go up to step {self._last[kind]}; a record'
        f' of step {step} would be out of order.'
      )
    plain = {name: _plain(value) for name, value in values.items()}
    record = {'kind': kind, 'step': step}
    record |= {name: _encode(value) for name, value in plain.items()}
    line = json.dumps(record, allow_nan=False).encode() + b'\n'
    scalars = {
      f'{kind}/{name}': float(value)
      for name, value in plain.items()
      if isinstance(value, int | float)
    }
    try:
      self._lines.write(line)
      self._events.write(step, scalars)
    except OSError as error:
      raise disk.cannot_write(self.path, error) from error
    self._last[kind] = step

  def flush(self) -> None:
    """Sees to it that SIGKILL loses nothing that was written so far.

    Raises:
      UserError: the disk is full, or gone.
    """
    try:
      self._lines.flush()
      self._events.flush()
    except OSError as error:
      raise disk.cannot_write(self.path, error) from error

  def last(self, kind: str) -> int | None:
    """Step of the last record of a kind, None if there is none."""
    return self._last.get(kind)

  def close(self) -> None:
    """Closes the files."""
    self._lines.close()
    self._events.close()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Reads the records of a run, in the order they were written.

  Args:
    path: the JSONL file, or the folder it is in.

  Returns:
    The records; a last line that is still being written is left out.
  """
  path = paths.at(path)
  return [
    {name: _decode(value) for name, value in record.items()}
    for record, _ in _records(path / FILE if path.is_dir() else path)
  ]


class _EventFile:
  """One TensorBoard event file, written through at every record."""

  def __init__(self, folder: paths.Path, first_step: int):
    now = time.time()
    name = f'events.out.tfevents.{now:.6f}.{socket.gethostname()}.{os.getpid()}'
    self._file = append_log.append(folder / name)
    self._writer = record_writer.RecordWriter(self._file)
    self._add(event_pb2.Event(wall_time=now, file_version='brain.Event:2'))
    # Makes TensorBoard forget what earlier files say of later steps.
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._add(
      event_pb2.Event(wall_time=now, step=first_step + 1, session_log=start)
    )

  def write(self, step: int, scalars: Mapping[str, float]) -> None:
    summary = summary_pb2.Summary(
      value=[
        summary_pb2.Summary.Value(tag=tag, simple_value=value)
        for tag, value in scalars.items()
      ]
    )
    self._add(
      event_pb2.Event(wall_time=time.time(), step=step, summary=summary)
    )

  def _add(self, event: event_pb2.Event) -> None:
    self._writer.write(event.SerializeToString())

  def flush(self) -> None:
    self._file.flush()

  def close(self) -> None:
    self._writer.close()


def _drop_beyond(
  path: paths.Path, step: int
) -> tuple[dict[str, int], list[dict[str, Any]]]:
  """Keeps the records up to a step.

  Returns:
    The last step of each kind, and the records that were dropped.
  """
  if not append_log.exists(path):
    return {}, []
  last: dict[str, int] = {}
  lines, dropped = [], []
  for record, line in _records(path):
    if record['step'] <= step:
      last[record['kind']] = record['step']
      lines.append(line)
    else:
      dropped.append(record)
  kept = b''.join(lines)
  if kept != append_log.read(path):
    append_log.replace(path, kept)
  return last, dropped


def _records(path: paths.Path) -> Iterator[tuple[dict[str, Any], bytes]]:
  """Yields every whole record and the line it is in, once."""
  last: dict[str, int] = {}
  lines = append_log.read(path).splitlines(keepends=True)
  for number, line in enumerate(lines, 1):
    if not line.endswith(b'\n'):
      return
    try:
      record = json.loads(line)
      kind, step = record['kind'], record['step']
    except (ValueError, KeyError, TypeError):
      print(
        f'Warning: {path}, line {number} is not a record; left out.',
        file=sys.stderr,
      )
      continue
    # A kill while a bucket's parts were replaced left them twice.
    if not paths.is_bucket(path) or step > last.get(kind, -1):
      last[kind] = step
      yield record, line


def _plain(value: Any) -> Any:
  """Python's number for a number of numpy's or jax's; the rest unchanged."""
  return value.item() if hasattr(value, 'item') else value


def _encode(value: Any) -> Any:
  if isinstance(value, float) and not math.isfinite(value):
    return 'NaN' if math.isnan(value) else f'{"-" * (value < 0)}Infinity'
  return value


def _decode(value: Any) -> Any:
  return _NON_FINITE.get(value, value) if isinstance(value, str) else value
