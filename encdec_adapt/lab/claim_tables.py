"""Tables of claims and numbers: rows of a page, Markdown, CSV.

No model is read here.
"""

from collections.abc import Mapping, Sequence
import csv
import io
import math
import os
import pathlib
from typing import Any

from encdec_adapt.base import errors
from encdec_adapt.files import atomic, paths
from encdec_adapt.lab import (
  claim_results,
  html_report,
  report_figures,
  score_tables,
)
from encdec_adapt.lab import collected as collected_lib

COLUMNS = ('study', 'arm', 'seed', 'step', 'tokens', 'FLOPs')
COLUMNS += ('task', 'metric', 'value')
# Lines of a README around the table of all claims.
BEGIN, END = '<!-- claims -->', '<!-- end of claims -->'
FIGURE = 'verdicts.png'
# Rows of the table of studies not run again, and what is added to their
# verdicts; the figure leaves these studies out.
RESULTS, BEFORE = 'results.json', 'by the rule of before'
_NONE: Mapping[str, Any] = {'effects': ()}


def row(result: claim_results.Result) -> dict[str, str]:
  """Returns the result of a claim as a row of a table."""
  claim = result.claim
  return {
    'claim': claim.sentence,
    'effect': result.effect_text,
    'interval': result.interval,
    'seeds': str(result.seeds or ''),
    'groups': str(result.groups or ''),
    'verdict': result.outcome,
    'contrast': result.contrast,
    'level': f'{100 * result.level:.4g} %' if result.interval else '',
    'claimed': claim.direction,
    'smallest that matters': f'{claim.smallest:g}: {claim.reason}',
    'their numbers': claim.paper,
    'source': claim.source,
  }


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
  """Renders rows with the same keys as a table; '' for none."""
  if not rows:
    return ''
  lines = [list(rows[0]), ['---'] * len(rows[0])]
  lines += [[x.replace('|', r'\|') for x in cells.values()] for cells in rows]
  return ''.join(f'| {" | ".join(line)} |\n' for line in lines)


def write_readme(
  path: str | os.PathLike[str],
  folders: Mapping[str, str | os.PathLike[str]],
  picture: Mapping[str, Sequence[tuple[str, tuple[str, ...]]]],
) -> None:
  """Writes the table of all studies' claims into a README.

  Studies without a report in which every claim has an effect keep their lines
  of `RESULTS`, beside the README, which loses those of the others; studies
  never run, or without claims, are
  listed below the table. `FIGURE` shows the claims of the picture, once their
  pages have reports.

  Args:
    path: file with the lines `BEGIN` and `END` around the table.
    folders: folders of studies by name, in the order of the table.
    picture: see `pages.Study.picture`.

  Raises:
    UserError: the file has no such lines.
  """
  file = paths.at(path)
  head, begin, body = file.read_text(encoding='utf-8').partition(BEGIN)
  _, end, tail = body.partition(END)
  if not (begin and end):
    raise errors.UserError(
      f'{path} has no lines {BEGIN} and {END}, between which the table of'
      ' claims is written; add them.'
    )
  kept = file.parent / RESULTS
  earlier = atomic.read_json(kept) if kept.exists() else {}
  found = {}
  for name, folder in folders.items():
    file_of_report = paths.at(folder) / html_report.JSON
    report = None
    if file_of_report.exists():
      report = atomic.read_json(file_of_report)
      # Reports of earlier versions do not say what was claimed.
      complete = [x.get('claimed') and x['effect'] for x in report['claims']]
    if report and (all(complete) or name not in earlier):
      rows = [_readme_row(report, cells) for cells in report['claims']]
      found[name] = {'rows': rows, 'effects': report['effects']}
      earlier.pop(name, None)
    elif name in earlier:
      rows = [
        cells | {'verdict': f'{cells["verdict"]} ({BEFORE})'}
        for cells in earlier[name]
      ]
      found[name] = {'rows': rows, 'effects': []}
  silent = [name for name, result in found.items() if not result['rows']]
  missing = [name for name in folders if name not in found]
  note = ''.join(
    f'\n{label}: {", ".join(names)}.\n'
    for label, names in (('Without claims', silent), ('Not run', missing))
    if names
  )
  table = markdown([row for result in found.values() for row in result['rows']])
  paths.write(file, f'{head}{BEGIN}\n{table}{note}{END}{tail}'.encode())
  atomic.write_json(kept, earlier)
  effects = [
    (f'{paper.partition(" (")[0]}: {sentence}', verdict, *numbers)
    for paper, claims in picture.items()
    for name, contrast in claims
    for sentence, arms, verdict, *numbers in found.get(name, _NONE)['effects']
    if tuple(arms) == contrast and verdict != claim_results.NO_VERDICT
  ]
  if effects:
    report_figures.draw_claims(effects, path=pathlib.Path(path).parent / FIGURE)


def _readme_row(
  report: Mapping[str, Any], cells: Mapping[str, str]
) -> dict[str, str]:
  setting = f'{report["study"]}, {report["size"]}; {cells["contrast"]}'
  for unit in ('seeds', 'groups'):
    name = unit[:-1] if cells[unit] == '1' else unit
    setting += f'; {cells[unit]} {name}' if cells[unit] else ''
  smallest, _, _ = cells['smallest that matters'].partition(':')
  setting += f'; claimed {cells["claimed"]}, m = {smallest}'
  setting += f', level {cells["level"]}' if cells['level'] else ''
  interval = f' ({cells["interval"]})' if cells['interval'] else ''
  return {
    **{name: cells[name] for name in ('claim', 'source', 'their numbers')},
    'our setting': setting,
    'effect and interval': cells['effect'] + interval,
    'verdict': cells['verdict'],
    'command': f'`{report["command"]}`',
    'hours': f'{report["seconds"] / 3600:.1f}',
  }


def numbers_csv(collected: collected_lib.Collected) -> str:
  """Renders all numbers of a study as a tidy table.

  Tokens are target tokens, FLOPs are for training with all sources. A task has
  the name of its evaluation; `development` is the evaluation during training.
  """
  text = io.StringIO()
  lines = csv.writer(text, lineterminator='\n')
  lines.writerow(COLUMNS)

  def write(run, step, tokens, flops, task, metric, value):
    seed = '' if run.seed is None else run.seed
    spent = step, f'{tokens:.0f}', f'{flops:.6g}'
    cells = *spent, task, metric, f'{value:.7g}'
    lines.writerow((collected.study.name, run.model, seed, *cells))

  without = {
    x.name: score_tables.left_out(
      run.scores.get(x.name, ()) for run in collected.runs
    )
    for x in collected.study.evaluations
  }
  for run in collected.runs:
    curve, end = run.curve, run.summary
    columns = [curve[x] for x in ('step', 'target_tokens', 'flops', 'loss')]
    for *spent, loss in zip(*columns, strict=True):
      write(run, *spent, 'development', 'loss', loss)
    spent = end['steps'], end['target_tokens'], end['inclusive']['flops']
    for evaluation in collected.study.evaluations:
      for score in run.scores.get(evaluation.name, ()):
        if (score.task, score.metric) in without[evaluation.name]:
          continue
        name = f'{score.task}/{score.metric}'
        if math.isfinite(score.value):  # Diverged runs are in the table.
          score = claim_results.reported(run, name, evaluation)
        if score:
          task = f'{evaluation.name}/{score.task}'
          write(run, *spent, task, score.metric, score.value)
  return text.getvalue()
