"""`train --dry_run`: what a job would hold in memory, and what it adapts."""

from encdec_adapt import config as config_lib
from encdec_adapt.conversion import initial_state
from encdec_adapt.files import disk, paths
from encdec_adapt.models import parameters
from encdec_adapt.sharding import layout_report
from encdec_adapt.training import setup
from encdec_adapt.training import state as state_lib


def describe(settings: config_lib.Settings) -> str:
  """Describes a job without computing or reading any weight.

  Sources and a teacher that are not given, or do not exist yet, are left out;
  the text says so. Activations are not estimated: they depend on the compiled
  program.

  Args:
    settings: loaded with or without sources.

  Returns:
    Lines of text.

  Raises:
    UserError: the job would be refused for its mesh, its batches, or an
      existing source or teacher. Vocabularies are not compared.
  """
  mesh = setup.make_mesh(settings.mesh)
  lengths = settings.data.train.lengths
  setup.check_batches(settings.train, lengths, mesh, settings.rules)
  where = setup.place_model(
    settings.model, settings.compute, mesh, settings.rules
  )
  lines = [
    f'{path:<60} {str(info.shape):<28} {info.axes}'
    for path, info in where.model.table.items()
  ]
  for name, part in parameters.count_by_stack(settings.model).items():
    lines.append(
      f'{name}: {part.total:,} parameters ({part.embedding:,} embedding,'
      f' {part.cross:,} cross-attention)'
    )
  count = parameters.count(settings.model)
  active = parameters.count_active(settings.model)
  experts = f', {active:,} of them for a token' if active < count else ''
  lines.append(f'together: {count:,} parameters{experts}')
  lines += _describe_memory(settings, where)
  rows = settings.train.batch_size
  flops = setup.step_flops(settings.model, lengths, rows)
  lines.append(
    f'a step: {rows} rows of {lengths.encoder} + {lengths.decoder} tokens,'
    f' {flops:.3g} model FLOPs without a teacher'
  )
  if settings.init.mode != 'random':
    lines.append(_describe_sources(settings, where))
  return '\n'.join(lines)


def _describe_memory(
  settings: config_lib.Settings, where: state_lib.Placement
) -> list[str]:
  """Returns lines on the bytes per device of the state and the teacher."""
  state = setup.make_phases(
    where, settings.loss, settings.optimizer, settings.train
  ).abstract()
  sizes = {
    'parameters': layout_report.device_bytes(state.params),
    'gradients': layout_report.device_bytes(state.params),
    'optimizer state': layout_report.device_bytes(state.groups),
  }
  missing = ''
  if settings.loss.distillation:
    missing = _missing('teacher.checkpoint', settings.teacher.checkpoint)
    if not missing:
      teacher = initial_state.open_teacher(settings, where.mesh)
      params = teacher.where.abstract_params()
      sizes['teacher'] = layout_report.device_bytes(params)
  lines = [f'mesh {dict(where.mesh.shape)}; bytes per device:']
  for name, size in {**sizes, 'together': sum(sizes.values())}.items():
    lines.append(f'  {name:<16} {disk.format_bytes(size)}')
  on_host = layout_report.device_bytes(state.groups, host=True)
  if on_host:
    lines.append(
      f"  {disk.format_bytes(on_host)} of optimizer state in the hosts' memory,"
      ' for each of their devices'
    )
  if missing:
    lines.append(f'  {"teacher":<16} {missing}: not counted')
  lines.append(
    '  without activations; for those of the compiled program run python -m'
    ' encdec_adapt.plan'
  )
  return lines


def _missing(key: str, path: str) -> str:
  """Says that a model is not given or does not exist; '' if it exists."""
  if not path:
    return f'config.{key} is not given'
  return '' if paths.at(path).exists() else f'{path} does not exist'


def _describe_sources(
  settings: config_lib.Settings, where: state_lib.Placement
) -> str:
  """Describes what an adaptation does with every weight; reads configs only.

  Raises:
    UserError: an existing source does not fit.
  """
  init = settings.init
  missing = _missing('init.encoder', init.encoder) or (
    init.decoder and _missing('init.decoder', init.decoder)
  )
  if missing:
    return f'sources: {missing}'
  sources = initial_state.open_sources(init, settings.compute, where)
  if sources.coverage:
    return sources.coverage.table()
  return f'{init.mode} of: {sources.models[0].path}'
