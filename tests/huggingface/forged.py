"""Safetensors files byte by byte, sound or not."""

import json
import pathlib


def entry(dtype, shape, begin: int, end: int) -> dict:
  """What a header says of one tensor."""
  return {'dtype': dtype, 'shape': shape, 'data_offsets': [begin, end]}


def write(
  path: pathlib.Path,
  header: dict | str | bytes,
  data: bytes = b'',
  length: int | None = None,
) -> pathlib.Path:
  """Writes a file with this header and data.

  Args:
    path: of the file.
    header: a dict becomes JSON; text and bytes are taken as they are.
    data: after the header.
    length: what the file says of its header; None is the truth.
  """
  if isinstance(header, dict):
    header = json.dumps(header)
  if isinstance(header, str):
    header = header.encode()
  length = len(header) if length is None else length
  path.write_bytes(length.to_bytes(8, 'little') + header + data)
  return path
