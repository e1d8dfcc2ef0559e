"""Texts with dividers, such as ',' or ' | ', outside of JSON strings."""

import json
import re

_QUOTED = r'"(?:[^"\\]|\\.)*"'  # A JSON string.


def divide(text: str, divider: str) -> list[str]:
  """Divides a text at every divider outside of quotes."""
  parts, start = [], 0
  for match in re.finditer(f'{_QUOTED}|({re.escape(divider)})', text):
    if match[1]:
      parts.append(text[start : match.start()])
      start = match.end()
  return [*parts, text[start:]]


def read(text: str) -> str:
  """Reads a text: a JSON string in quotes, or verbatim.

  Raises:
    ValueError: a text that begins with a quote is no JSON string.
  """
  return json.loads(text) if text.startswith('"') else text
