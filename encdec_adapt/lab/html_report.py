"""HTML pages of studies and evaluations: sections, tables, figures.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
import html
import json
import math
import os
from typing import Any

from encdec_adapt.files import paths
from encdec_adapt.lab import report_figures

Report = Mapping[str, Any]

JSON = 'report.json'

# Figures are white: in the dark, their lightness is inverted and the hue kept.
_CSS = """
:root { color-scheme: light dark; }
body { font: 16px/1.55 system-ui, sans-serif; max-width: 80rem; margin: auto;
  padding: 0 1rem; }
img { max-width: 100%; height: auto; }
div.wide { overflow-x: auto; }
div.wide img { min-width: 44rem; }
div.figures { display: flex; flex-wrap: wrap; gap: 1rem; }
div.figures img { width: 38rem; }
table { border-collapse: collapse; }
th, td { padding: .3rem .7rem; max-width: 26rem; text-align: left;
  vertical-align: top; border-bottom: 1px solid #8886; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid;
  padding-left: 1rem; }
pre span { color: gray; }
summary { cursor: pointer; }
@media (prefers-color-scheme: dark) {
  img { filter: invert(.93) hue-rotate(180deg); }
}
"""


class Markup(str):
  """Text of a cell, already in HTML."""


def write_evaluation(report: Report, folder: str | os.PathLike[str]) -> None:
  """Writes the report of an evaluation and replaces files of an earlier one.

  Args:
    report: the dictionary documented in the module docstring.
    folder: folder of `report.json`, `report.html` and the figures.
  """
  sections = {name: table(rows) for name, rows in report['tables'].items()}
  styles = report_figures.styles(list(report['per_query']))
  with paths.staged(folder) as stage:
    sections['Needles'] = needles(stage, report['needles'])
    sections['Calibration'] = figures(
      figure(
        stage / f'calibration_{task}.png',
        f'calibration on {task}',
        report_figures.draw_calibration,
        curves,
      )
      for task, curves in report['calibration'].items()
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
      sections['Attention'] = wide(
        figure(
          stage / 'attention.png',
          'attention by layer and head',
          report_figures.draw_attention,
          report['attention'],
        )
      )
    sections['Environment'] = facts(report['environment'])
    save(stage, report, page(report['title'], report['notes'], sections))


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
  return wide(figure(folder / 'needles.png', name, draw, grids))


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
  return figures(
    figure(
      folder / f'{prefix}_{i}.png',
      f'{label} against {axis}',
      report_figures.draw_points,
      {name: (costs[name][axis], quality[name]) for name in names},
      (axis, label),
      styles,
      is_cost=True,
      lower_is_better=lower_is_better,
    )
    for i, axis in enumerate(next(iter(costs.values())), 1)
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


def page(title: str, notes: Iterable[str], sections: Mapping[str, str]) -> str:
  """Renders a page of paragraphs and sections, without empty ones."""
  title = html.escape(title)
  intro = ''.join(map(paragraph, notes))
  body = ''.join(f'<h2>{k}</h2>\n{v}\n' for k, v in sections.items() if v)
  return (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    f'<title>{title}</title>\n<style>{_CSS}</style></head>\n<body><main>\n'
    f'<h1>{title}</h1>\n{intro}{body}</main></body></html>\n'
  )


def paragraph(text: str) -> str:
  """Returns a paragraph of plain text as HTML."""
  return f'<p>{html.escape(text)}</p>\n'


def figure(
  path: paths.Path,
  name: str,
  draw: Callable[..., None],
  *args: Any,
  **options: Any,
) -> str:
  """Draws a figure into a PNG and embeds it: the page is self-contained."""
  draw(*args, **options, path=path)
  data = base64.b64encode(path.read_bytes()).decode()
  name = html.escape(name)
  return f'<img alt="{name}" src="data:image/png;base64,{data}">'


def figures(images: Iterable[str]) -> str:
  """Renders figures side by side, as many as fit the screen."""
  text = '\n'.join(images)
  return text and f'<div class="figures">{text}</div>'


def table(rows: Sequence[Mapping[str, Any]]) -> str:
  """Renders rows with the same keys, under a header; '' for none."""
  if not rows:
    return ''
  lines = [('th', rows[0]), *(('td', row.values()) for row in rows)]
  body = '\n'.join(
    '<tr>' + ''.join(f'<{tag}>{_cell(x)}</{tag}>' for x in cells) + '</tr>'
    for tag, cells in lines
  )
  return wide(f'<table>{body}</table>')


def wide(content: str) -> str:
  """Renders content with horizontal scrolling on narrow screens."""
  return f'<div class="wide">{content}</div>'


def _cell(value: Any) -> str:
  return value if isinstance(value, Markup) else html.escape(str(value))


def items(texts: Sequence[str]) -> str:
  """Renders sentences as a list; '' for none."""
  lines = ''.join(f'<li>{html.escape(text)}</li>\n' for text in texts)
  return lines and f'<ul>{lines}</ul>'


def folded(title: str, content: str) -> str:
  """Renders collapsed content; '' for none."""
  title = html.escape(title)
  return content and (
    f'<details><summary>{title}</summary>\n{content}</details>\n'
  )


def facts(values: Mapping[str, Any]) -> str:
  """Renders names and values as collapsed JSON."""
  text = html.escape(json.dumps(values, indent=1))
  return folded('all entries', f'<pre>{text}</pre>')
