"""The report as one HTML page that needs nothing beside it."""

import base64
from collections.abc import Iterable, Mapping, Sequence
import html
import pathlib
from typing import Any

from encdec_adapt.evaluation import report_findings
from encdec_adapt.evaluation import report_numbers as numbers
from encdec_adapt.telemetry import progress

_CSS = """
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, sans-serif; color: #1f2328; margin: 0;
  background: #fff; }
main { max-width: 68rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; margin: 0 0 .2rem; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem; }
p.lead, p.note { color: #57606a; margin: .2rem 0 .8rem; }
p.note { font-size: .9rem; }
img { max-width: 100%; height: auto; display: block; }
ol.findings li { margin: .35rem 0; max-width: 54rem; }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .92rem; }
th, td { padding: .3rem .8rem; text-align: left; vertical-align: top;
  border-bottom: 1px solid #d8dee4; }
th { font-weight: 600; border-bottom: 2px solid #afb8c1;
  vertical-align: bottom; }
td.number, th.number { text-align: right; padding: .3rem .6rem;
  font-variant-numeric: tabular-nums; }
td.number { white-space: nowrap; }
th.number { max-width: 6rem; }
tr.best td { background: #eef6ff; }
code { font: .86em ui-monospace, monospace; overflow-wrap: anywhere; }
section.sample { border-left: 3px solid #d8dee4; padding: .1rem 1rem;
  margin: 1rem 0; }
section.sample h3 { font-size: .95rem; margin: 0; }
section.sample pre { font: .86rem/1.45 ui-monospace, monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; margin: .4rem 0; }
section.sample .prompt { color: #6e7781; }
"""


class _Raw(str):
  """Text that is HTML already."""


class _Number(str):
  """A cell that is aligned to the right."""


def render(
  report: Mapping[str, Any],
  findings: Sequence[str],
  pictures: Iterable[pathlib.Path],
) -> str:
  """The page.

  Args:
    report: see `evaluation.html_report`.
    findings: sentences of `report_findings.findings`.
    pictures: PNGs, embedded as data.

  Returns:
    HTML without references to anything outside it.
  """
  size = report['size']
  items = ''.join(f'<li>{html.escape(text)}</li>' for text in findings)
  parts = [
    f'<h1>{html.escape(report["title"])}</h1>',
    f'<p class="lead">Size: {html.escape(size)}. Losses are nats per target'
    ' token on held-out text. The last loss of every model is on the same'
    ' target tokens; curves, and losses at step 0, are of the held-out rows of'
    " a model's own training, which for decoder-only models are not cut into"
    ' prefix and target.</p>',
    f'<h2>What was found</h2><ol class="findings">{items}</ol>',
  ]
  for path in pictures:
    data = base64.b64encode(path.read_bytes()).decode()
    parts.append(
      f'<h2>Learning curves</h2><img alt="{html.escape(path.stem)}"'
      f' src="data:image/png;base64,{data}">'
    )
  runs = report['runs']
  parts += [_models(runs), _cost(runs), _learning_rates(runs)]
  parts += [_samples(report['samples']), _stages(report['stages'])]
  parts.append('<h2>Text</h2>' + _facts(report['text']))
  parts.append('<h2>Environment</h2>' + _facts(report['environment']))
  return (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
    '<meta name="viewport" content="width=device-width">\n'
    f'<title>{html.escape(report["title"])}</title>\n'
    f'<style>{_CSS}</style></head>\n<body><main>\n'
    + '\n'.join(parts)
    + '\n</main></body></html>\n'
  )


def _table(
  header: Sequence[str],
  rows: Sequence[Sequence[str]],
  marked: Iterable[int] = (),
) -> str:
  """A table; a column is aligned like its first row's cell."""
  marked = set(marked)

  def cell(tag: str, text: str, kind: str) -> str:
    shown = text if isinstance(text, _Raw) else html.escape(text)
    return f'<{tag}{kind}>{shown}</{tag}>'

  kinds = [
    ' class="number"' if rows and isinstance(text, _Number) else ''
    for text in (rows[0] if rows else header)
  ]
  head = ''.join(
    cell('th', text, kind) for text, kind in zip(header, kinds, strict=True)
  )
  lines = [f'<tr>{head}</tr>']
  for index, row in enumerate(rows):
    cells = ''.join(
      cell('td', text, kind) for text, kind in zip(row, kinds, strict=True)
    )
    best = ' class="best"' if index in marked else ''
    lines.append(f'<tr{best}>{cells}</tr>')
  return '<div class="wide"><table>' + '\n'.join(lines) + '</table></div>'


def _models(runs: numbers.Runs) -> str:
  """Losses of every run outside the sweeps."""
  rows, marked = [], []
  for name, run in runs.items():
    if numbers.is_sweep(name):
      continue
    if name == 'adapted':
      marked.append(len(rows))
    wrong = run['eval_loss_shuffled_prefix']
    rise = None if wrong is None else wrong - run['eval_loss']
    rows.append(
      [
        name,
        _Number(numbers.count(run['parameters'])),
        _Number(f'{run["steps"]:,}'),
        _Number(numbers.count(run['target_tokens'])),
        _Number(f'{run["learning_rate"]:g}'),
        _Number(run['seed']),
        _Number(numbers.loss(run['eval_loss_at_step_0'])),
        _Number(numbers.loss(run['eval_loss'])),
        _Number(numbers.loss(wrong)),
        _Number('-' if rise is None else f'{rise:+.3f}'),
      ]
    )
  header = [
    'run',
    'parameters',
    'steps',
    'target tokens',
    'learning rate',
    'seed',
    'loss at step 0',
    'loss',
    "others' prefixes",
    'difference',
  ]
  note = (
    '<p class="note">Others\' prefixes: the loss when every example reads the'
    ' prefix of another. An encoder counts as used where that is more than'
    f' {report_findings.ENCODER_USED} worse. Parameters include the embedding'
    ' tables.</p>'
  )
  return '<h2>Models</h2>' + _table(header, rows, marked) + note


def _cost(runs: numbers.Runs) -> str:
  """What each run took, alone and with its sources."""
  rows = []
  for name, run in runs.items():
    row = [name]
    for part in (run, run['inclusive']):
      row += [
        _Number(numbers.count(part['total_tokens'])),
        _Number(numbers.scientific(part['flops'])),
        _Number(progress.format_seconds(part['seconds'])),
      ]
    rows.append(row)
  header = ['run', 'tokens', 'FLOPs', 'time']
  header += [f'{name}, with sources' for name in header[1:]]
  note = (
    '<p class="note">Tokens are all that a model has read, prefixes'
    ' included; the columns on the right add what its sources took.</p>'
  )
  return '<h2>Cost</h2>' + _table(header, rows) + note


def _learning_rates(runs: numbers.Runs) -> str:
  """Losses of the sweeps, a column per model."""
  table = report_findings.learning_rates(runs)
  if not table:
    return ''
  rates = sorted({rate for column in table.values() for rate in column})
  rows = [
    [_Number(f'{rate:g}')]
    + [_Number(numbers.loss(column.get(rate))) for column in table.values()]
    for rate in rates
  ]
  return '<h2>Learning rates</h2>' + _table(['learning rate', *table], rows)


def _samples(samples: Sequence[Mapping[str, str]]) -> str:
  parts = [
    f'<section class="sample"><h3>{html.escape(sample["run"])}</h3>'
    f'<pre><span class="prompt">{html.escape(sample["prompt"])}</span>'
    f'{html.escape(sample["continuation"])}</pre></section>'
    for sample in samples
  ]
  return '<h2>Continuations</h2>' + ''.join(parts) if parts else ''


def _stages(stages: Sequence[Mapping[str, Any]]) -> str:
  """Commands with the time they took beside their budget."""
  rows = []
  for stage in stages:
    budget, seconds = stage['budget_seconds'], stage['seconds']
    taken = progress.format_seconds(seconds)
    if budget is not None and seconds > budget:
      taken += ' (over)'
    rows.append(
      [
        stage['name'],
        _Number(taken),
        _Number('-' if budget is None else progress.format_seconds(budget)),
        _Raw(f'<code>{html.escape(stage["command"])}</code>'),
      ]
    )
  total = sum(stage['seconds'] for stage in stages)
  note = (
    f'<p class="note">Together {progress.format_seconds(total)}, installation'
    ' apart.</p>'
  )
  header = ['stage', 'took', 'budget', 'command']
  return '<h2>Stages</h2>' + _table(header, rows) + note


def _facts(facts: Mapping[str, Any]) -> str:
  """Names and values; nested mappings get names joined by a dot."""
  rows = [[name, _fact(value)] for name, value in _flat(facts)]
  return _table(['', ''], rows)


def _flat(facts: Mapping[str, Any], prefix: str = ''):
  for name, value in facts.items():
    if isinstance(value, Mapping):
      yield from _flat(value, f'{prefix}{name}.')
    else:
      yield prefix + str(name), value


def _fact(value: Any) -> str:
  if isinstance(value, bool) or value is None:
    return str(value)
  if isinstance(value, int):
    return f'{value:,}'
  if isinstance(value, float):
    return f'{value:.4g}'
  if isinstance(value, (list, tuple)):
    return ', '.join(_fact(item) for item in value)
  return str(value)
