"""Plans as files: what was asked, with what, and what came out."""

from collections.abc import Mapping
import importlib.metadata
import pathlib
from typing import Any

import jax
from ml_collections import config_flags

from encdec_adapt.planning import chips
from encdec_adapt.runtime import errors, files

_GIB = 2**30


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


def flags(stored: Mapping[str, Any]) -> list[str]:
  """The flags of `encdec_adapt.plan` that ask the same again."""
  return [
    f'--config={stored["config"]}',
    *(f'--config.{k}={v}' for k, v in stored['overrides'].items()),
    f'--topology={stored["topology"]}',
    f'--num_slices={stored["num_slices"]}',
    f'--programs={",".join(stored["programs"])}',
  ]


def read(folder: str) -> list[dict[str, Any]]:
  """Plans that `--output` wrote into a folder, by their file names.

  Raises:
    UserError: there is none.
  """
  paths = sorted(pathlib.Path(folder).glob('*.json'))
  if not paths:
    raise errors.UserError(
      f'--table={folder} has no plans; write one there with --output.'
    )
  return [files.read_json(path) for path in paths]


def markdown(plans: list[dict[str, Any]]) -> str:
  """A row for the training step of every plan."""
  lines = [
    '| configuration | chips | memory a chip, GiB | of it loss | step, s |'
    ' MFU | compiled, s |',
    '|---|---|---|---|---|---|---|',
  ]
  for one in plans:
    train = one['programs']['train']
    memory = train['memory']
    slices = f'{one["num_slices"]} x ' if one['num_slices'] > 1 else ''
    name = one['config'].partition(':')[2]
    lines.append(
      f'| `{name}` | {slices}{one["topology"]}'
      f' | {memory["peak"] / _GIB:.1f} of {memory["budget"] / _GIB:.1f}'
      f' | {memory["parts"]["loss"] / memory["peak"]:.0%}'
      f' | {train["roofline"]["step_s"]:.2f} | {train["mfu"]:.1%}'
      f' | {train["compile_s"]:.0f} |'
    )
  return '\n'.join(lines)
