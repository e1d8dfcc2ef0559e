"""Atomic writing and validated reading of JSON files.

This module must not know keys: callers check the contents.
"""

import json
from typing import Any

from encdec_adapt.base import errors
from encdec_adapt.files import disk, paths


def json_bytes(content: Any) -> bytes:
  """Returns the content of a JSON file."""
  return (json.dumps(content, indent=2) + '\n').encode()


def write_json(path: paths.AnyPath, content: Any) -> None:
  """Writes JSON atomically; see `paths.write`.

  Args:
    path: file to create or replace; its folder is created.
    content: JSON serializable.

  Raises:
    UserError: the path cannot be written.
  """
  with disk.writing(path):
    paths.write(path, json_bytes(content))


def damaged(file: paths.AnyPath, problem: str) -> errors.UserError:
  """Returns the error for a file with invalid content."""
  return errors.UserError(
    f'{file}: {problem}. The file is incomplete or damaged: fetch it again, or'
    ' save it again where it came from.'
  )


def cannot_read(path: paths.AnyPath, error: OSError) -> errors.UserError:
  """Returns the user error for an `OSError` from reading `path`."""
  return errors.UserError(
    f'{path} cannot be read ({error.strerror or error}). Make it readable for'
    ' this user, or fetch it again.'
  )


def parse_json(text: bytes, file: paths.AnyPath) -> dict[str, Any]:
  """Parses a JSON object.

  Args:
    text: UTF-8 text.
    file: file name, for errors.

  Raises:
    UserError: the text is not a JSON object.
  """
  try:
    content = json.loads(text)
  except (ValueError, RecursionError) as error:  # Deeply nested brackets.
    raise damaged(file, f'it is not valid JSON ({error})') from error
  if not isinstance(content, dict):
    kind = type(content).__name__
    raise damaged(file, f'its JSON is a {kind}, not an object')
  return content


def read_json(path: paths.AnyPath) -> dict[str, Any]:
  """Reads a JSON object from a file; see `parse_json`.

  Raises:
    UserError: the file cannot be read, or is not a JSON object.
  """
  try:
    text = paths.at(path).read_bytes()
  except OSError as error:
    raise cannot_read(path, error) from error
  return parse_json(text, path)
