"""Runs the stages of a study one after the other and writes its report.

    python -m encdec_adapt.study --study=configs/quickstart.py:size=default

A study is what `get_study(arg)` of a configuration file returns
(`evaluation/study_stages.py`). Every stage is a command, printed before
it runs. Stages share this process, which saves imports and compilations; only
records are made in another one, which loads TensorFlow. Finished stages are
skipped and an interrupted one resumes when the command is given again.
"""

from collections.abc import Sequence
import dataclasses
import hashlib
import importlib
import importlib.util
import itertools
import math
import os
import pathlib
import shlex
import sys
import time
from typing import Any

from absl import flags

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.cli import command
from encdec_adapt.data.making import process_pool
from encdec_adapt.data.records import record_sets
from encdec_adapt.evaluation import study_stages
from encdec_adapt.evaluation.measures import held_out
from encdec_adapt.evaluation.reports import html_report
from encdec_adapt.evaluation.results import results_store
from encdec_adapt.files import append_log, atomic, disk, paths
from encdec_adapt.telemetry import (
  compute_cost,
  environment,
  metrics,
  progress,
)

define_flags = command.define(
  command.string('study', 'FILE[:ARG] with a function get_study(arg).'),
  command.boolean('list', 'Print the commands and stop.'),
)


def main(values: flags.FlagValues) -> int:
  """Runs the command."""
  command.require(values, 'study')
  study, digest = load(values.study)
  if values.list:
    for stage in study.stages:
      print(_command_line(stage, ()))
    return 0
  return run(study, digest)


def load(spec: str) -> tuple[study_stages.Study, str]:
  """Loads the study of FILE[:ARG].

  Returns:
    The study, and a digest of the file and the argument.

  Raises:
    UserError: the file is missing or has no get_study.
  """
  path, _, arg = spec.partition(':')
  if not pathlib.Path(path).is_file():
    raise errors.UserError(f'--study={spec}: the file {path} does not exist.')
  found = importlib.util.spec_from_file_location('study_config', path)
  module = importlib.util.module_from_spec(found)
  found.loader.exec_module(module)
  if not hasattr(module, 'get_study'):
    raise errors.UserError(f'--study={spec}: {path} has no get_study(arg).')
  text = pathlib.Path(path).read_bytes() + arg.encode()
  return module.get_study(arg or None), hashlib.sha256(text).hexdigest()


def run(study: study_stages.Study, digest: str) -> int:
  """Runs the unfinished stages, then writes the report.

  Args:
    study: the study.
    digest: identifies this version of it.

  Returns:
    0, or the status of the stage that failed.

  Raises:
    UserError: the root holds another version of the study, or a stage fails
      on bad input. Arguments of training are checked before the first stage.
  """
  for stage in study.stages:
    if stage.module != 'convert':
      _parse(stage, ())
  root = paths.at(study.root)
  disk.require_writable(root / 'stages')
  _check_same_study(root, digest)
  print(f'{study.title}: {len(study.stages)} stages into {root}', flush=True)
  waiting = [s for s in study.stages if not _marker(root, s).exists()]
  for module, group in itertools.groupby(waiting, lambda s: s.module):
    group = list(group)
    if module == 'materialize':
      process_pool.run_in_subprocess(run_stages, str(root), group)
    elif status := run_stages(str(root), group):
      return status
  _report(study)
  return 0


def _parse(stage: study_stages.Stage, extra: Sequence[str]) -> flags.FlagValues:
  """Parses the arguments of a stage; the configuration file is loaded."""
  module = importlib.import_module(f'encdec_adapt.{stage.module}')
  return command.parse(module.define_flags, (*stage.arguments, *extra))


def _call(stage: study_stages.Stage, extra: Sequence[str]) -> int:
  """Runs the command of a stage; returns its status."""
  module = importlib.import_module(f'encdec_adapt.{stage.module}')
  if stage.module == 'convert':
    return command.run_subcommand('', module.COMMANDS, stage.arguments)
  return module.main(_parse(stage, extra))


def run_stages(root: str, stages: Sequence[study_stages.Stage]) -> int:
  """Runs commands in this process; returns the first status that is not 0."""
  for stage in stages:
    extra = _best_rate(paths.at(root), stage.rate_of)
    line = _command_line(stage, extra)
    budget = progress.format_seconds(stage.budget_seconds)
    print(f'\n[{stage.name}] budget {budget}\n$ {line}', flush=True)
    began = time.perf_counter()
    status = _call(stage, extra)
    seconds = time.perf_counter() - began
    if status:
      return status
    took = progress.format_seconds(seconds)
    print(f'[{stage.name}] took {took} of {budget}', flush=True)
    atomic.write_json(
      _marker(paths.at(root), stage),
      {
        'name': stage.name,
        'command': line,
        'budget_seconds': stage.budget_seconds,
        'seconds': seconds,
      },
    )
  return 0


def _command_line(stage: study_stages.Stage, extra: Sequence[str]) -> str:
  """The command as it can be typed, with this interpreter."""
  python = os.path.relpath(sys.executable)
  python = sys.executable if python.startswith('..') else python
  return shlex.join(
    [python, '-m', f'encdec_adapt.{stage.module}', *stage.arguments, *extra]
  )


def _marker(root: paths.Path, stage: study_stages.Stage) -> paths.Path:
  """The file that marks a finished stage."""
  return root / 'stages' / f'{stage.name}.json'


def _check_same_study(root: paths.Path, digest: str) -> None:
  """Refuses a folder with stages of another version of the study."""
  path = root / 'study.json'
  if path.exists() and atomic.read_json(path)['digest'] != digest:
    raise errors.UserError(
      f'{root} holds stages of another version of this study (its'
      ' configuration file has changed). Remove the folder, or give the study'
      ' another root.'
    )
  atomic.write_json(path, {'digest': digest})


def _summary(root: paths.Path, name: str) -> dict[str, Any]:
  return atomic.read_json(root / name / compute_cost.SUMMARY)


def _training_summary(root: paths.Path, name: str) -> dict[str, Any]:
  """The summary of a run; of an imported model, that of its own training."""
  summary = _summary(root, name)
  made_by = summary.get('made_by', {'command': 'train'})
  if made_by['command'] != 'import':
    return summary
  path = paths.at(made_by['sources'][0]) / compute_cost.SUMMARY
  training = atomic.read_json(path) if path.exists() else {}
  return {**summary, **training, 'inclusive': summary['inclusive']}


def _best(root: paths.Path, names: Sequence[str]) -> str:
  """The run with the lowest finite held-out loss."""
  losses = {name: _summary(root, name)['eval_loss'] for name in names}
  finite = {name: x for name, x in losses.items() if math.isfinite(x)}
  if not finite:
    raise errors.UserError(f'none of the runs {losses} has a finite loss.')
  return min(finite, key=finite.get)


def _best_rate(root: paths.Path, names: Sequence[str]) -> tuple[str, ...]:
  """The flag with the learning rate of the best of these runs."""
  if not names:
    return ()
  rate = _summary(root, _best(root, names))['learning_rate']
  return (f'--config.optimizer.learning_rate={rate:g}',)


def _report(study: study_stages.Study) -> None:
  """Collects the results of the runs and writes the report."""
  root = paths.at(study.root)
  folders = {name: name for name in study.runs}
  for name, candidates in study.best_of.items():
    folders = {name: _best(root, candidates), **folders}
  stages = [atomic.read_json(_marker(root, s)) for s in study.stages]
  with results_store.Store(study.results) as store:
    runs = {name: _run(root, folder, store) for name, folder in folders.items()}
    measured = store.of_run(
      paths.join(study.root, study.runs[0]), held_out.TASK
    )
  options, tokens = measured[held_out.TARGET_TOKENS]
  spec = record_sets.RecordSet.open(options['records']).spec
  collected = {
    'title': study.title,
    'size': study.size,
    'text': {
      'held-out records': options['records'],
      'target tokens': tokens.value,
      **dataclasses.asdict(spec),
    },
    'runs': runs,
    'best': list(study.best_of),
    'stages': stages,
    'samples': (
      [sample for sample, _ in append_log.Log(paths.at(study.samples)).lines]
      if study.samples
      else []
    ),
    'environment': environment.report(),
  }
  findings = html_report.write(collected, root)
  for sentence in findings:
    print(f'- {sentence}')
  total = progress.format_seconds(sum(stage['seconds'] for stage in stages))
  print(f'\n{total} in all; report: {root / "report.html"}')


def _run(
  root: paths.Path, folder: str, store: results_store.Store
) -> dict[str, Any]:
  """The results of one run; an imported model has no curve."""
  scores = {
    metric: score.value
    for metric, (_, score) in store.of_run(
      paths.join(root, folder), held_out.TASK
    ).items()
  }
  is_trained = (root / folder / metrics.FILE).exists()
  lines = metrics.read_metrics(root / folder) if is_trained else []
  evals = [line for line in lines if line['kind'] == 'eval']
  summary = _training_summary(root, folder)
  return {
    'eval_loss_at_step_0': None,
    'learning_rate': None,
    'seed': None,
    **summary,
    'eval_loss_in_training': summary.get('eval_loss'),
    'kind': config_lib.load_run(str(root / folder)).model.architecture.name,
    'eval_loss': scores['loss'],
    'exact_match': scores['exact_match'],
    'label_accuracy': scores['accuracy'] if 'macro_f1' in scores else None,
    'eval_loss_shuffled_prefix': scores.get(held_out.SHUFFLED),
    'curve': {
      'step': [record['step'] for record in evals],
      'target_tokens': [record['target_tokens'] for record in evals],
      'eval_loss': [record['loss'] for record in evals],
    },
  }


if __name__ == '__main__':
  command.main(__doc__, define_flags, main)
