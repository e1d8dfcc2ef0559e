"""Metrics of a run: a JSONL file, and what trackers show of it.

`metrics.jsonl` has a line for each (kind, step): `{"kind": "train", "step": 3,
"loss": ...}`; numbers that are not finite are strings ("NaN", "Infinity"),
since JSON has no such numbers. Every line goes to the kernel in a single write,
so that SIGKILL loses at most the line being written; for buckets see
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
    self,
    folder: str | os.PathLike[str],
    first_step: int,
    selects: str = 'loss',
    tracked: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
  ):
    """Opens the file and the trackers, making the folder if need be.

    Args:
      folder: gets `metrics.jsonl` and the files of trackers.
      first_step: number of steps done before this start; records beyond it
        and a half-written line are dropped.
      selects: metric of evaluations that decides which is the best.
      tracked: names of trackers.
      config: the configuration of the job, for them.

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
      step: higher than in the last record of this kind.
      values: numbers (numpy's and jax's too), or anything else that is JSON
        serialisable; trackers show the numbers, as `kind/name`.

    Raises:
      UserError: the disk is full, or gone.
    """
    plain = {name: _plain(value) for name, value in values.items()}
    encoded = {name: _encode(value) for name, value in plain.items()}
    record = {'kind': kind, 'step': step, **encoded}
    # Trackers take numbers only, and show non-finite ones.
    scalars = {
      f'{kind}/{name}': float(value)
      for name, value in plain.items()
      if isinstance(value, int | float)
    }
    self._log.write(record)
    self._tell(lambda t: t.write(step, scalars))

  def show(self, name: str, step: int, rows: trackers.Rows) -> None:
    """Shows a table on the trackers alone; its rows have the same keys."""
    self._tell(lambda t: t.table(name, step, rows))

  def flush(self) -> None:
    """Writes everything through, so that SIGKILL loses nothing.

    Raises:
      UserError: the disk is full, or gone.
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
    The records, without a last line that is still being written.
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
      # A damaged line must not keep the run from being resumed.
      print(f'Warning: {line} is not a record; ignored.', file=sys.stderr)


def _plain(value: Any) -> Any:
  return value.item() if hasattr(value, 'item') else value


def _encode(value: Any) -> Any:
  """Replaces a non-finite number with its name."""
  if isinstance(value, float) and not math.isfinite(value):
    return json.dumps(value)
  return value


def _decode(value: Any) -> Any:
  return float(value) if value in _NON_FINITE else value
