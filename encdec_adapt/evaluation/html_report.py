"""A study's report: `report.json`, `curves.png` and `report.html`.

A report is a dictionary:

  title         of the page
  size          name of the study's size
  text          facts about the text, or absent
  runs          by name: `kind` (`decoder_only` or `encoder_decoder`),
                `parameters`, `steps`, `target_tokens`, `total_tokens`,
                `flops`, `seconds`, `learning_rate`, `seed`, `eval_loss`,
                `eval_loss_at_step_0`, `eval_loss_shuffled_prefix` (with the
                prefixes of other examples; None where it was not measured),
                `curve` (lists `step`, `target_tokens`, `eval_loss`,
                `train_step`, `train_loss`) and `inclusive` (`target_tokens`,
                `total_tokens`, `flops`, `seconds`, those of the sources that
                it was made from included)
  stages        `name`, `command`, `budget_seconds` (or None), `seconds`
  samples       `run`, `prompt`, `continuation`
  environment   versions and hardware

Losses are nats per target token. Runs named `<model>_seed<n>` repeat
`<model>`; runs named `<model>_lr_<rate>` are its learning-rate sweep.
"""

from collections.abc import Mapping
import json
import math
import os
from typing import Any

from encdec_adapt.evaluation import (
  report_figures,
  report_findings,
  report_page,
)
from encdec_adapt.files import paths

Report = Mapping[str, Any]


def findings(report: Report) -> list[str]:
  """What was found, in plain sentences; see `report_findings.findings`."""
  return report_findings.findings(report)


def write(report: Report, folder: str | os.PathLike) -> paths.Path:
  """Writes the report.

  Args:
    report: see the module's docstring.
    folder: made if it is missing; files of an earlier report are replaced.

  Returns:
    Path of `report.html`, which embeds `curves.png` and needs nothing beside
    it. `report.json` is the dictionary with `findings` added; a number that
    is not finite is null there.
  """
  found = findings(report)
  content = json.dumps(
    _finite({**report, 'findings': found}), indent=1, allow_nan=False
  )
  with paths.staged(folder) as place:
    (place / 'report.json').write_text(content + '\n', encoding='utf-8')
    picture = place / 'curves.png'
    report_figures.draw_curves(report, picture)
    page = report_page.render(report, found, [picture])
    (place / 'report.html').write_text(page, encoding='utf-8')
  return paths.at(folder) / 'report.html'


def _finite(value: Any) -> Any:
  """The value with every number that JSON does not have made None."""
  if isinstance(value, Mapping):
    return {key: _finite(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [_finite(item) for item in value]
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value
