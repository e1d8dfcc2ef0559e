"""Stored plans: flags, versions and results.

This module must not import programs: it only describes requests and results.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import hashlib
import json
from typing import Any

from ml_collections import config_flags

from encdec_adapt import config as config_lib
from encdec_adapt import configs
from encdec_adapt.base import errors
from encdec_adapt.files import atomic, paths
from encdec_adapt.planner import chips
from encdec_adapt.telemetry import environment

_GIB = 2**30
# Sections, beside `compute`, that determine the programs.
_SECTIONS = 'model', 'teacher', 'optimizer', 'train', 'mesh'


def request(config_flag, hardware: chips.Slice) -> dict[str, Any]:
  """Returns the configuration's flags, the chips and the versions."""
  return {
    'config': config_flags.get_config_filename(config_flag),
    'overrides': config_flags.get_override_values(config_flag),
    'topology': hardware.name,
    'num_slices': hardware.count,
    'versions': versions(hardware.chip),
  }


def versions(chip: chips.Chip) -> dict[str, str]:
  """Returns the versions of jax and of the chip's compiler, if installed."""
  compiler = chips.compiler(chip.kind)
  names = dict([compiler.split()]) if compiler else {}
  return {'jax': environment.versions()['jax']} | names


def digest(settings: config_lib.Settings, platform: str) -> str:
  """Returns a checksum of the settings that determine a program.

  Stored plans contain it, so a test detects later changes to their
  configuration. Default values, and axes that are unsharded or unused, are left
  out, so new keys and axes change no digest.

  Args:
    settings: the configuration.
    platform: 'cpu', 'gpu' or 'tpu'.
  """
  sections = {name: _changes(getattr(settings, name)) for name in _SECTIONS}
  sections['compute'] = _changes(settings.compute.on(platform))
  sections['loss'] = _changes(settings.recipe.loss)
  data = settings.data
  rules = settings.rules.as_dict().items()
  sections['rules'] = {
    axis: divided
    for axis, divided in rules
    if divided and (axis != 'rank' or settings.train.lora.rank)
  }
  sections['data'] = [_changes(data.train.lengths), data.objective]
  text = json.dumps(sections, sort_keys=True, default=str)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def _changes(section: Any) -> Any:
  if not dataclasses.is_dataclass(section):
    return section
  return {
    field.name: _changes(value)
    for field in dataclasses.fields(section)
    if (value := getattr(section, field.name)) != _default(field)
  }


def _default(field: dataclasses.Field) -> Any:
  if field.default_factory is dataclasses.MISSING:
    return field.default
  return field.default_factory()


def flags(requested: Mapping[str, Any], names: Iterable[str]) -> list[str]:
  """Returns the flags of `encdec_adapt.plan` for a request.

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
  """Reads the plans written to a folder with `--output`, in file name order.

  Args:
    folder: local path or bucket URL. Other JSON files, such as search
      candidates, are skipped.

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


def shipped(
  settings: config_lib.Settings, hardware: chips.Slice
) -> dict[str, Any] | None:
  """Returns a configuration's plan in configs/plans, or None.

  Args:
    settings: the configuration.
    hardware: target chips.
  """
  platform = hardware.chip.kind
  chosen = digest(settings, platform), hardware.name, hardware.count
  return next(
    (
      plan
      for plan in read(configs.path('plans'))
      if (plan['digest'], plan['topology'], plan['num_slices']) == chosen
    ),
    None,
  )


def markdown(plans: list[dict[str, Any]]) -> str:
  """Formats a table, one row per program of each plan; '-' if unknown."""
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
  memory, times = plan['memory'], plan['roofline'] or {}

  def cell(value: float | None, form: str) -> str:
    return '-' if value is None else format(value, form)

  return [
    f'{memory["peak"] / _GIB:.1f} of {memory["budget"] / _GIB:.1f}',
    cell(times.get('step_s'), '.2f'),
    cell(plan['mfu'], '.1%'),
    cell(plan['compile_s'], '.0f'),
  ]
