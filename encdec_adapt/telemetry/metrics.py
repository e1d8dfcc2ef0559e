"""Metrics of a run: a JSONL file, shown by trackers.

`metrics.jsonl` has a line for each (kind, step): `{"kind": "train", "step": 3,
"loss": ...}`; non-finite numbers are strings ("NaN", "Infinity"), as JSON does
not support them. Every line goes to the kernel in a single write, so that
SIGKILL loses at most the line being written; for buckets, see
`files.append_log`, and `flush` before a checkpoint. This module must not import
models or data.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import json
import math
import os
import sys
from typing import Any

from encdec_adapt.files import append_log, disk, paths
from encdec_adapt.telemetry import trackers

FILE = 'metrics.jsonl'

_NON_FINITE = ('NaN', 'Infinity', '-Infinity')  # Python's names in JSON.


class MetricWriter(contextlib.AbstractContextManager):
  """Appends records; on resume, drops records beyond the restored step.

  A record of step s must be written before the checkpoint of step s is saved,
  so that a restart recomputes exactly the dropped records.

  Attributes:
    path: the JSONL file.
    evaluations: step of each kept evaluation -> the metric that selects the
      best.
    dropped: the dropped records.
  """

  def __init__(
    self,
    folder: str | os.PathLike[str],
    first_step: int,
    selects: str = 'loss',
    tracked: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
  ):
    """Opens the file and the trackers; creates the folder if missing.

    Args:
      folder: folder of `metrics.jsonl` and the files of trackers.
      first_step: number of steps done before this start; later records and an
        incomplete line are dropped.
      selects: evaluation metric that selects the best step.
      tracked: names of trackers.
      config: the configuration of the job, for the trackers.

    Raises:
      UserError: the folder cannot be written.
    """
    self.path = paths.at(folder) / FILE
    with disk.writing(self.path.parent):
      self.path.parent.mkdir(parents=True, exist_ok=True)
      self._log = append_log.Log(self.path)
      self.evaluations, self.dropped, records = {}, [], []
      for record in _records(self._log):
        is_later = record['step'] > first_step
        (self.dropped if is_later else records).append(record)
        if record['kind'] == 'eval' and not is_later:
          self.evaluations[record['step']] = _decode(record[selects])
      self._log.keep(records)
    self._trackers = {name: trackers.TRACKERS[name]() for name in tracked}
    self._tell(lambda t: t.open(self.path.parent, first_step, config or {}))

  def __exit__(self, *exception) -> None:
    self.close()

  def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
    """Appends a record.

    Args:
      kind: 'train', 'eval', ...
      step: must increase among records of this kind.
      values: numbers (including NumPy and JAX), or other JSON serializable
        values; trackers show the numbers as `kind/name`.

    Raises:
      UserError: the disk is full or missing.
    """
    plain = {name: _plain(value) for name, value in values.items()}
    encoded = {name: _encode(value) for name, value in plain.items()}
    record = {'kind': kind, 'step': step, **encoded}
    # Trackers accept only numbers, including non-finite numbers.
    scalars = {
      f'{kind}/{name}': float(value)
      for name, value in plain.items()
      if isinstance(value, int | float)
    }
    self._log.write(record)
    self._tell(lambda t: t.write(step, scalars))

  def show(self, name: str, step: int, rows: trackers.Rows) -> None:
    """Shows a table on the trackers; all rows must have the same keys."""
    self._tell(lambda t: t.table(name, step, rows))

  def flush(self) -> None:
    """Flushes all records, so that SIGKILL loses nothing.

    Raises:
      UserError: the disk is full or missing.
    """
    self._log.flush()
    self._tell(lambda t: t.flush())

  def close(self) -> None:
    """Closes the file and the trackers."""
    self._log.close()
    self._tell(lambda t: t.close())

  def _tell(self, call: Callable[[Any], None]) -> None:
    for name, tracker in list(self._trackers.items()):
      try:
        call(tracker)
      except Exception as error:  # Any error: the job continues.
        del self._trackers[name]
        print(
          f'Warning: the tracker {name} failed and is left out'
          f' ({type(error).__name__}: {error})',
          file=sys.stderr,
        )


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Reads the records of a run, in the order they were written.

  Args:
    path: the JSONL file, or its folder.

  Returns:
    The records, without an incomplete last line.
  """
  path = paths.at(path)
  path = path / FILE if path.is_dir() else path
  return [
    {name: _decode(value) for name, value in record.items()}
    for record in _records(append_log.Log(path))
  ]


def _records(log: append_log.Log) -> Iterator[dict[str, Any]]:
  for record, line in log.lines:
    if isinstance(record, dict) and {'kind', 'step'} <= record.keys():
      yield record
    else:
      # A damaged line must not prevent resuming.
      print(f'Warning: {line} is not a record; ignored.', file=sys.stderr)


def _plain(value: Any) -> Any:
  return value.item() if hasattr(value, 'item') else value


def _encode(value: Any) -> Any:
  if isinstance(value, float) and not math.isfinite(value):
    return json.dumps(value)
  return value


def _decode(value: Any) -> Any:
  return float(value) if value in _NON_FINITE else value
