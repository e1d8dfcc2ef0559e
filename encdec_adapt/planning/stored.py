"""Plans as files: what was asked, with what, and what came out."""

from collections.abc import Iterable, Mapping
import dataclasses
import importlib.metadata
from typing import Any

import jax
from ml_collections import config_flags

from encdec_adapt import config as config_lib
from encdec_adapt.cli import errors
from encdec_adapt.files import atomic
from encdec_adapt.files import paths as paths_lib
from encdec_adapt.planning import chips

_GIB = 2**30


def content(plans: Mapping[str, Any]) -> dict[str, Any]:
  """The report of the first program, with the others' under `others`.

  Args:
    plans: at least one, by the programs' names.
  """
  first, *rest = plans
  others = {name: plans[name] for name in rest}
  return {'program': first, **plans[first], 'others': others}


def programs(stored: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
  """The reports of a file by their programs' names, as asked."""
  return {stored['program']: stored, **stored['others']}


def question(config_flag, where: chips.Slice) -> dict[str, Any]:
  """What a plan is of: the configuration's flags, the chips, the compiler."""
  try:
    libtpu = importlib.metadata.version('libtpu')
  except importlib.metadata.PackageNotFoundError:
    libtpu = None
  return {
    'config': config_flags.get_config_filename(config_flag),
    'overrides': config_flags.get_override_values(config_flag),
    'topology': where.name,
    'num_slices': where.count,
    'versions': {'jax': jax.__version__, 'libtpu': libtpu},
  }


def setup(settings: config_lib.Settings) -> dict[str, Any]:
  """What a job runs with that the configuration file may have chosen."""
  return {
    'mesh': dataclasses.asdict(settings.mesh),
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


def flags(asked: Mapping[str, Any], names: Iterable[str]) -> list[str]:
  """The flags of `encdec_adapt.plan` that ask a question.

  Args:
    asked: a `question`, or a file that begins with one.
    names: of the programs.
  """
  return [
    f'--config={asked["config"]}',
    *(f'--config.{k}={v}' for k, v in asked['overrides'].items()),
    f'--topology={asked["topology"]}',
    f'--num_slices={asked["num_slices"]}',
    f'--programs={",".join(names)}',
  ]


def read(folder: str) -> list[dict[str, Any]]:
  """Plans that `--output` wrote into a folder, by their file names.

  Args:
    folder: on a file system, or in a bucket. What else is JSON there, such
      as the candidates of a search, is left out.

  Raises:
    UserError: there is none, or a file is no JSON object.
  """
  paths = sorted(paths_lib.at(folder).glob('*.json'))
  found = [atomic.read_json(path) for path in paths]
  plans = [one for one in found if 'program' in one]
  if not plans:
    raise errors.UserError(
      f'--table={folder} has no plans; write one there with --output.'
    )
  return plans


def markdown(plans: list[dict[str, Any]]) -> str:
  """A row for every program of every plan; '-' where nothing is known."""
  lines = [
    '| configuration | chips | memory a chip, GiB | of it loss | step, s |'
    ' MFU | compiled, s |',
    '|---|---|---|---|---|---|---|',
  ]
  for one in plans:
    slices = f'{one["num_slices"]} x ' if one['num_slices'] > 1 else ''
    path, _, argument = one['config'].partition(':')
    for program, plan in programs(one).items():
      of = '' if program == 'train' else f', {program}'
      lines.append(
        f'| `{argument or path}`{of} | {slices}{one["topology"]}'
        f' | {" | ".join(_cells(plan))} |'
      )
  return '\n'.join(lines)


def _cells(plan: Mapping[str, Any]) -> list[str]:
  """Memory, its share of the loss, seconds, MFU, seconds of compiling."""
  memory, times = plan['memory'], plan['roofline'] or {}
  loss = memory.get('parts', {}).get('loss')

  def cell(value: float | None, form: str) -> str:
    """A number, or a dash where it is not known."""
    return '-' if value is None else format(value, form)

  return [
    f'{memory["peak"] / _GIB:.1f} of {memory["budget"] / _GIB:.1f}',
    cell(None if loss is None else loss / memory['peak'], '.0%'),
    cell(times.get('step_s'), '.2f'),
    cell(plan['mfu'], '.1%'),
    cell(plan['compile_s'], '.0f'),
  ]
