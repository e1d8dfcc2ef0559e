"""Reports of studies and evaluations: `report.json`, figures, `report.html`.

A study's report is a dictionary:

  title         title of the page
  size          name of the study's size
  text          facts about the text
  runs          by name: `kind` (`decoder_only` or `encoder_decoder`),
                `parameters`, `steps`, `target_tokens`, `total_tokens`,
                `flops`, `seconds`, `learning_rate`, `seed`, `eval_loss`,
                `eval_loss_at_step_0`, `eval_loss_in_training` (the last on the
                held-out rows of the run's training),
                `eval_loss_shuffled_prefix` (loss with the prefixes of other
                examples, or None), `exact_match` (share of rows),
                `label_accuracy` (of classifiers, else None),
                `curve` (lists `step`, `target_tokens`, `eval_loss`),
                `request` (cost of a request of `prompt` and `generated` tokens:
                `FLOPs`, `ms at batch 1` and the metrics of `inference_cost`;
                None where not measured) and
                `inclusive` (`target_tokens`, `total_tokens`, `flops`,
                `seconds` of the run and of all its sources)
  best          names of the runs that are the best of several
  stages        `name`, `command`, `status`, `starts`, `seconds` of all starts
  samples       `run`, `prompt`, `continuation`
  tuned         report of the study that fine-tunes the runs, or None
  note          last sentence of the findings, or ''
  table         rows of a table of the study's own, may be missing or empty
  environment   versions and hardware

Losses are nats per target token. Runs named `<model>_seed<n>` repeat `<model>`.
An imported model has an empty curve, and the numbers of its training from its
folder's `summary.json`; without one it has 0 steps and None for the others.

An evaluation's report is a dictionary with `title`, `notes` (sentences),
`environment`, `quality` (label, and a number per model) and `per_query` (cost
per model and axis: lower quartile, median, upper quartile) of the figure,
`needles` of the heat maps (see `evaluation.tasks.retrieval_scores.grids`),
`attention` (see `attention_analysis.figures`), and `tables`: rows by section,
see `evaluation.reports.score_tables`. The modules that write these dictionaries
are not imported.
"""

import base64
from collections.abc import Mapping, Sequence
import html
import json
import math
import os
import pathlib
from typing import Any

from encdec_adapt.evaluation.reports import report_figures, report_findings
from encdec_adapt.evaluation.results import number_format as numbers
from encdec_adapt.files import paths
from encdec_adapt.telemetry import progress

Report = Mapping[str, Any]

JSON = 'report.json'

_CSS = """
body { font: 16px/1.55 system-ui, sans-serif; max-width: 68rem; margin: auto; }
img { max-width: 100%; }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { padding: .3rem .7rem; text-align: left; border-bottom: 1px solid; }
pre { white-space: pre-wrap; border-left: 3px solid; padding-left: 1rem; }
pre span { color: gray; }
"""


def write(report: Report, folder: str | os.PathLike) -> list[str]:
  """Writes the report; files of an earlier one are replaced.

  Args:
    report: the dictionary that the module's docstring documents.
    folder: folder of the files, made if it is missing. `report.html` embeds
      the picture and refers to nothing outside it. `report.json` is the
      dictionary with `findings` added and null for numbers that are not
      finite.

  Returns:
    The findings.
  """
  findings = report_findings.findings(report)
  with paths.staged(folder) as stage:
    picture = stage / 'curves.png'
    report_figures.draw_curves(report, picture)
    page = _render(report, findings, picture)
    _save(stage, {**report, 'findings': findings}, page)
  return findings


def write_evaluation(report: Report, folder: str | os.PathLike[str]) -> None:
  """Writes the report of an evaluation; files of an earlier one are replaced.

  Args:
    report: the dictionary that the module's docstring documents.
    folder: folder of `report.json` and `report.html`, and of `costs.png`,
      `needles.png` and `attention.png` if those were measured.
  """
  sections = {
    name: _table(rows) for name, rows in report['tables'].items() if rows
  }
  with paths.staged(folder) as stage:
    if report['needles']:
      picture = stage / 'needles.png'
      report_figures.draw_needles(report['needles'], picture)
      sections['Needles'] = _image('needles by depth and length', picture)
    if report['per_query']:
      picture = stage / 'costs.png'
      report_figures.draw_costs(
        *report['quality'], report['per_query'], picture
      )
      sections['Quality against cost'] = _image('quality against cost', picture)
    if report['attention']:
      picture = stage / 'attention.png'
      report_figures.draw_attention(report['attention'], picture)
      sections['Attention'] = _image('attention by layer and head', picture)
    sections['Environment'] = _facts(report['environment'])
    intro = ''.join(f'<p>{html.escape(text)}</p>\n' for text in report['notes'])
    _save(stage, report, _page(report['title'], intro, sections))


def _save(folder: paths.Path, report: Report, page: str) -> None:
  """Writes the JSON and the page of a report."""
  # NaN and infinity, which Python writes by default, break strict readers.
  content = json.dumps(_finite(report), indent=1, allow_nan=False)
  (folder / JSON).write_text(content + '\n', encoding='utf-8')
  (folder / 'report.html').write_text(page, encoding='utf-8')


def _finite(value: Any) -> Any:
  """Replaces numbers that are not finite by None."""
  if isinstance(value, Mapping):
    return {key: _finite(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [_finite(item) for item in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


def _render(
  report: Report, findings: Sequence[str], picture: pathlib.Path
) -> str:
  """Renders the page."""
  runs = report['runs']
  items = ''.join(f'<li>{html.escape(text)}</li>' for text in findings)
  sections = {
    'Findings': f'<ol>{items}</ol>',
    'Measures': _table(report['table']) if report.get('table') else '',
    'Learning curves': _image('learning curves', picture),
    'Models': _models(runs),
    'Cost': _table([_cost(name, run) for name, run in runs.items()])
    + '<p>Tokens include prefixes; time is that of training steps.</p>',
    'Continuations': ''.join(
      f'<p>{html.escape(text)}</p>\n'
      for text in report_findings.explain_continuations(report)
    )
    + ''.join(map(_sample, report['samples'])),
    'Stages': _stages(report['stages']),
    'Text': _facts(report['text']),
    'Environment': _facts(report['environment']),
  }
  intro = (
    f'<p>Size: {html.escape(report["size"])}. Losses are nats per target token'
    ' on held-out text. The last loss of every model is on the same target'
    ' tokens; curves, and losses at step 0 and in training, are on the held-out'
    " rows of a model's own training, which for decoder-only models are not cut"
    ' into prefix and target.</p>\n'
  )
  return _page(report['title'], intro, sections)


def _page(title: str, intro: str, sections: Mapping[str, str]) -> str:
  """Renders a page of sections; empty ones are left out."""
  title = html.escape(title)
  body = ''.join(f'<h2>{k}</h2>\n{v}\n' for k, v in sections.items() if v)
  return (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
    f'<title>{title}</title>\n<style>{_CSS}</style></head>\n<body><main>\n'
    f'<h1>{title}</h1>\n{intro}{body}</main></body></html>\n'
  )


def _image(name: str, picture: pathlib.Path) -> str:
  """Embeds a PNG, so that the page is complete as a single file."""
  data = base64.b64encode(picture.read_bytes()).decode()
  return f'<img alt="{name}" src="data:image/png;base64,{data}">'


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
  """Renders rows with the same keys; the keys are the header."""
  lines = [('th', rows[0]), *(('td', row.values()) for row in rows)]
  body = '\n'.join(
    '<tr>'
    + ''.join(f'<{tag}>{html.escape(str(text))}</{tag}>' for text in cells)
    + '</tr>'
    for tag, cells in lines
  )
  return f'<div class="wide"><table>{body}</table></div>'


def _models(runs: Mapping[str, Report]) -> str:
  """Renders the losses of every run."""
  rows = []
  for name, run in runs.items():
    loss, shuffled = run['eval_loss'], run['eval_loss_shuffled_prefix']
    rate, seed = run['learning_rate'], run['seed']
    rows.append(
      {
        'run': name,
        'parameters': numbers.count(run['parameters']),
        'steps': f'{run["steps"]:,}',
        'target tokens': numbers.count(run['target_tokens']),
        'learning rate': '-' if rate is None else f'{rate:g}',
        'seed': '-' if seed is None else seed,
        'loss at step 0': numbers.loss(run['eval_loss_at_step_0']),
        'last loss in training': numbers.loss(run['eval_loss_in_training']),
        'loss': numbers.loss(loss),
        "others' prefixes": numbers.loss(shuffled),
        'difference': '-' if shuffled is None else f'{shuffled - loss:+.3f}',
        'exact': f'{run["exact_match"]:.1%}',
      }
    )
  return _table(rows) + (
    "<p>Others' prefixes: the loss when every example reads the prefix of"
    ' another. An encoder counts as used where that is more than'
    f' {report_findings.ENCODER_USED} worse. Parameters include the embedding'
    ' tables. Steps, tokens and losses in training of an imported model are'
    " those of its training, from its folder's summary.json.</p>"
  )


def _cost(name: str, run: Mapping[str, Any]) -> dict[str, str]:
  """Returns the cost of a run, without and with its sources."""
  cells = {'run': name}
  for suffix, part in (('', run), (', with sources', run['inclusive'])):
    cells[f'tokens{suffix}'] = numbers.count(part['total_tokens'])
    cells[f'FLOPs{suffix}'] = f'{part["flops"]:.2e}'
    cells[f'time{suffix}'] = progress.format_seconds(part['seconds'])
  return cells


def _sample(sample: Mapping[str, str]) -> str:
  """Renders a prompt and its continuation."""
  return (
    f'<pre><span>{html.escape(sample["prompt"])}</span>'
    f'{html.escape(sample["continuation"])}</pre>\n'
  )


def _stages(stages: Sequence[Mapping[str, Any]]) -> str:
  """Renders the commands with the time and number of their starts."""
  rows = [
    {
      'stage': stage['name'],
      'took': progress.format_seconds(stage['seconds']),
      'starts': stage['starts'],
      'status': stage['status'],
      'command': stage['command'],
    }
    for stage in stages
  ]
  total = progress.format_seconds(sum(stage['seconds'] for stage in stages))
  return f'{_table(rows)}<p>Total {total}, without installation.</p>'


def _facts(facts: Mapping[str, Any]) -> str:
  """Renders names and values as JSON."""
  return f'<pre>{html.escape(json.dumps(facts, indent=1))}</pre>'
