"""Reads lines of a text file, keyed by file and line for error messages.

This module must not know the format of lines other than JSON.
"""

import io
import json
import sys
from typing import Any

from encdec_adapt.base import errors
from encdec_adapt.files import decompression


def read(path: str) -> dict[str, str]:
  """Reads the lines of a file, without its byte-order mark.

  Args:
    path: path of the file; '-' for standard input.

  Returns:
    'PATH, line N' or 'standard input, line N' -> the line.

  Raises:
    UserError: the file cannot be read, is not UTF-8, or is empty.
  """
  name = 'standard input' if path == '-' else path
  try:
    if path == '-':
      text = sys.stdin.read()
    else:
      # Not `decode`, which would keep foreign line ends.
      data = io.BytesIO(decompression.read(path))
      text = io.TextIOWrapper(data, 'utf-8').read()
  except (OSError, UnicodeDecodeError) as error:
    raise errors.UserError(
      f'{name} cannot be read as UTF-8 text ({error}).'
    ) from error
  if not text:
    raise errors.UserError(f'{name} is empty; it needs at least one line.')
  # Not splitlines(), which would also split at form feeds.
  text = text.removeprefix('\ufeff').removesuffix('\n')
  lines = enumerate(text.split('\n'), 1)
  return {f'{name}, line {number}': line for number, line in lines}


def read_json(path: str, array: bool = False) -> dict[str, Any]:
  """Reads a file with a JSON value per line; see `read`.

  Args:
    path: path of the file.
    array: whether the file may instead have a single array of the values.

  Raises:
    UserError: a line is not JSON; see also `read`.
  """
  values, lines = {}, read(path)
  text = '\n'.join(lines.values()) if array else ''
  is_array = text.lstrip()[:1] == '['
  if is_array:
    lines = {path: text}
  for label, line in lines.items():
    try:
      values[label] = json.loads(line)
    except ValueError as error:
      raise errors.UserError(f'{label} is not JSON ({error}).') from error
  if is_array:
    return {f'{path}, item {i}': x for i, x in enumerate(values[path], 1)}
  return values
