"""Run artifacts: resolved config, coverage report, pretrained files, summary.

They describe the checkpoints of the work directory, so stale files of an
earlier start are removed. Only process 0 calls these functions; checkpoints and
metrics are written elsewhere.
"""

from collections.abc import Mapping
import math
import os
from typing import Any

import ml_collections

from encdec_adapt import config as config_lib
from encdec_adapt.adaptation import coverage as coverage_lib
from encdec_adapt.base import errors
from encdec_adapt.files import atomic, disk, paths
from encdec_adapt.models import parameters
from encdec_adapt.stored import pretrained_files, work_directory
from encdec_adapt.telemetry import compute_cost, environment, metrics
from encdec_adapt.tokenizers import vocabulary_pair
from encdec_adapt.training.metrics import held_out_metrics

ENVIRONMENT = 'environment.json'


def write_initial(
  workdir: str | os.PathLike[str],
  coverage: coverage_lib.Coverage | None,
  folders: pretrained_files.Folders,
  opened: vocabulary_pair.Opened,
) -> None:
  """Writes the artifacts of step 0, replacing those of an earlier start.

  Args:
    workdir: work directory of the job.
    coverage: how an adaptation fills every weight; None for other starts.
    folders: folders with the sources' files to store for an export.
    opened: vocabularies of the job.
  """
  remove_summary(workdir)
  path = paths.at(workdir) / work_directory.COVERAGE
  # An earlier start may have adapted a model, and this start not.
  path.unlink(missing_ok=True)
  if coverage:
    atomic.write_json(path, coverage.to_json())
  # Copies, as the source may be moved or deleted before an export.
  pretrained_files.keep(workdir, folders)
  work_directory.keep_vocabularies(workdir, opened)


def write_config(
  workdir: str | os.PathLike[str],
  config: ml_collections.ConfigDict,
  environment: Mapping[str, Any],
  made_by: Mapping[str, str],
) -> None:
  """Writes configuration, environment and command line of this start."""
  config_lib.save(config, str(workdir), made_by)
  atomic.write_json(paths.join(workdir, ENVIRONMENT), environment)


def remove_summary(workdir: str | os.PathLike[str]) -> None:
  """Removes the summary of a finished job before it trains further."""
  (paths.at(workdir) / compute_cost.SUMMARY).unlink(missing_ok=True)


def write_summary(
  workdir: str | os.PathLike[str],
  settings: config_lib.Settings,
  step: int,
  cost: compute_cost.Cost,
  sources: Mapping[str, Any],
) -> None:
  """Writes summary.json of a finished job and prints its main numbers.

  Args:
    workdir: work directory of the job.
    settings: the validated configuration.
    step: the selected step of the run.
    cost: totals of the job.
    sources: result of `compute_cost.read_sources` when the job started.

  Raises:
    DivergedError: the last held-out loss (without any, the last training loss)
      is not finite.
  """
  # Read from the file: step 0 may belong to an earlier start.
  records = metrics.read_metrics(workdir)
  losses = [r for r in records if r['kind'] == 'eval' and r['step'] <= step]
  entries = {
    'parameters': parameters.count(settings.model),
    'steps': step,
    'learning_rate': settings.optimizer.schedule.peak,
    'seed': settings.seed,
  }
  line = ''
  if losses:  # A job with evaluators.
    first, last = losses[0], losses[-1]
    shown = settings.recipe.metrics.shown
    names = dict.fromkeys((*shown, 'loss'))
    names = [x for x in names if x in first and x in last]
    entries |= {f'eval_{x}_at_step_0': first[x] for x in names}
    entries |= {f'eval_{x}': last[x] for x in names}
    text_of = held_out_metrics.format_value
    texts = [
      f'{x} {text_of(x, first[x])} -> {text_of(x, last[x])}'
      for x in shown
      if x in names
    ]
    line = f' held-out {", ".join(texts)},'
  summary = compute_cost.summarise(workdir, entries, cost, sources)
  atomic.write_json(paths.join(workdir, compute_cost.SUMMARY), summary)
  peak = environment.memory_high_water()['memory_peak_bytes']
  print(
    f'{workdir}: {step} steps, {cost.target_tokens:,.0f} target tokens,'
    f'{line} peak memory {disk.format_bytes(peak)}'
  )
  # Prefer held-out losses: a single bad batch may have been skipped.
  losses = losses or [r for r in records if r['kind'] == 'train']
  if losses and not math.isfinite(losses[-1]['loss']):
    raise errors.DivergedError(
      f'{workdir} ends with the {losses[-1]["kind"]} loss'
      f' {losses[-1]["loss"]}; lower config.optimizer.learning_rate or clip'
      ' harder, in another --workdir.'
    )
