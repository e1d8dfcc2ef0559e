"""Plans as files: the flags, the versions and the result.

This module must not import programs: it describes requests and results only.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from ml_collections import config_flags

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.files import atomic, paths
from encdec_adapt.planning import chips
from encdec_adapt.sharding import mesh
from encdec_adapt.telemetry import environment

_GIB = 2**30


def request(config_flag, hardware: chips.Slice) -> dict[str, Any]:
  """Returns the flags of a configuration, the chips and the versions."""
  versions = environment.versions()
  return {
    'config': config_flags.get_config_filename(config_flag),
    'overrides': config_flags.get_override_values(config_flag),
    'topology': hardware.name,
    'num_slices': hardware.count,
    'versions': {name: versions[name] for name in ('jax', 'libtpu')},
  }


def setup(settings: config_lib.Settings) -> dict[str, Any]:
  """Returns the settings of a job that decide on memory and speed.

  A stored plan has them beside its flags, so that a test tells when a
  configuration has changed since its plan was compiled.
  """
  return {
    'mesh': {axis: getattr(settings.mesh, axis) for axis in mesh.AXES},
    'rules': {k: list(v) for k, v in settings.rules.as_dict().items()},
    'remat': settings.compute.remat,
    'attention': settings.compute.attention,
    'batch_size': settings.train.batch_size,
    'microbatches': settings.train.microbatches,
    'optimizer': {
      name: getattr(settings.optimizer, name)
      for name in ('kind', 'moment_dtype', 'second_moment_dtype', 'offload')
    },
  }


def flags(requested: Mapping[str, Any], names: Iterable[str]) -> list[str]:
  """Returns the flags of `encdec_adapt.plan` that repeat a request.

  Args:
    requested: a `request`, or a stored plan, which contains its request.
    names: names of the programs.
  """
  return [
    f'--config={requested["config"]}',
    *(f'--config.{k}={v}' for k, v in requested['overrides'].items()),
    f'--topology={requested["topology"]}',
    f'--num_slices={requested["num_slices"]}',
    f'--programs={",".join(names)}',
  ]


def read(folder: str) -> list[dict[str, Any]]:
  """Returns the plans that `--output` wrote into a folder, by file name.

  Args:
    folder: local path or bucket URL. Other JSON files, such as candidates of
      a search, are skipped.

  Raises:
    UserError: there is no plan, or a file is not a JSON object.
  """
  files = sorted(paths.at(folder).glob('*.json'))
  plans = [plan for plan in map(atomic.read_json, files) if 'programs' in plan]
  if not plans:
    raise errors.UserError(
      f'--table={folder} has no plans; write one there with --output.'
    )
  return plans


def markdown(plans: list[dict[str, Any]]) -> str:
  """Returns a row for every program of every plan; '-' if unknown."""
  lines = [
    '| configuration | chips | memory per chip, GiB | step, s | MFU |'
    ' compiled, s |',
    '|---|---|---|---|---|---|',
  ]
  for stored in plans:
    slices = f'{stored["num_slices"]} x ' if stored['num_slices'] > 1 else ''
    path, _, argument = stored['config'].partition(':')
    for program, plan in stored['programs'].items():
      suffix = '' if program == 'train' else f', {program}'
      lines.append(
        f'| `{argument or path}`{suffix} | {slices}{stored["topology"]}'
        f' | {" | ".join(_cells(plan))} |'
      )
  return '\n'.join(lines)


def _cells(plan: Mapping[str, Any]) -> list[str]:
  """Returns memory, seconds of a step, MFU, seconds of compiling."""
  memory, times = plan['memory'], plan['roofline'] or {}

  def cell(value: float | None, form: str) -> str:
    return '-' if value is None else format(value, form)

  return [
    f'{memory["peak"] / _GIB:.1f} of {memory["budget"] / _GIB:.1f}',
    cell(times.get('step_s'), '.2f'),
    cell(plan['mfu'], '.1%'),
    cell(plan['compile_s'], '.0f'),
  ]
