"""HTML pages of studies and evaluations.

An evaluation's report is a dictionary with `title`, `notes` (sentences),
`environment`, `quality` (label, and a number per model) and `per_query` (cost
per model and axis: lower quartile, median, upper quartile) for the figure,
`needles` for the heat maps (see `evaluation.tasks.retrieval_scores.grids`),
`calibration` (see `preference_scores.curves`), `attention` (see
`attention_analysis.figures`), and `tables`: rows by section (see
`lab.score_tables`). This module does not import the writer of the dictionary. A
page is self-contained, but for links to folders of runs.
"""

import base64
from collections.abc import Callable, Mapping
import functools
import json
import math
import os
import pathlib
from typing import Any

import jinja2

from encdec_adapt.files import paths
from encdec_adapt.lab import report_figures

Report = Mapping[str, Any]

JSON = 'report.json'


@functools.cache
def blocks() -> Any:
  """Returns the macros of report.jinja: functions of values to HTML."""
  template = pathlib.Path(__file__).with_name('report.jinja')
  environment = jinja2.Environment(autoescape=True, trim_blocks=True)
  environment.filters['json'] = functools.partial(json.dumps, indent=1)
  text = template.read_text(encoding='utf-8')
  return environment.from_string(text).module


def write_evaluation(report: Report, folder: str | os.PathLike[str]) -> None:
  """Writes the report of an evaluation and replaces files of an earlier one.

  Args:
    report: the dictionary documented in the module docstring.
    folder: folder of `report.json`, `report.html` and the figures.
  """
  html = blocks()
  sections = {name: html.table(x) for name, x in report['tables'].items()}
  styles = report_figures.styles(list(report['per_query']))
  with paths.staged(folder) as stage:
    sections['Needles'] = needles(stage, report['needles'])
    sections['Calibration'] = html.figures(
      [
        figure(
          stage,
          f'calibration_{task}',
          f'calibration on {task}',
          report_figures.draw_calibration,
          curves,
        )
        for task, curves in report['calibration'].items()
      ]
    )
    if report['per_query']:
      label, quality = report['quality']
      sections['Quality against cost'] = cost_figures(
        stage,
        label,
        {name: (x, x, x) for name, x in quality.items()},
        report['per_query'],
        styles,
      )
    if report['attention']:
      sections['Attention'] = html.wide(
        figure(
          stage,
          'attention',
          'attention by layer and head',
          report_figures.draw_attention,
          report['attention'],
        )
      )
    sections['Environment'] = html.facts(report['environment'])
    save(stage, report, html.page(report['title'], report['notes'], sections))


def needles(folder: paths.Path, grids: Mapping[str, Any]) -> str:
  """Draws the heat maps of needles.

  Args:
    folder: folder of the report and the image.
    grids: see `report_figures.draw_needles`.

  Returns:
    HTML; '' without grids.
  """
  name, draw = 'needles by depth and length', report_figures.draw_needles
  if not grids:
    return ''
  return blocks().wide(figure(folder, 'needles', name, draw, grids))


def cost_figures(
  folder: paths.Path,
  label: str,
  quality: Mapping[str, Any],
  costs: Mapping[str, Mapping[str, Any]],
  styles: report_figures.Styles,
  lower_is_better: bool = False,
) -> str:
  """Draws quality against every cost axis (`report_figures`)."""
  prefix = label.replace('/', '_').replace(': ', '_').replace(' ', '_')
  names = [name for name in quality if name in costs]
  return blocks().figures(
    [
      figure(
        folder,
        f'{prefix}_{i}',
        f'{label} against {axis}',
        report_figures.draw_points,
        {name: (costs[name][axis], quality[name]) for name in names},
        (axis, label),
        styles,
        is_cost=True,
        lower_is_better=lower_is_better,
      )
      for i, axis in enumerate(next(iter(costs.values())), 1)
    ]
  )


def save(folder: paths.Path, report: Report, text: str) -> None:
  """Writes the JSON and the page of a report."""
  # Python writes NaN and infinity by default; strict JSON parsers reject them.
  content = json.dumps(_finite(report), indent=1, allow_nan=False)
  (folder / JSON).write_text(content + '\n', encoding='utf-8')
  (folder / 'report.html').write_text(text, encoding='utf-8')


def _finite(value: Any) -> Any:
  if isinstance(value, Mapping):
    return {key: _finite(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [_finite(item) for item in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


def figure(
  folder: paths.Path,
  file: str,
  name: str,
  draw: Callable[..., None],
  *args: Any,
  **options: Any,
) -> str:
  """Draws a figure into a PNG and embeds it: the page is self-contained."""
  path = folder / f'{file}.png'
  draw(*args, **options, path=path)
  return blocks().image(name, base64.b64encode(path.read_bytes()).decode())
