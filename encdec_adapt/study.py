"""Runs the stages of a study and writes its report.

    python -m encdec_adapt.study --study=quickstart:size=default

The function `get_study(arg)` of a configuration file returns a page
(`lab/pages.py`): arms, evaluations and claims. Every stage is a command,
printed before it runs. Finished stages are skipped, even those of other
studies, and repeating the command resumes an interrupted stage. --jobs=N
starts N processes on this machine, which share the stages. A failed stage is
named and independent stages continue; --stage=NAME runs it again.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import importlib
import importlib.util
import json
import math
import pathlib
import shlex
import sys
import traceback
import types

from absl import flags

from encdec_adapt import configs
from encdec_adapt.base import errors
from encdec_adapt.cli import command
from encdec_adapt.data.making import process_pool
from encdec_adapt.files import atomic, disk, paths
from encdec_adapt.lab import (
  claim_tables,
  pages,
  stage_states,
  stages,
  study_plan,
  study_results,
  text_passes,
  workers,
)
from encdec_adapt.telemetry import compute_cost, environment

# Arguments of the shipped pages whose results are stored.
_AS_SHIPPED = '', 'size=cpu'
_SHIPPED = (configs.FOLDER / 'studies').resolve()

define_flags = command.define(
  command.string(
    'study',
    'FILE.py[:ARG], or NAME[:ARG] of a shipped one, with get_study(arg).',
  ),
  command.string('root', "Folder or bucket address; default: the page's."),
  command.integer(
    'jobs',
    'Workers that share the cores or GPUs of this machine; default: one for'
    ' each GPU, or for two cores.',
    lower_bound=1,
  ),
  command.string(
    'stage',
    'Run this stage alone, again if it has failed, or has stored results only.',
  ),
  command.boolean('list', 'Print the stages and what they read; stop.'),
  command.boolean('json', 'With --list: print JSON.'),
  command.boolean('plan', 'Print what the study will take; stop.'),
  command.boolean('report', 'Write the report from what is there; stop.'),
  command.boolean(
    'fresh',
    'Run stages again that were made by other versions of the package, jax or'
    ' Python, or on another number of cores; read no stored results, and none'
    ' of other studies.',
  ),
  command.boolean(
    'variances', 'Write configs/studies/variances.json from its results; stop.'
  ),
  command.boolean('worker', 'Only run stages; what --jobs starts.'),
)


def main(values: flags.FlagValues) -> int:
  """Runs the command."""
  command.require(values, 'study')
  study = _load(values)
  resolved = stages.resolve(study)
  states = stage_states.States(
    study, resolved, shared=not values.fresh, needed=values.stage or ''
  )
  if values.list:
    print(_listing(states, _cores(states, values), values.json))
    return 0
  if values.plan:
    print(_describe(study, states, values))
    return 0
  if values.report:
    _report(study, states, values)
    return 0
  if values.variances:
    if study.size != 'cpu':
      raise errors.UserError(
        f'--variances: the study has size {study.size}, and variances.json is'
        ' of size=cpu.'
      )
    print(f'wrote {study_results.write_variances(study, states)}')
    return 0
  if values.stage and values.stage not in resolved:
    raise errors.UserError(
      f'--stage={values.stage} is not a stage of {values.study}'
      f'{errors.nearest(values.stage, resolved)}; --list prints them.'
    )
  # Find mistyped flags of all stages now, not after hours.
  for stage in resolved.values():
    if stage.module != 'convert':  # Its subcommands parse flags.
      values_of = dict.fromkeys(stage.reads, '1')
      _parse(stage.module, [pages.fill(x, values_of) for x in stage.arguments])
  disk.require_writable(states.root / 'stages')
  return _run(study, states, values)


def _load(values: flags.FlagValues) -> pages.Study:
  study = load(values.study)
  if values.root:
    study = dataclasses.replace(study, root=values.root)

  def with_flags(page):
    added = ['--fresh'] if values.fresh else []
    if values.root and not any(x.startswith('--root=') for x in page.arguments):
      added.append(f'--root={{{page.name}}}')
    return dataclasses.replace(page, arguments=(*page.arguments, *added))

  commands = (
    with_flags(x) if x.module == 'study' else x for x in study.commands
  )
  return dataclasses.replace(study, commands=tuple(commands))


def _pages(
  states: stage_states.States,
) -> dict[str, tuple[pages.Study, flags.FlagValues]]:
  """Returns the pages of a study of studies, and their flags, by name."""
  found = {}
  for stage in states.stages.values():
    if stage.module == 'study':
      values = states.values(stage)
      arguments = [pages.fill(text, values) for text in stage.arguments]
      values = _parse('study', arguments)
      found[stage.name] = _load(values), values
  return found


def _describe(
  study: pages.Study, states: stage_states.States, values: flags.FlagValues
) -> str:
  found, parts, notes = _pages(states), {}, []
  if not found:
    return study_plan.describe(study, states)
  for name, (page, _) in found.items():
    try:
      parts[name] = page, stage_states.States(page, stages.resolve(page))
    except errors.UserError as error:  # May need models of another page.
      notes.append(f'{name} is not planned: {error}')
  return '\n'.join([study_plan.describe_pages(parts), *notes])


def _flags(values: flags.FlagValues) -> list[str]:
  root = [f'--root={values.root}'] if values.root else []
  return [f'--study={values.study}', *root]


def _report(
  study: pages.Study, states: stage_states.States, values: flags.FlagValues
) -> None:
  line = shlex.join(_flags(values))
  study_results.write(study, states, f'python -m encdec_adapt.study {line}')
  if study.readme:
    found = _pages(states)
    for page, flags_of in found.values():
      if page.results:
        of_page = stage_states.States(page, stages.resolve(page))
        if not of_page.unfinished:  # Its sittings are over.
          _report(page, of_page, flags_of)
    folders = {name: page.folder for name, (page, _) in found.items()}
    claim_tables.write_readme(study.readme, folders, study.picture)
    print(f'wrote {study.readme}')


def load(spec: str) -> pages.Study:
  """Loads the study of FILE[:ARG].

  Raises:
    UserError: the file is missing, fails, or has no get_study.
  """
  # Studies first: configs/ also has a file named `post_training`.
  located = configs.locate(spec, ('studies/', ''))
  path, _, arg = located.partition(':')
  if not pathlib.Path(path).is_file():
    raise errors.UserError(f'--study={spec}: the file {path} does not exist.')
  # Load by path, like --config: configs/ need not be importable.
  spec_of_file = importlib.util.spec_from_file_location('study_config', path)
  module = importlib.util.module_from_spec(spec_of_file)
  try:
    spec_of_file.loader.exec_module(module)
    if not hasattr(module, 'get_study'):
      raise errors.UserError(f'--study={spec}: {path} has no get_study(arg).')
    page = module.get_study(arg or None)
    # Results travel with a checkout.
    is_shipped = pathlib.Path(path).resolve().parent == _SHIPPED
    is_shipped &= (_SHIPPED.parents[1] / 'pyproject.toml').exists()
    if page.arms and page.size == 'cpu' and is_shipped and arg in _AS_SHIPPED:
      file = configs.path(f'studies/results/{page.name}.csv')
      page = dataclasses.replace(page, results=file)
    return page
  except errors.UserError:
    raise
  except Exception as error:  # The file is the user's code.
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    # A syntax error has no frame, but a line number.
    line = lines[-1] if lines else getattr(error, 'lineno', 1)
    raise errors.UserError(
      f'--study={spec}: {path} fails at line {line}'
      f' ({type(error).__name__}: {error}); mend the file.'
    ) from error


def _run(
  study: pages.Study, states: stage_states.States, values: flags.FlagValues
) -> int:
  jobs = _jobs(states, values)
  run = functools.partial(run_stage, jobs=values.jobs)
  if not values.worker:
    states.adopt()
    states.reopen([values.stage] if values.stage else states.stages)
  if values.worker or values.stage:
    return workers.work(study, states, run, values.stage)
  if values.fresh:
    states.discard_others(_cores(states, values))
  count = len(states.stages)
  print(f'{study.title}: {count} stages into {states.root}', flush=True)
  print(_describe(study, states, values), flush=True)
  if jobs > 1:
    arguments = [*_flags(values), '--worker']
    arguments += ['--fresh'] if values.fresh else []
    status = max(workers.start(arguments, jobs))
  else:
    status = workers.work(study, states, run)
  if status in stage_states.STOPPED:
    if study.results:  # Of this sitting.
      study_results.store(study_results.collect(study, states, ''), states)
    return status
  _report(study, states, values)
  failed = [x.name for x in states.stages.values() if states.failed(x)]
  for name in failed:
    state = states.state(states.stages[name])
    reason = state.error if state and state.error else 'what it reads failed'
    print(f'{name} has no result: {" ".join(reason.split())}', file=sys.stderr)
  return status or int(bool(failed))


def _jobs(states: stage_states.States, values: flags.FlagValues) -> int:
  """Returns the number of workers (1 for a study of studies)."""
  # Its pages run sequentially, each with separate workers, so that no two pages
  # train a shared model.
  if any(stage.module == 'study' for stage in states.stages.values()):
    return 1
  return values.jobs or workers.default_jobs()


def _cores(states: stage_states.States, values: flags.FlagValues) -> int:
  return len(workers.cores()) // _jobs(states, values)


def run_stage(
  stage: stages.Stage, arguments: Sequence[str], jobs: int | None = None
) -> tuple[int, float | None]:
  """Runs the command of a stage.

  Args:
    stage: the stage.
    arguments: its arguments, with names in braces already replaced.
    jobs: workers for a page of a study of studies; None for the default.

  Returns:
    The exit status, and the learning rate selected by a choice of rates.

  Raises:
    UserError: the stage fails on bad input.
  """
  if stage.module == 'materialize':
    # Keeps TensorFlow (sources `tfds:` and `seqio:`) out of this process.
    process_pool.run_in_subprocess(_call, stage.module, arguments)
    return 0, None
  if stage.module == 'study':
    arguments = [*arguments, *([f'--jobs={jobs}'] if jobs else [])]
  if stage.settings:
    text_passes.check(stage, arguments)
  if stage.rate:
    return _choose_rate(stage.rate, arguments)
  return _call(stage.module, arguments), None


def _call(module: str, arguments: Sequence[str]) -> int:
  if module == 'convert':
    commands = _module(module).COMMANDS
    return command.run_subcommand('', commands, arguments)
  return _module(module).main(_parse(module, arguments))


def _parse(module: str, arguments: Sequence[str]) -> flags.FlagValues:
  return command.parse(_module(module).define_flags, arguments)


def _module(name: str) -> types.ModuleType:
  # Import late, to load the dependencies only when needed.
  return importlib.import_module(f'encdec_adapt.{name}')


def _choose_rate(
  rate: pages.Rate, arguments: Sequence[str]
) -> tuple[int, float | None]:
  *arguments, workdir = arguments
  workdir = workdir.removeprefix('--workdir=')
  waiting, extra, values = list(rate.values), rate.extra, {}
  while waiting:
    value = waiting.pop(0)
    status, values[value] = _tried(value, workdir, rate.metric, arguments)
    if status:
      return status, None
    if waiting:
      continue
    best = rate.best(values)
    if best is None:
      raise errors.UserError(
        f'none of the rates {values} has a finite {rate.metric}.'
      )
    factor = rate.values[1] / rate.values[0] if len(rate.values) > 1 else 1.0
    beyond = {min(values): best / factor, max(values): best * factor}.get(best)
    if extra and beyond and factor > 1:
      waiting, extra = [beyond], extra - 1
  texts = {f'{x:g}': y for x, y in values.items()}
  summary = {rate.results: texts, 'rate': best}
  atomic.write_json(paths.at(workdir) / 'rates.json', summary)
  print(f'the {rate.results} are {texts}: the rate is {best:g}')
  return 0, best


def _tried(
  value: float, workdir: str, metric: str, arguments: Sequence[str]
) -> tuple[int, float]:
  folder = paths.join(workdir, f'{value:g}')
  summary, status = paths.at(folder) / compute_cost.SUMMARY, 0
  flags = f'--config.optimizer.learning_rate={value:g}', f'--workdir={folder}'
  if not summary.exists():
    try:
      status = _call('train', [*arguments, *flags])
    except errors.DivergedError as error:
      print(f'at the rate {value:g}: {error}')
      return 0, math.nan
  ends = {} if status else atomic.read_json(summary)
  return status, ends.get(f'eval_{metric}', math.nan)


def _listing(states: stage_states.States, cores: int, as_json: bool) -> str:
  here, rows = {**environment.versions(), 'cores': cores}, []
  for stage in states.stages.values():
    values, state = states.values(stage), states.state(stage)
    arguments = [pages.fill(text, values) for text in stage.arguments]
    rows.append(
      {
        'name': stage.name,
        'identity': stage.identity,
        'status': state.status if state else 'not started',
        'reads': list(stage.reads),
        'folder': str(states.folder(stage)),
        'seconds': state.seconds if state else 0.0,
        'made_in': state.difference(here) if state else [],
        'command': workers.command_line(stage.module, arguments),
      }
    )
  return json.dumps(rows, indent=1) if as_json else '\n'.join(map(_line, rows))


def _line(row: Mapping[str, object]) -> str:
  reads = f', reads {", ".join(row["reads"])}' if row['reads'] else ''
  other = f' ({"; ".join(row["made_in"])})' if row['made_in'] else ''
  return f'{row["name"]}: {row["status"]}{other}{reads}\n  {row["command"]}'


if __name__ == '__main__':
  command.main(__doc__, define_flags, main)
