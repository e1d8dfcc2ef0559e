"""Reads the event files of TensorBoard."""

from collections.abc import Iterator
import pathlib

from tensorboard.compat.proto import event_pb2
from tensorboard.compat.tensorflow_stub import pywrap_tensorflow

from encdec_adapt.telemetry import trackers


def read(folder: pathlib.Path) -> Iterator[event_pb2.Event]:
  """Yields the events of every file, files in order of creation."""
  for path in sorted((folder / trackers.EVENTS).iterdir()):
    reader = pywrap_tensorflow.PyRecordReader_New(str(path))
    while True:
      try:
        reader.GetNext()
      except Exception as end:
        assert 'OutOfRange' in type(end).__name__
        break
      yield event_pb2.Event.FromString(reader.record())
