"""Memory of a training job: `train --dry_run`, and out-of-memory errors.

`train` imports only this module of the planner. It compiles nothing and must
not read weights or data.
"""

from collections.abc import Iterator
import contextlib
import shlex

import jax

from encdec_adapt import config as config_lib
from encdec_adapt.adaptation import init_section
from encdec_adapt.base import errors
from encdec_adapt.files import disk
from encdec_adapt.models import parameters
from encdec_adapt.planner import (
  chips,
  program_shapes,
  programs,
  reward_models,
  stored_plans,
)
from encdec_adapt.sharding import compiler, layout_report
from encdec_adapt.stored import model_on_disk
from encdec_adapt.training import setup
from encdec_adapt.training.jobs import job_sources

_EXAMPLE = 'v5e:4x4'  # Chips of the suggested command on a CPU.


def describe(settings: config_lib.Settings) -> str:
  """Describes a job without computing or reading any weights.

  Missing sources are left out. A missing teacher is assumed to have the shape
  of the model or the decoder, depending on the loss; a missing reward model
  that of the policy; the text says so. Activations are not estimated: they
  depend on the compiled program.

  Args:
    settings: loaded with or without sources.

  Returns:
    Lines of text.

  Raises:
    UserError: invalid mesh, batches, or existing source, teacher or reward
      model. Vocabularies are not compared.
  """
  mesh = setup.make_mesh(settings.mesh)
  platform = mesh.devices.flat[0].platform
  missing = {
    name: problem
    for name, declared in settings.recipe.frozen.items()
    if (problem := _missing('teacher.checkpoint', declared.path))
  }
  # Without a path a shape is assumed; opening a missing path would fail.
  frozen = {
    name: model.without_path() if name in missing else model
    for name, model in settings.recipe.frozen.items()
  }
  job = programs.Job.of('train', settings, platform, mesh, frozen=frozen)
  setup.check_batches(settings.train, job.lengths, mesh, settings.rules)
  setup.check_positions(settings.recipe.model, job.lengths)
  program = job.program()
  rows = [row for row in program.rows() if row.part == 'parameters']
  lines = [layout_report.text(rows)]
  for name, part in parameters.count_by_stack(job.model).items():
    lines.append(
      f'{name}: {part.total:,} parameters ({part.embeddings:,} embeddings,'
      f' {part.cross:,} cross-attention)'
    )
  count = parameters.count(job.model)
  active = parameters.count_active(job.model)
  experts = f', {active:,} of them for a token' if active < count else ''
  lines += [
    f'together: {count:,} parameters{experts}',
    f'mesh {dict(job.mesh.shape)}; bytes per device:',
  ]
  sizes = program_shapes.tree_bytes(
    {**program.arguments, **program.temporaries, **program.beside}
  )
  for name, size in {**sizes, 'together': sum(sizes.values())}.items():
    lines.append(f'  {name:<16} {disk.format_bytes(size)}')
  for name in missing.keys() & sizes.keys():
    same = job.references[name] == job.model
    shape = 'the model' if same else 'the decoder'
    lines.append(f"  {missing[name]}: a {name} of {shape}'s shape is counted")
  lines += [f'  {x}' for x in reward_models.missing_text(job.rewards.missing)]
  lengths = job.lengths
  lines += [
    '  without activations; for those of the compiled program run python -m'
    ' encdec_adapt.plan',
    f'a step: {job.rows} rows of {lengths.encoder} + {lengths.decoder} tokens,'
    f' {job.flops():.3g} model FLOPs',
  ]
  if settings.init.mode != 'random':
    lines.append(_describe_sources(settings.init, job))
  return '\n'.join(lines)


def _missing(key: str, path: str) -> str:
  if not path:
    return f'config.{key} is not given'
  exists = model_on_disk.resolve(path)[0].exists()
  return '' if exists else f'{path} does not exist'


def _describe_sources(init: init_section.InitConfig, job: programs.Job) -> str:
  """Describes the source of every weight; reads configs only.

  Raises:
    UserError: an existing source does not match the model.
  """
  missing = _missing('init.encoder', init.encoder) or (
    init.decoder and _missing('init.decoder', init.decoder)
  )
  if missing:
    return f'sources: {missing}'
  sources = job_sources.open_sources(
    init, job.resolved.compute, job.placed_model
  )
  if sources.coverage:
    return sources.coverage.table()
  return f'{init.mode} of: {sources.models[0].name}'


@contextlib.contextmanager
def explained(config_flag) -> Iterator[None]:
  """Turns out-of-memory errors into user errors with a planning command.

  Args:
    config_flag: flag of the job's configuration.

  Raises:
    UserError: the compiler or a device ran out of device memory.
  """
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    message = str(error)
    if not compiler.ran_out_of_memory(message):
      raise
    raise errors.UserError(_advice(message, config_flag)) from error


def _advice(message: str, config_flag) -> str:
  hardware, note = chips.slice_of(jax.devices()), ''
  # The limit of JAX's allocator is below the chip's memory; on GPUs
  # XLA_PYTHON_CLIENT_MEM_FRACTION sets it.
  limit = (jax.local_devices()[0].memory_stats() or {}).get('bytes_limit')
  if hardware is None:
    hardware, limit = chips.parse(_EXAMPLE), None
    note = f' (with your chips in the place of {_EXAMPLE})'
  # Includes evaluation: its batches may be the ones that do not fit.
  request = stored_plans.request(config_flag, hardware)
  flags = stored_plans.flags(request, ['train', 'eval'])
  if limit:
    flags.append(f'--hbm_gib={limit / 2**30:.1f}')
  command = ['python', '-m', 'encdec_adapt.plan', *flags]
  return (
    'the devices have too little memory for this configuration:'
    f' {message.splitlines()[0].rstrip(".")}. `{shlex.join(command)}`{note}'
    ' prints the memory that it needs, and flags with which it would fit. A'
    ' run that has saved checkpoints resumes with the same command and such'
    ' flags.'
  )
