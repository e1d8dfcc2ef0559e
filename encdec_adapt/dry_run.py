"""What a job would need and do, without making any of it: `--dry_run`."""

from encdec_adapt import config as config_lib
from encdec_adapt import job, job_sources
from encdec_adapt.files import disk
from encdec_adapt.files import paths as paths_lib
from encdec_adapt.models import parameters
from encdec_adapt.sharding import layout_report as sharding_report
from encdec_adapt.training import state as state_lib


def describe(settings: config_lib.Settings) -> str:
  """What a job would hold in memory, without making any of it.

  Sources and a teacher that are not given, or not there yet, are left out,
  and that is said. Activations are not estimated here; they depend on what
  XLA makes of the program.

  Args:
    settings: loaded with or without sources.

  Returns:
    Lines of text.

  Raises:
    UserError: the job would be refused for its mesh, its batches, or a source
      or teacher that is there. Vocabularies are not compared.
  """
  mesh = job.make_mesh(settings)
  job.check_batches(settings, mesh)
  where = job.place_model(settings, settings.model, mesh)
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
  a_part = f', {active:,} of them for a token' if active < count else ''
  lines.append(f'together: {count:,} parameters{a_part}')
  lines += _describe_memory(settings, where)
  lines.append(
    f'a step: {settings.train.batch_size} rows of'
    f' {settings.data.train.encoder_length} +'
    f' {settings.data.train.decoder_length} tokens,'
    f' {job.step_flops(settings, None):.3g} model FLOPs without a teacher'
  )
  if settings.init.mode != 'random':
    lines.append(_describe_sources(settings, where))
  return '\n'.join(lines)


def _describe_memory(
  settings: config_lib.Settings, where: state_lib.Placement
) -> list[str]:
  """Lines: bytes per device of the state and the teacher."""
  subject = job.Subject.of(settings, where)
  state = subject.abstract(subject.all_groups)
  sizes = {
    'parameters': sharding_report.device_bytes(state.params),
    'gradients': sharding_report.device_bytes(state.params),
    'optimizer state': sharding_report.device_bytes(state.groups),
  }
  absent = ''
  if settings.loss.distillation:
    absent = _absent('teacher.checkpoint', settings.teacher.checkpoint)
    if not absent:
      teacher = job_sources.place_teacher(settings, where.mesh)
      sizes['teacher'] = sharding_report.device_bytes(teacher.abstract_params())
  lines = [f'mesh {dict(where.mesh.shape)}; bytes per device:']
  for name, size in {**sizes, 'together': sum(sizes.values())}.items():
    lines.append(f'  {name:<16} {disk.format_bytes(size)}')
  on_host = sharding_report.device_bytes(state.groups, host=True)
  if on_host:
    lines.append(
      f"  {disk.format_bytes(on_host)} of optimizer state in the hosts' memory,"
      ' for each of their devices'
    )
  if absent:
    lines.append(f'  {"teacher":<16} {absent}: not counted')
  lines.append(
    '  without activations, which follow from the compiled program: python -m'
    ' encdec_adapt.plan'
  )
  return lines


def _absent(key: str, path: str) -> str:
  """Says that a model is not given, or not there yet; '' where it is there."""
  if not path:
    return f'config.{key} is not given'
  return '' if paths_lib.at(path).exists() else f'{path} is not there'


def _describe_sources(
  settings: config_lib.Settings, where: state_lib.Placement
) -> str:
  """What an adaptation does with every weight, or why it is not known.

  Reads configs alone.

  Raises:
    UserError: a source that is there does not suit.
  """
  init = settings.init
  absent = _absent('init.encoder', init.encoder) or (
    init.decoder and _absent('init.decoder', init.decoder)
  )
  if absent:
    return f'sources: {absent}: not looked at'
  sources, report = job_sources.fitting_sources(settings, where)
  paths = ' and '.join(str(source.path) for source in sources)
  return report.table() if report else f'{init.mode} of: {paths}'
