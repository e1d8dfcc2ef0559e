"""Reports of benchmarks: flags, tables, JSON. Imports no array library."""

import argparse
from collections.abc import Mapping, Sequence
import json
import pathlib
import platform
from typing import Any

Row = Mapping[str, Any]


def parser(description: str | None) -> argparse.ArgumentParser:
  """An argument parser with the flags that every benchmark has."""
  result = argparse.ArgumentParser(description=description)
  result.add_argument('--output', help='also write the numbers here, as JSON')
  return result


def report(
  name: str, rows: Sequence[Row], arguments: argparse.Namespace
) -> dict[str, Any]:
  """Prints a table of the rows, and writes them to `--output`.

  Args:
    name: name of the benchmark.
    rows: the table's rows; the keys of the first are its header.
    arguments: parsed flags; they are written too.

  Returns:
    The written content: 'benchmark', 'machine', 'settings' and 'rows'.
  """
  header = list(rows[0])
  lines = [header] + [[_show(row[key]) for key in header] for row in rows]
  widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
  print(f'\n{name}')
  for line in lines:
    cells = [line[0].ljust(widths[0])]
    cells += [
      cell.rjust(width)
      for cell, width in zip(line[1:], widths[1:], strict=True)
    ]
    print('  '.join(cells))
  settings = vars(arguments).copy()
  output = settings.pop('output')
  content = {
    'benchmark': name,
    'machine': {
      'platform': platform.platform(),
      'python': platform.python_version(),
    },
    'settings': settings,
    'rows': [dict(row) for row in rows],
  }
  if output:
    pathlib.Path(output).write_text(json.dumps(content, indent=1) + '\n')
  return content


def _show(value: Any) -> str:
  if not isinstance(value, float):
    return str(value)
  if abs(value) >= 1000:
    return f'{value:,.0f}'
  return f'{value:.3g}'
