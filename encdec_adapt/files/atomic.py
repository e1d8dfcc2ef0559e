"""Small files: written whole or not at all, and read with suspicion."""

import json
import os
from typing import Any

from encdec_adapt.cli import errors
from encdec_adapt.files import paths


def write_json(path: str | os.PathLike[str], content: Any) -> None:
  """Writes JSON by the rules of `storage.write`.

  Args:
    path: of the file; what was there is replaced. Its folder is made.
    content: what JSON can hold.
  """
  paths.write(path, (json.dumps(content, indent=2) + '\n').encode())


def damaged(file: str | os.PathLike[str], what: str) -> errors.UserError:
  """The error to raise where a file contradicts itself."""
  return errors.UserError(
    f'{file}: {what}. The file is incomplete or damaged: fetch it again, or'
    ' save it again where it came from.'
  )


def cannot_read(
  path: str | os.PathLike[str], error: OSError
) -> errors.UserError:
  """The error to raise where reading `path` failed with `error`."""
  return errors.UserError(
    f'{path} cannot be read ({error.strerror or error}). Make it readable for'
    ' this user, or fetch it again.'
  )


def parse_json(text: bytes, file: str | os.PathLike[str]) -> dict[str, Any]:
  """Parses a JSON object in which no key comes twice.

  Raises:
    UserError: it is not UTF-8, not JSON, no object, or has a key twice.
  """

  def unique(pairs):
    """An object, of pairs of which no two have one key."""
    found = {}
    for key, value in pairs:
      if key in found:
        raise damaged(file, f'the key {key!r} comes twice')
      # JSON can spell half characters, which UTF-8 cannot.
      key.encode()
      if isinstance(value, str):
        value.encode()
      found[key] = value
    return found

  def refuse(name):
    """For NaN and infinities."""
    raise ValueError(f'{name} is not JSON')

  try:
    content = json.loads(
      text.decode(), object_pairs_hook=unique, parse_constant=refuse
    )
  except (ValueError, RecursionError) as error:
    raise damaged(file, f'it has no valid JSON ({error})') from error
  if not isinstance(content, dict):
    raise damaged(file, f'its JSON is a {type(content).__name__}, no object')
  return content


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
  """A file that is a JSON object, by the rules of `parse_json`.

  Raises:
    UserError: it cannot be read, or is none.
  """
  try:
    text = paths.at(path).read_bytes()
  except OSError as error:
    raise cannot_read(path, error) from error
  return parse_json(text, path)
