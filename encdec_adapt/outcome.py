"""What a training job leaves in its work directory for those who read it.

Its configuration, the account of an adaptation, what export carries along of
the sources, and the summary of a job that is done. Whoever reads them believes
them, so each is of the run that the checkpoints are of: what an earlier start
left goes before it is untrue.
"""

from collections.abc import Mapping
import os
from typing import Any

import ml_collections

from encdec_adapt import config as config_lib
from encdec_adapt import evaluate, job_sources
from encdec_adapt.adaptation import coverage
from encdec_adapt.conversion import kept_files, work_directory
from encdec_adapt.files import atomic, paths
from encdec_adapt.models import parameters
from encdec_adapt.telemetry import accounting, metrics
from encdec_adapt.tokenizers import vocabularies


def begin(
  settings: config_lib.Settings,
  workdir: str | os.PathLike[str],
  report: coverage.Coverage | None,
  opened: vocabularies.Opened,
) -> None:
  """Writes what is known at step 0, in the place of an earlier start's.

  Args:
    settings: of the job.
    workdir: its folder.
    report: where every parameter came from; None for a checkpoint of the
      same model.
    opened: the vocabularies.
  """
  reopen(workdir)
  path = paths.at(workdir) / work_directory.COVERAGE
  path.unlink(missing_ok=True)
  if report:
    atomic.write_json(path, report.to_json())
  kept_files.keep(workdir, job_sources.origin_folders(settings))
  work_directory.keep_vocabularies(workdir, opened)


def describe(
  config: ml_collections.ConfigDict,
  environment: Mapping[str, Any],
  workdir: str | os.PathLike[str],
) -> None:
  """Writes what the job is, and where, as of its last start.

  Args:
    config: of the job.
    environment: as reported.
    workdir: its folder.
  """
  config_lib.save(config, workdir)
  atomic.write_json(paths.join(workdir, 'environment.json'), environment)


def reopen(workdir: str | os.PathLike[str]) -> None:
  """Removes what is said of a job that was done and is not any more."""
  for name in (accounting.SUMMARY, evaluate.FILE):
    (paths.at(workdir) / name).unlink(missing_ok=True)


def summarise(
  settings: config_lib.Settings,
  workdir: str | os.PathLike[str],
  step: int,
  cost: accounting.Cost,
  sources: Mapping[str, Any],
) -> None:
  """Writes summary.json of a job that is done, and says what it came to.

  Args:
    settings: of the job.
    workdir: its folder.
    step: the last one.
    cost: what it took.
    sources: what it was made from had cost when it started, by name.
  """
  losses = [r for r in metrics.read_metrics(workdir) if r['kind'] == 'eval']
  own = {
    'parameters': parameters.count(settings.model),
    'steps': step,
    'learning_rate': settings.optimizer.schedule.peak,
    'seed': settings.seed,
    'eval_loss_at_step_0': losses[0]['loss'],
    'eval_loss': losses[-1]['loss'],
  }
  found = accounting.Sources(**sources)
  summary = accounting.summarise(workdir, own, cost, found)
  atomic.write_json(paths.join(workdir, accounting.SUMMARY), summary)
  print(
    f'{workdir}: {step} steps, {cost.target_tokens:,.0f} target tokens,'
    f' held-out loss {summary["eval_loss_at_step_0"]:.4f} ->'
    f' {summary["eval_loss"]:.4f}'
  )
