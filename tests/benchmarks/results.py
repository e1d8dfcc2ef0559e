"""Flags, turns, and reports of benchmarks. Imports no array library."""

import argparse
from collections.abc import Callable, Mapping, Sequence
import json
import pathlib
import platform
import statistics
import time
from typing import Any

Row = Mapping[str, Any]


def parser(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
  """Makes a parser of --output and of further flags.

  Args:
    description: text of --help.
    **defaults: default of each flag, whose type it has. A sequence takes any
      number of values, and False makes a switch.
  """
  result = argparse.ArgumentParser(
    description=description,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  result.add_argument('--output', help='also write the numbers here, as JSON')
  for name, default in defaults.items():
    if default is False:
      options = {'action': 'store_true'}
    elif isinstance(default, Sequence) and not isinstance(default, str):
      options = {'type': type(default[0]), 'nargs': '*'}
    else:
      options = {'type': type(default)}
    help_ = f'default: {default}'
    result.add_argument(f'--{name}', default=default, help=help_, **options)
  return result


def take_turns(
  runs: Mapping[Any, Callable[[], Any]], steps: int
) -> dict[Any, list[Any]]:
  """Calls functions in turn, so that noise of the machine affects all alike.

  Returns:
    For each function the result of a first call, which may compile, and of
    `steps` more.
  """
  found: dict[Any, list[Any]] = {name: [] for name in runs}
  for _ in range(1 + steps):
    for name, run in runs.items():
      found[name].append(run())
  return found


def seconds(run: Callable[[], Any]) -> float:
  """Returns how long a call takes."""
  start = time.perf_counter()
  run()
  return time.perf_counter() - start


def rested_seconds(run: Callable[[], Any]) -> float:
  """Returns how long a call takes when nothing else runs.

  OpenMP threads of the peer spin for 0.2 s after its work, and a first call
  after a pause wakes up those of both.
  """
  time.sleep(0.3)
  run()
  return seconds(run)


def median(answers: Sequence[Mapping[str, float]], key: str) -> float:
  """Returns the median of an entry."""
  return statistics.median(answer[key] for answer in answers)


def report(
  name: str, rows: Sequence[Row], arguments: argparse.Namespace
) -> dict[str, Any]:
  """Prints a table of the rows, and writes them to `--output`.

  Args:
    name: name of the benchmark.
    rows: the table's rows; the keys of all are its header.
    arguments: parsed flags; they are written too.

  Returns:
    The written content: 'benchmark', 'machine', 'settings' and 'rows'.
  """
  header = list(dict.fromkeys(key for row in rows for key in row))
  lines = [header] + [
    [_show(row.get(key, '')) for key in header] for row in rows
  ]
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
