r"""Trains a model: configuration, mesh, data, state, loop.

    python -m encdec_adapt.train --config=configs/quickstart.py:run=adapted \
      --workdir=runs/adapted [--config.train.steps=500]

A job that ended early continues when the same command is given again.
"""

from absl import flags
import ml_collections

from encdec_adapt import config as config_lib
from encdec_adapt import (
  dry_run,
  job,
  job_sources,
  loop,
  outcome,
  vocabulary_checks,
)
from encdec_adapt.checkpoints import manager, resume_checks
from encdec_adapt.cli import command
from encdec_adapt.cluster import distributed, lock
from encdec_adapt.files import paths
from encdec_adapt.models import parameters
from encdec_adapt.planning import out_of_memory
from encdec_adapt.telemetry import accounting, environment, profiling
from encdec_adapt.training import state as state_lib


def define_flags(values: flags.FlagValues) -> None:
  """The flags of this command."""
  command.define_config(values)
  define = dict(flag_values=values)
  flags.DEFINE_string('workdir', None, 'Folder of this job.', **define)
  flags.DEFINE_bool('print_config', False, 'Print all keys.', **define)
  flags.DEFINE_bool(
    'dry_run', False, 'Print shapes, memory, what is adapted; stop.', **define
  )
  flags.DEFINE_string(
    'coordinator', None, 'host:port of process 0, or auto.', **define
  )
  flags.DEFINE_integer('processes', None, 'How many there are.', **define)
  flags.DEFINE_integer('process', None, 'Which this one is.', **define)
  flags.DEFINE_integer(
    'start_seconds',
    distributed.START_TIMEOUT,
    'Seconds for all processes to come up.',
    **define,
  )


def main(values: flags.FlagValues) -> int:
  """Runs the command."""
  command.require(values, 'config')
  if values.print_config:
    print(config_lib.page(values.config.to_dict()))
    return 0
  with profiling.listening(), distributed.fail_together():
    distributed.initialize(
      values.coordinator,
      values.processes,
      values.process,
      flags={
        'config': values.config.to_dict(),
        'workdir': values.workdir,
        'dry_run': values.dry_run,
      },
      timeout=values.start_seconds,
    )
    if values.dry_run:
      workdir = values.workdir or ''
      settings = config_lib.load(values.config, workdir, sources=False)
      print(dry_run.describe(settings))
      return 0
    command.require(values, 'workdir')
    with out_of_memory.explained(values['config']):
      return run(values.config, values.workdir)


def run(config: ml_collections.ConfigDict, workdir: str) -> int:
  """Trains to the last step, or until told to stop.

  Args:
    config: `configs/base.py` with changes.
    workdir: folder of the job; what it holds is continued.

  Returns:
    Exit status: 0, or `app.RESTART` after a saved preemption.

  Raises:
    UserError: bad input, found before the first step; no checkpoint of those
      that there were is sound; or updates that are not finite.
  """
  settings = config_lib.load(config, workdir)
  if not distributed.is_lead():
    return _run(config, settings, workdir)
  with lock.hold(workdir):
    return _run(config, settings, workdir)


def _run(config, settings: config_lib.Settings, workdir: str) -> int:
  """Checks everything, opens what there is, and trains."""
  say = print if distributed.is_lead() else lambda *_, **__: None
  subject = _subject(settings)
  checkpoints = manager.Checkpoints(
    paths.join(workdir, manager.FOLDER),
    keep=settings.checkpoint.keep,
    keep_every=settings.checkpoint.keep_every or None,
  )
  start, saved = _find_start(config, settings, subject, checkpoints, say)
  data = job.open_data(settings)
  count = parameters.count(settings.model)
  say(
    f'{type(settings.model).__name__}: {count:,} parameters on'
    f' {dict(subject.where.mesh.shape)}; {len(data.train):,} training rows'
  )
  meta = {
    'config': config.to_dict(),
    'environment': environment.report(),
    'fingerprint': {
      **environment.fingerprint(),
      'mesh': dict(subject.where.mesh.shape),
    },
    'vocabularies': data.opened.describe(),
    'order': {'records': data.train.digests, 'seed': settings.seed},
  }
  if start is None:
    state, cost = _initialise(settings, workdir, subject, data, meta, say)
  else:
    state, cost = _restore(start, saved, subject, checkpoints, data, meta, say)
  if distributed.is_lead():
    outcome.describe(config, meta['environment'], workdir)
  teacher = {}
  if subject.teacher:
    teacher = job_sources.read_teacher(settings, subject.teacher)
  beginning = loop.Beginning(start, state, cost, meta, teacher)
  steps = loop.Loop(
    settings, workdir, subject, data, checkpoints, beginning, say
  )
  del state, beginning  # The first step reuses their memory.
  return steps.run()


def _subject(settings: config_lib.Settings) -> job.Subject:
  """The models on their mesh, and what trains them.

  Raises:
    UserError: they do not go together, or not with the devices.
  """
  mesh = job.make_mesh(settings)
  job.check_attention(settings, mesh.devices.flat[0].platform)
  job.check_batches(settings, mesh)
  vocabulary_checks.check_model(settings)
  where = job.place_model(settings, settings.model, mesh)
  return job.Subject.of(
    settings, where, job_sources.place_teacher(settings, mesh)
  )


def _find_start(config, settings, subject, checkpoints, say):
  """The step to go on from and what was saved beside it, or two Nones.

  Raises:
    UserError: the disk is too small, no checkpoint of those that there were is
      sound, or what it holds is not what this job trains.
  """
  every, steps = settings.checkpoint.every, settings.train.steps
  checkpoints.require_space(
    subject.abstract(subject.all_groups),
    [*range(every, steps, every), steps],
  )
  start = checkpoints.latest()
  if start is None:  # What was saved does not need them any more.
    checkpoints.check_not_lost()
    job_sources.check_sources(settings, subject.where)
    return None, None
  saved = checkpoints.read_meta(start)
  resume_checks.check_is_training(saved)
  resume_checks.report_changes(saved['config'], config.to_dict(), say)
  checkpoints.at(start).require_same(subject.abstract(_saved(subject, start)))
  return start, saved


def _saved(subject, step):
  """Groups that had trained when a step was saved.

  One that thaws at this very step had not.
  """
  return subject.active(max(step - 1, 0))


def _initialise(settings, workdir, subject, data, meta, say):
  """State and cost before the first step; adds what the sources have cost."""
  meta['sources'] = job_sources.read_costs(settings).as_dict()
  for path in meta['sources']['not_counted']:
    say(f'what {path} has cost is not known: the summary leaves it out')
  params, report = job_sources.initial_params(settings, subject.where)
  state = state_lib.create(
    params,
    subject.optimizer,
    subject.assignment,
    subject.active(0),
    subject.where,
  )
  if report and settings.init.mode != 'random':
    say(report.table())
  if distributed.is_lead():
    outcome.begin(settings, workdir, report, data.opened)
  return state, accounting.Cost()


def _restore(start, saved, subject, checkpoints, data, meta, say):
  """State and cost of a saved step; takes over what the sources have cost."""
  meta['sources'] = saved['sources']
  cost = accounting.Cost(**checkpoints.read_data(start))
  resume_checks.check_same_rows(
    saved['order'], meta['order'], cost.rows, data.train.starts
  )
  resume_checks.report_place(saved, meta, say)
  state = checkpoints.restore(start, subject.abstract(_saved(subject, start)))
  say(f'continuing at step {start}')
  return state, cost


if __name__ == '__main__':
  command.main(__doc__, define_flags, main)
