"""Runs the stages of a study in sequence and writes its report.

    python -m encdec_adapt.study --study=configs/quickstart.py:size=default

The function `get_study(arg)` of a configuration file returns a study
(`evaluation/study_stages.py`). Every stage is a command, printed before
it runs. Stages share this process, which saves imports and compilations; only
records are made in a separate process, which loads TensorFlow. Finished
stages are skipped and an interrupted stage resumes when the command is given
again.
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
import traceback
import types
from typing import Any

from absl import flags

from encdec_adapt import config as config_lib
from encdec_adapt import configs
from encdec_adapt.base import errors
from encdec_adapt.cli import command
from encdec_adapt.data.making import process_pool
from encdec_adapt.data.records import record_sets
from encdec_adapt.evaluation import study_stages
from encdec_adapt.evaluation.measures import held_out, inference_cost
from encdec_adapt.evaluation.reports import html_report
from encdec_adapt.evaluation.results import results_store
from encdec_adapt.files import append_log, atomic, disk, paths
from encdec_adapt.telemetry import compute_cost, environment, metrics, progress

define_flags = command.define(
  command.string(
    'study',
    'FILE.py[:ARG], or NAME[:ARG] of a shipped one, with get_study(arg).',
  ),
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
    UserError: the file is missing, fails, or has no get_study.
  """
  path, _, arg = configs.locate(spec).partition(':')
  if not pathlib.Path(path).is_file():
    raise errors.UserError(f'--study={spec}: the file {path} does not exist.')
  # By its path, as --config loads files: configs/ need not be importable.
  spec_of_file = importlib.util.spec_from_file_location('study_config', path)
  module = importlib.util.module_from_spec(spec_of_file)
  try:
    spec_of_file.loader.exec_module(module)
    if not hasattr(module, 'get_study'):
      raise errors.UserError(f'--study={spec}: {path} has no get_study(arg).')
    study = module.get_study(arg or None)
  except errors.UserError:
    raise
  except Exception as error:  # The file is the user's code.
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    # A file that cannot be parsed has no frame, but the line of the error.
    line = lines[-1] if lines else getattr(error, 'lineno', 1)
    raise errors.UserError(
      f'--study={spec}: {path} fails at line {line}'
      f' ({type(error).__name__}: {error}); mend the file.'
    ) from error
  text = pathlib.Path(path).read_bytes() + arg.encode()
  return study, hashlib.sha256(text).hexdigest()


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
  # A mistyped flag of the last stage is found now, not after hours.
  for stage in study.stages:
    if stage.module != 'convert':  # It has subcommands, which parse themselves.
      _parse(stage, ())
  root = paths.at(study.root)
  disk.require_writable(root / 'stages')
  _check_same_study(root, digest)
  print(f'{study.title}: {len(study.stages)} stages into {root}', flush=True)
  waiting = [s for s in study.stages if not _marker(root, s).exists()]
  # Neighbours that make records share a process: TensorFlow takes long to load.
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
  module = _module(stage)
  return command.parse(module.define_flags, (*stage.arguments, *extra))


def _module(stage: study_stages.Stage) -> types.ModuleType:
  """Imports the module of a stage's command."""
  # Late: a study without a command need not load its dependencies.
  return importlib.import_module(f'encdec_adapt.{stage.module}')


def run_stages(root: str, stages: Sequence[study_stages.Stage]) -> int:
  """Runs commands in this process; returns the first status that is not 0."""
  for stage in stages:
    extra = _best_rate(paths.at(root), stage.rate_of)
    line = _command_line(stage, extra)
    budget = progress.format_seconds(stage.budget_seconds)
    print(f'\n[{stage.name}] budget {budget}\n$ {line}', flush=True)
    start = time.perf_counter()
    if stage.module == 'convert':
      commands = _module(stage).COMMANDS
      status = command.run_subcommand('', commands, stage.arguments)
    else:
      status = _module(stage).main(_parse(stage, extra))
    seconds = time.perf_counter() - start
    # Also for a preemption: without its marker the stage resumes.
    if status:
      return status
    duration = progress.format_seconds(seconds)
    print(f'[{stage.name}] took {duration} of {budget}', flush=True)
    marker = {'name': stage.name, 'command': line}
    marker |= {'budget_seconds': stage.budget_seconds, 'seconds': seconds}
    atomic.write_json(_marker(paths.at(root), stage), marker)
  return 0


def _command_line(stage: study_stages.Stage, extra: Sequence[str]) -> str:
  """Returns the command as it can be typed, with this interpreter."""
  # Short and movable inside of the repository, such as .venv/bin/python.
  python = os.path.relpath(sys.executable)
  python = sys.executable if python.startswith('..') else python
  return shlex.join(
    [python, '-m', f'encdec_adapt.{stage.module}', *stage.arguments, *extra]
  )


def _marker(root: paths.Path, stage: study_stages.Stage) -> paths.Path:
  """Returns the path of the file that marks a finished stage."""
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
  """Returns the summary of a run, with the training of an imported model."""
  summary = _summary(root, name)
  made_by = summary.get('made_by', {'command': 'train'})
  if made_by['command'] != 'import':
    return summary
  # The decoders in configs/decoders are shipped with their summaries.
  path = paths.at(made_by['sources'][0]) / compute_cost.SUMMARY
  training = atomic.read_json(path) if path.exists() else {}
  # `inclusive` of the import counts the training as that of its source.
  return {**summary, **training, 'inclusive': summary['inclusive']}


def _best(root: paths.Path, names: Sequence[str]) -> str:
  """Returns the name of the run with the lowest finite held-out loss."""
  # A run at too high a rate may diverge: nan compares with nothing.
  losses = {name: _summary(root, name)['eval_loss'] for name in names}
  finite = {name: x for name, x in losses.items() if math.isfinite(x)}
  if not finite:
    raise errors.UserError(f'none of the runs {losses} has a finite loss.')
  return min(finite, key=finite.get)


def _best_rate(root: paths.Path, names: Sequence[str]) -> tuple[str, ...]:
  """Returns the flag with the learning rate of the best of these runs."""
  if not names:
    return ()
  rate = _summary(root, _best(root, names))['learning_rate']
  return (f'--config.optimizer.learning_rate={rate:g}',)


def _report(study: study_stages.Study) -> None:
  """Collects the results of the runs and writes the report."""
  root = paths.at(study.root)
  folders = {name: name for name in study.runs}
  # First, as tables and plots list the runs in this order.
  for name, candidates in study.best_of.items():
    folders = {name: _best(root, candidates), **folders}
  stages = [atomic.read_json(_marker(root, s)) for s in study.stages]
  with results_store.Store(study.results) as store:
    runs = {name: _run(root, folder, store) for name, folder in folders.items()}
    # Any run: all were evaluated on the same records.
    run = paths.join(study.root, study.runs[0])
    measured = store.of_run(run, held_out.TASK)
  options, tokens = measured[held_out.TARGET_TOKENS]
  spec = record_sets.RecordSet.open(options['records']).spec
  samples = []
  if study.samples:
    samples = [x for x, _ in append_log.Log(paths.at(study.samples)).lines]
  tuned = None
  if study.tuned:
    tuned = atomic.read_json(paths.join(study.tuned, html_report.JSON))
  table = study.table and atomic.read_json(paths.at(study.table))['rows']
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
    'samples': samples,
    'tuned': tuned,
    'note': study.note,
    'table': table,
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
  """Returns the results of a run; an imported model has no curve."""
  results = store.of_run(paths.join(root, folder), held_out.TASK)
  scores = {metric: score.value for metric, (_, score) in results.items()}
  cost = store.of_run(paths.join(root, folder), inference_cost.TASK)
  request = None
  if cost:
    request, _ = cost['decode_ms']  # Lengths are among the options.
    values = {metric: score.value for metric, (_, score) in cost.items()}
    if 'decode_ms_low' not in values:
      raise errors.UserError(
        f'an earlier version measured the cost of {folder}, without quartiles;'
        f' remove the files of the evaluation in {root / "stages"} and give the'
        ' command again, which measures only the cost.'
      )
    costs = inference_cost.per_query(values, request['generated'])
    request |= values | {axis: median for axis, (_, median, _) in costs.items()}
  is_trained = (root / folder / metrics.FILE).exists()
  lines = metrics.read_metrics(root / folder) if is_trained else []
  evals = [line for line in lines if line['kind'] == 'eval']
  summary = _training_summary(root, folder)
  return {
    # Null in the report unless the summary, below, has them.
    'eval_loss_at_step_0': None,
    'learning_rate': None,
    'seed': None,
    **summary,
    # Of the last step; the scores are of the checkpoint that was evaluated.
    'eval_loss_in_training': summary.get('eval_loss'),
    'kind': config_lib.load_run(str(root / folder)).model.architecture.name,
    'eval_loss': scores['loss'],
    'exact_match': scores['exact_match'],
    'label_accuracy': scores['accuracy'] if 'macro_f1' in scores else None,
    'eval_loss_shuffled_prefix': scores.get(held_out.SHUFFLED),
    'request': request,
    'curve': {
      'step': [record['step'] for record in evals],
      'target_tokens': [record['target_tokens'] for record in evals],
      'eval_loss': [record['loss'] for record in evals],
    },
  }


if __name__ == '__main__':
  command.main(__doc__, define_flags, main)
