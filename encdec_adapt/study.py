"""Runs the stages of a study one after the other and writes its report.

    python -m encdec_adapt.study --study=configs/quickstart.py:size=default

A study is what `get_study(arg)` of a configuration file returns. Every stage
is a command of its own, printed before it runs. Stages share this process,
which saves imports and compiles; only records are made in another one. What
is finished is not run again, and what was interrupted continues.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import importlib
import importlib.util
import json
import pathlib
import shlex
import time
from typing import Any

from absl import flags

from encdec_adapt.runtime import command, errors
from encdec_adapt.runtime.progress import format_seconds
from encdec_adapt.training import accounting


@dataclasses.dataclass(frozen=True)
class Stage:
  """One command of a study.

  Attributes:
    name: names the stage in the report.
    module: of the command, such as 'train' for encdec_adapt.train.
    flags: of the command.
    budget_seconds: how long it should take on two cores.
    rate_of: run folders; the learning rate of the one with the lowest
      held-out loss is given to the command.
  """

  name: str
  module: str
  flags: tuple[str, ...]
  budget_seconds: float
  rate_of: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Study:
  """Stages and what the report is made of.

  Attributes:
    root: folder of the study.
    title: of the report.
    size: which size of the study it is.
    stages: in order.
    runs: folders below the root, in the order of the report.
    best_of: name in the report to run folders; the one with the lowest
      held-out loss bears that name.
    samples: path of the continuations, as `generate` writes them.
  """

  root: str
  title: str
  size: str
  stages: tuple[Stage, ...]
  runs: tuple[str, ...]
  best_of: Mapping[str, tuple[str, ...]]
  samples: str


def define_flags(values: flags.FlagValues) -> None:
  """The flags of this command."""
  flags.DEFINE_string(
    'study',
    None,
    'FILE[:ARG] with a function get_study(arg).',
    flag_values=values,
  )
  flags.DEFINE_bool(
    'list', False, 'Print the commands and stop.', flag_values=values
  )


def main(values: flags.FlagValues) -> int:
  """Runs the command."""
  command.require(values, 'study')
  study = load(values.study)
  if values.list:
    for stage in study.stages:
      print(_command(stage, ()))
    return 0
  return run(study)


def load(spec: str) -> Study:
  """The study of FILE[:ARG].

  Raises:
    UserError: there is no such file, or it has no get_study.
  """
  path, _, arg = spec.partition(':')
  if not pathlib.Path(path).is_file():
    raise errors.UserError(f'--study={spec}: there is no file {path}.')
  found = importlib.util.spec_from_file_location('study_config', path)
  module = importlib.util.module_from_spec(found)
  found.loader.exec_module(module)
  if not hasattr(module, 'get_study'):
    raise errors.UserError(f'--study={spec}: {path} has no get_study(arg).')
  return module.get_study(arg or None)


def run(study: Study) -> int:
  """Runs what is not finished, then writes the report."""
  # Here, because it imports what trains; a study is listed without it.
  from encdec_adapt import job

  root = pathlib.Path(study.root)
  (root / 'stages').mkdir(parents=True, exist_ok=True)
  print(f'{study.title}: {len(study.stages)} stages into {root}', flush=True)
  waiting = list(study.stages)
  while waiting:
    # Stages that need TensorFlow go to one process of their own.
    together = 1
    if waiting[0].module == 'materialize':
      while together < len(waiting) and waiting[together].module == (
        'materialize'
      ):
        together += 1
    some, waiting = waiting[:together], waiting[together:]
    unfinished = [stage for stage in some if not _marker(root, stage).exists()]
    if not unfinished:
      continue
    if unfinished[0].module == 'materialize':
      job.run_apart(run_stages, str(root), unfinished)
    else:
      status = run_stages(str(root), unfinished)
      if status:
        return status
  _report(study)
  return 0


def run_stages(root: str, stages: Sequence[Stage]) -> int:
  """Runs commands in this process; returns the first status that is not 0."""
  for stage in stages:
    extra = _best_rate(pathlib.Path(root), stage.rate_of)
    line = _command(stage, extra)
    print(
      f'\n[{stage.name}] budget {format_seconds(stage.budget_seconds)}\n'
      f'$ {line}',
      flush=True,
    )
    module = importlib.import_module(f'encdec_adapt.{stage.module}')
    began = time.perf_counter()
    values = command.parse(module.define_flags, (*stage.flags, *extra))
    status = module.main(values)
    seconds = time.perf_counter() - began
    if status:
      return status
    print(
      f'[{stage.name}] took {format_seconds(seconds)} of'
      f' {format_seconds(stage.budget_seconds)}',
      flush=True,
    )
    _write(
      _marker(pathlib.Path(root), stage),
      {
        'name': stage.name,
        'command': line,
        'budget_seconds': stage.budget_seconds,
        'seconds': seconds,
      },
    )
  return 0


def _command(stage: Stage, extra: Sequence[str]) -> str:
  return shlex.join(
    ['python', '-m', f'encdec_adapt.{stage.module}', *stage.flags, *extra]
  )


def _marker(root: pathlib.Path, stage: Stage) -> pathlib.Path:
  return root / 'stages' / f'{stage.name}.json'


def _write(path: pathlib.Path, content: Any) -> None:
  draft = path.with_suffix('.tmp')
  draft.write_text(json.dumps(content, indent=2) + '\n')
  draft.replace(path)


def _summary(root: pathlib.Path, name: str) -> dict[str, Any]:
  return json.loads((root / name / accounting.SUMMARY).read_text())


def _best(root: pathlib.Path, names: Sequence[str]) -> str:
  return min(names, key=lambda name: _summary(root, name)['eval_loss'])


def _best_rate(root: pathlib.Path, names: Sequence[str]) -> tuple[str, ...]:
  """The flag with the learning rate of the best of these runs."""
  if not names:
    return ()
  rate = _summary(root, _best(root, names))['learning_rate']
  return (f'--config.optimizer.learning_rate={rate:g}',)


def _report(study: Study) -> None:
  """Collects what the runs left behind and writes the report."""
  from encdec_adapt.evaluation import report
  from encdec_adapt.runtime import environment

  root = pathlib.Path(study.root)
  folders = {name: name for name in study.runs}
  for name, candidates in study.best_of.items():
    best = _best(root, candidates)
    folders = {name: best, **folders}
  stages = [
    json.loads(_marker(root, stage).read_text()) for stage in study.stages
  ]
  collected = {
    'title': study.title,
    'size': study.size,
    'runs': {name: _run(root, folder) for name, folder in folders.items()},
    'stages': stages,
    'samples': json.loads(pathlib.Path(study.samples).read_text()),
    'environment': environment.report(),
  }
  report.write(collected, root)
  print(f'\n{"stage":<28}{"budget":>9}{"took":>9}')
  for stage in stages:
    budget, took = stage['budget_seconds'], stage['seconds']
    print(
      f'{stage["name"]:<28}{format_seconds(budget):>9}{format_seconds(took):>9}'
    )
  together = sum(stage['seconds'] for stage in stages)
  print(f'{"together":<28}{"":>9}{format_seconds(together):>9}\n')
  for sentence in report.findings(collected):
    print(f'- {sentence}')
  print(f'\nreport: {root / "report.html"}')


def _run(root: pathlib.Path, folder: str) -> dict[str, Any]:
  """One run as the report wants it."""
  from encdec_adapt.runtime import metrics

  summary = _summary(root, folder)
  evaluation = json.loads((root / folder / 'evaluation.json').read_text())
  records = metrics.read_metrics(root / folder)
  evals = [r for r in records if r['kind'] == 'eval']
  steps = [r for r in records if r['kind'] == 'train']
  return {
    **{
      name: summary[name]
      for name in (
        'parameters',
        'steps',
        'target_tokens',
        'total_tokens',
        'flops',
        'seconds',
        'learning_rate',
        'seed',
        'inclusive',
      )
    },
    'eval_loss': evaluation['eval_loss'],
    'eval_loss_at_step_0': summary['eval_loss_at_step_0'],
    'eval_loss_shuffled_prefix': evaluation['eval_loss_shuffled_prefix'],
    'curve': {
      'step': [r['step'] for r in evals],
      'target_tokens': [r['target_tokens'] for r in evals],
      'eval_loss': [r['loss'] for r in evals],
      'train_step': [r['step'] for r in steps],
      'train_loss': [r['cross_entropy'] for r in steps],
    },
  }


if __name__ == '__main__':
  command.main(__doc__, define_flags, main)
