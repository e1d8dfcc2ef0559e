"""Runs the stages of a study one after the other and writes its report.

    python -m encdec_adapt.study --study=configs/quickstart.py:size=default

A study is what `get_study(arg)` of a configuration file returns. Every stage
is a command of its own, printed before it runs. Stages share this process,
which saves imports and compiles; only records are made in another one. What
is finished is not run again, and what was interrupted continues.
"""

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import hashlib
import importlib
import importlib.util
import json
import math
import os
import pathlib
import shlex
import sys
import time
from typing import Any

from absl import flags

from encdec_adapt.cli import command, errors
from encdec_adapt.data import workers
from encdec_adapt.files import atomic, disk, paths
from encdec_adapt.telemetry import accounting, progress

COMMANDS = ('materialize', 'train', 'evaluate', 'generate', 'plan')


@dataclasses.dataclass(frozen=True)
class Stage:
  """One command of a study.

  Attributes:
    name: names the stage in the report.
    module: of the command, one of `COMMANDS`.
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
    digest: of the file that says all this; see `load`.
  """

  root: str
  title: str
  size: str
  stages: tuple[Stage, ...]
  runs: tuple[str, ...]
  best_of: Mapping[str, tuple[str, ...]]
  samples: str
  digest: str = ''


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
  text = pathlib.Path(path).read_bytes() + arg.encode()
  return dataclasses.replace(
    module.get_study(arg or None), digest=hashlib.sha256(text).hexdigest()
  )


def run(study: Study) -> int:
  """Runs what is not finished, then writes the report.

  Raises:
    UserError: as `check`, before any stage; or as a stage.
  """
  check(study)
  root = paths.at(study.root)
  disk.require_writable(root / 'stages')
  _check_same_study(root, study)
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
      workers.run_in_subprocess(run_stages, str(root), unfinished)
    else:
      status = run_stages(str(root), unfinished)
      if status:
        return status
  _report(study)
  return 0


def check(study: Study) -> None:
  """Refuses a study that would fail hours later, as far as can be known.

  Raises:
    UserError: names the stage or the field, and what is wrong with it: two
      stages of one name, no such command, flags or a configuration that are
      refused, or a folder or file that no stage makes.
  """
  made: list[str] = []
  evaluated, written, names = set(), set(), set()
  for stage in study.stages:
    if stage.name in names:
      raise errors.UserError(
        f'two stages have the name {stage.name!r}, and the second would never'
        ' run: what is finished is known by its name. Rename one.'
      )
    names.add(stage.name)
    _require_made(study, f'rate_of of {stage.name!r}', stage.rate_of, made)
    try:
      values = _checked_flags(stage)
    except errors.UserError as error:
      raise errors.UserError(f'the stage {stage.name!r}: {error}') from error
    if stage.module == 'train':
      made.append(_place(values.workdir))
    elif stage.module == 'evaluate':
      evaluated |= {_place(path) for path in values.checkpoint}
    elif stage.module == 'generate' and values.output:
      written.add(_place(values.output))
  fields = {'runs': study.runs}
  fields |= {f'best_of[{name!r}]': of for name, of in study.best_of.items()}
  for field, folders in fields.items():
    _require_made(study, field, folders, made)
    for folder in folders:
      if _place(study.root, folder) not in evaluated:
        raise errors.UserError(
          f'{field} names {folder!r}, which no stage evaluates: the report has'
          ' its held-out loss. Add it to the --checkpoint flags of a stage.'
        )
  if _place(study.samples) not in written:
    raise errors.UserError(
      f'samples is {study.samples!r}, which is the --output of no stage that'
      f' generates; those are {", ".join(sorted(written)) or "none"}.'
    )


def _checked_flags(stage: Stage) -> flags.FlagValues:
  """Parses the flags of a stage; a configuration is validated.

  Raises:
    UserError: there is no such command, or it would refuse the flags.
  """
  from encdec_adapt import config as config_lib

  if stage.module not in COMMANDS:
    raise errors.UserError(
      f'{stage.module!r} is no command that a stage can be; those are'
      f' {", ".join(COMMANDS)}.'
    )
  module = importlib.import_module(f'encdec_adapt.{stage.module}')
  values = command.parse(module.define_flags, stage.flags)
  if stage.module in ('train', 'materialize'):
    is_train = stage.module == 'train'
    command.require(values, 'config', *(['workdir'] if is_train else []))
    config_lib.load(values.config, values.workdir, sources=is_train)
  return values


def _place(path: str, *names: str) -> str:
  """One spelling of each path, without asking a disk or a bucket."""
  if paths.is_bucket(path):
    return paths.join(path, *names)
  return os.path.abspath(os.path.join(path, *names))


def _require_made(
  study: Study, field: str, folders: Sequence[str], made: Sequence[str]
) -> None:
  """Refuses folders that are no work directory of a stage so far."""
  for folder in folders:
    if _place(study.root, folder) not in made:
      raise errors.UserError(
        f'{field} names {folder!r}, which no stage before it trains into; there'
        f' are {", ".join(made) or "none"}.'
      )


def run_stages(root: str, stages: Sequence[Stage]) -> int:
  """Runs commands in this process; returns the first status that is not 0."""
  for stage in stages:
    extra = _best_rate(paths.at(root), stage.rate_of)
    line = _command(stage, extra)
    budget = progress.format_seconds(stage.budget_seconds)
    print(f'\n[{stage.name}] budget {budget}\n$ {line}', flush=True)
    module = importlib.import_module(f'encdec_adapt.{stage.module}')
    values = command.parse(module.define_flags, (*stage.flags, *extra))
    with _timed(paths.at(root), stage) as clock:
      status = module.main(values)
    seconds = clock()
    if status:
      return status
    print(
      f'[{stage.name}] took {progress.format_seconds(seconds)} of {budget}',
      flush=True,
    )
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


def _command(stage: Stage, extra: Sequence[str]) -> str:
  """The command as it can be typed, with this interpreter."""
  python = os.path.relpath(sys.executable)
  python = sys.executable if python.startswith('..') else python
  return shlex.join(
    [python, '-m', f'encdec_adapt.{stage.module}', *stage.flags, *extra]
  )


def _marker(root: paths.Path, stage: Stage) -> paths.Path:
  return root / 'stages' / f'{stage.name}.json'


@contextlib.contextmanager
def _timed(root: paths.Path, stage: Stage):
  """Seconds that a stage has taken, over all its starts but killed ones."""
  path = root / 'stages' / f'{stage.name}.seconds'
  before = json.loads(path.read_text())['seconds'] if path.exists() else 0.0
  began = time.perf_counter()

  def clock() -> float:
    return before + time.perf_counter() - began

  try:
    yield clock
  finally:
    atomic.write_json(path, {'seconds': clock()})


def _check_same_study(root: paths.Path, study: Study) -> None:
  """Refuses a folder with stages of another version of the study."""
  path = root / 'study.json'
  if path.exists() and json.loads(path.read_text())['digest'] != study.digest:
    raise errors.UserError(
      f'{root} holds stages of another version of this study (its'
      ' configuration file has changed). Remove the folder, or give the study'
      ' another root.'
    )
  atomic.write_json(path, {'digest': study.digest})


def _summary(root: paths.Path, name: str) -> dict[str, Any]:
  return json.loads((root / name / accounting.SUMMARY).read_text())


def _best(root: paths.Path, names: Sequence[str]) -> str:
  """The run with the lowest held-out loss; one that diverged never is."""
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


def _report(study: Study) -> None:
  """Collects what the runs left behind and writes the report."""
  from encdec_adapt.evaluation import html_report
  from encdec_adapt.telemetry import environment

  root = paths.at(study.root)
  folders = {name: name for name in study.runs}
  for name, candidates in study.best_of.items():
    best = _best(root, candidates)
    folders = {name: best, **folders}
  stages = [
    json.loads(_marker(root, stage).read_text()) for stage in study.stages
  ]
  held_out = json.loads((root / study.runs[0] / 'evaluation.json').read_text())
  collected = {
    'title': study.title,
    'size': study.size,
    'text': {
      'held-out records': held_out['records'],
      'target tokens': held_out['target_tokens'],
      **held_out['records_spec'],
    },
    'runs': {name: _run(root, folder) for name, folder in folders.items()},
    'stages': stages,
    'samples': json.loads(paths.at(study.samples).read_text()),
    'environment': environment.report(),
  }
  html_report.write(collected, root)
  print(f'\n{"stage":<28}{"budget":>9}{"took":>9}')
  for stage in stages:
    keys = 'budget_seconds', 'seconds'
    budget, took = (progress.format_seconds(stage[key]) for key in keys)
    print(f'{stage["name"]:<28}{budget:>9}{took:>9}')
  together = sum(stage['seconds'] for stage in stages)
  print(f'{"together":<28}{"":>9}{progress.format_seconds(together):>9}\n')
  for sentence in html_report.findings(collected):
    print(f'- {sentence}')
  print(f'\nreport: {root / "report.html"}')


def _run(root: paths.Path, folder: str) -> dict[str, Any]:
  """One run as the report wants it."""
  from encdec_adapt.telemetry import metrics

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
    'kind': evaluation['kind'],
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
