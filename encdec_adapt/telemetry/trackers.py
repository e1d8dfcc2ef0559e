"""Trackers of a run: TensorBoard event files, Weights & Biases.

`config.train.trackers` selects them. They show the configuration, the numbers
of `metrics.jsonl` and tables (samples, scores), all of which are also files in
the work directory: a failing tracker is reported once and disabled, and the job
continues. Only the lead process has trackers, and no other process depends on
them. TensorBoard's record format and messages are used without its file layer,
which would import an installed TensorFlow. This module must not import models
or data.
"""

from collections.abc import Mapping, Sequence
import json
import os
import secrets
import socket
import textwrap
import time
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.text import summary_v2
from tensorboard.summary.writer import record_writer

from encdec_adapt.base import errors, packages
from encdec_adapt.files import append_log, atomic, paths

KEY = 'config.train.trackers'
EVENTS = 'tensorboard'  # Folder of event files.
RUN_ID = 'wandb.json'  # Run id in Weights & Biases, for resumed jobs.

Config = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]


class TensorBoard:
  """A TensorBoard event file, flushed at every record."""

  @staticmethod
  def check() -> None:
    """Needs no check: the package is always installed."""

  def open(self, folder: paths.Path, first_step: int, config: Config) -> None:
    """Opens a new file beside those of earlier starts.

    Args:
      folder: work directory of the job.
      first_step: number of steps done before this start.
      config: the configuration of the job.
    """
    start = f'{time.time():.6f}.{socket.gethostname()}.{os.getpid()}'
    (folder / EVENTS).mkdir(parents=True, exist_ok=True)
    file = folder / EVENTS / f'events.out.tfevents.{start}'
    self._file = append_log.append(file)
    self._writer = record_writer.RecordWriter(self._file)
    self._add(file_version='brain.Event:2')
    # TensorBoard then discards later steps of earlier files.
    session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._add(step=first_step + 1, session_log=session)
    rows = [{'config.json': json.dumps(config, indent=1)}]
    self.table('config', first_step + 1, rows)

  def write(self, step: int, scalars: Mapping[str, float]) -> None:
    """Adds scalars of a step by tag."""
    make = summary_pb2.Summary.Value
    value = [make(tag=tag, simple_value=x) for tag, x in scalars.items()]
    self._add(step=step, summary=summary_pb2.Summary(value=value))

  def table(self, name: str, step: int, rows: Rows) -> None:
    """Adds a table of a step: rows with the same keys, at least one."""
    # Cells are Markdown, which shows indented lines verbatim.
    cells = [
      [textwrap.indent(str(cell), ' ' * 4, lambda _: True) for cell in line]
      for line in (rows[0], *(row.values() for row in rows))
    ]
    self._add(step=step, summary=summary_v2.text_pb(name, cells))

  def _add(self, **fields: Any) -> None:
    event = event_pb2.Event(wall_time=time.time(), **fields)
    self._writer.write(event.SerializeToString())

  def flush(self) -> None:
    """Flushes all records."""
    self._file.flush()

  def close(self) -> None:
    """Closes the file."""
    self._writer.close()


class WeightsAndBiases:
  """A run of Weights & Biases; WANDB_PROJECT, WANDB_MODE and others apply."""

  @staticmethod
  def check() -> None:
    """Raises a `UserError` without the package or credentials."""
    packages.require(f'{KEY} with wandb', 'wandb', 'wandb')
    import wandb

    problem = 'it has no credentials'
    try:
      is_offline = wandb.setup().settings.mode != 'online'
      if is_offline or wandb.login(prompt=False, verify=False):
        return
    except wandb.errors.Error as error:
      problem = str(error)
    raise errors.UserError(
      f'{KEY} has wandb, but {problem}: run `wandb login`, set WANDB_API_KEY,'
      ' or set WANDB_MODE=offline to keep the run on disk.'
    )

  def open(self, folder: paths.Path, first_step: int, config: Config) -> None:
    """Opens the run with the id saved in the folder, or a new run."""
    import wandb

    del first_step  # Repeated steps have the same numbers.
    path = folder / RUN_ID
    if not path.exists():
      atomic.write_json(path, {'id': secrets.token_hex(8)})
    # By default, finishing waits for a lost network, and stopping a run on the
    # site interrupts only this process.
    settings = {'finish_timeout': 60, 'stop_fn': lambda: None}
    settings |= {'console': 'off', 'silent': True}
    self._table = wandb.Table
    self._run = wandb.init(
      project=os.environ.get('WANDB_PROJECT', 'encdec_adapt'),
      name=folder.name,
      id=atomic.read_json(path)['id'],
      resume='allow',
      dir=None if paths.is_bucket(folder) else folder,
      settings=settings,
    )
    # A resumed job may have another configuration.
    self._run.config.update(config, allow_val_change=True)
    # wandb's step only grows, even if a job repeats steps.
    self._run.define_metric('*', step_metric='step')

  def write(self, step: int, scalars: Mapping[str, float]) -> None:
    """Adds scalars of a step by name."""
    self._run.log({**scalars, 'step': step})

  def table(self, name: str, step: int, rows: Rows) -> None:
    """Adds a table."""
    cells = [list(row.values()) for row in rows]
    self._run.log({name: self._table(list(rows[0]), cells), 'step': step})

  def flush(self) -> None:
    """Does nothing: wandb's process writes the records."""

  def close(self) -> None:
    """Ends this start of the run."""
    self._run.finish()


TRACKERS = {'tensorboard': TensorBoard, 'wandb': WeightsAndBiases}


def check_names(names: Sequence[str]) -> None:
  """Checks that names are in `TRACKERS`.

  Raises:
    UserError: a name is unknown.
  """
  for name in names:
    if name not in TRACKERS:
      raise errors.UserError(
        f'{KEY} has {name!r}; it must be one of {", ".join(TRACKERS)}'
        f'{errors.nearest(name, TRACKERS)}.'
      )


def check(names: Sequence[str]) -> None:
  """Checks packages and credentials of trackers, before long work.

  Args:
    names: names in `TRACKERS`.

  Raises:
    UserError: a package is not installed, or a tracker has no credentials.
  """
  for name in names:
    TRACKERS[name].check()
