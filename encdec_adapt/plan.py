r"""Estimates memory and step time of a configuration on absent hardware.

    python -m encdec_adapt.plan --config=configs/gemma2.py:size=2b_2b \
      --topology=v5e:4x4 [--num_slices=2] [--programs=train,eval,..]

compiles the programs for TPUs (libtpu) or GPUs (extra cuda13) without devices,
and reports memory, FLOPs, collectives and a roofline estimate per device. For
GPUs (--topology=h100:64) without the compiler, the analytic cost model makes
the report. A shipped plan of the same configuration and chips is printed first.
The exit status is 3 if a program does not fit into memory.

    python -m encdec_adapt.plan --config=... --topology=v5e:4x4 --search=6

ranks meshes, remat policies and rows per chip with the cost model, compiles
the best six, and ranks them again.

    python -m encdec_adapt.plan --table=configs/plans

prints a table of plans written with --output.
"""

from collections.abc import Mapping
import dataclasses
import time
from typing import Any

from absl import flags

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.cli import command
from encdec_adapt.files import atomic, disk
from encdec_adapt.planner import (
  calibration,
  chips,
  plan_report,
  plan_search,
  program_plans,
  programs,
  stored_plans,
)
from encdec_adapt.sharding import layout_report
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.training import setup

DOES_NOT_FIT = 3  # Exit status.

define_flags = command.define(
  command.define_config,
  command.string('topology', 'Chips, such as v5e:4x4, v5p:8x8x8 or h100:64.'),
  command.integer('num_slices', 'Number of slices.', default=1, lower_bound=1),
  command.flag(
    'list',
    'programs',
    'Of train, eval, decode, and of policies sample, and reward: the scoring of'
    ' completions by a reward model.',
    default=['train'],
  ),
  command.integer(
    'examples',
    'Examples of a packed row, equally long: attention on GPUs leaves out keys'
    ' of the others.',
    default=1,
    lower_bound=1,
  ),
  command.number(
    'hbm_gib', 'Memory budget of a device in GiB; 0: all of it.', default=0.0
  ),
  command.boolean(
    'sharding', 'Print the sharding of every array, and compile nothing.'
  ),
  command.integer(
    'search',
    'Number of best-ranked candidates to compile. They keep the batch; of'
    ' equally fast ones that with the most memory left comes first.',
    default=0,
    lower_bound=0,
  ),
  command.number(
    'price_per_hour',
    'Price of a chip for an hour, in any currency; a search then prints the'
    ' cost of the job.',
    default=0.0,
    lower_bound=0.0,
  ),
  command.string('table', 'Folder of stored plans.'),
  command.string('output', 'JSON file of the report.'),
)


def main(values: flags.FlagValues) -> int:
  """Runs the command."""
  if values.table:
    print(stored_plans.markdown(stored_plans.read(values.table)))
    print(f'\n{calibration.text(calibration.table())}')
    return 0
  command.require(values, 'config', 'topology')
  slices = chips.parse(values.topology, values.num_slices, values.hbm_gib)
  # [''] for --programs=, which would silently plan nothing.
  for name in values.programs or ['']:
    if name not in programs.PROGRAMS:
      names = ', '.join(programs.PROGRAMS)
      raise errors.UserError(
        f'--programs={name} is not known; choose of {names}.'
      )
  if values.output:
    disk.require_output(values.output)
  if values.sharding and values.output:
    raise errors.UserError(
      f'--sharding prints where arrays are, and writes no --output='
      f'{values.output}; leave out one of them.'
    )
  if values.search and values.programs != ['train']:
    raise errors.UserError(
      f'--search is for settings of training, and --programs is'
      f' {",".join(values.programs)}; leave out one of them.'
    )
  settings = config_lib.load(values.config, sources=False)
  platform = slices.chip.kind
  # Check against the planned chips, not local devices.
  setup.check_attention(settings.compute.attention, platform)
  if values.sharding:
    mesh = program_plans.make_mesh(settings, slices)
    for name in values.programs:
      rows = programs.Job.of(name, settings, platform, mesh).program().rows()
      print(f'[{name}]\n{layout_report.text(rows)}')
    return 0
  if values.search:
    return _search(settings, slices, values)
  if stored := stored_plans.shipped(settings, slices):
    versions = ', '.join(f'{k} {v}' for k, v in stored['versions'].items())
    print(
      f'Shipped plan of this configuration ({versions}); the plan of this'
      ' command follows.'
    )
    _print(slices, stored['programs'])
  plans = program_plans.make(settings, slices, values.programs, values.examples)
  _print(slices, plans)
  print(calibration.text(calibration.table()))
  results = {
    'digest': stored_plans.digest(settings, platform),
    'programs': plans,
  }
  _write(values, slices, results)
  return 0 if all(p['fits'] for p in plans.values()) else DOES_NOT_FIT


def _print(slices: chips.Slice, plans: Mapping[str, Any]) -> None:
  for name, plan in plans.items():
    print(f'[{name}] {slices.name} x {slices.count}: {slices.devices} devices')
    print(plan_report.text(plan), flush=True)


def _write(
  values: flags.FlagValues, slices: chips.Slice, results: dict[str, Any]
) -> None:
  if values.output:
    request = stored_plans.request(values['config'], slices)
    # Include the errors of past estimates, to judge the plan by.
    content = {**request, **results, 'calibration': calibration.table()}
    atomic.write_json(values.output, content)


def _search(
  settings: config_lib.Settings, slices: chips.Slice, values: flags.FlagValues
) -> int:
  # Any mesh: each candidate replaces it.
  mesh = mesh_lib.make_mesh(
    mesh_lib.MeshConfig(replica=slices.count), chips.devices_of(slices)
  )
  candidates = plan_search.ranked(
    programs.Job.of('train', settings, slices.chip.kind, mesh), slices
  )
  # `ranked` keeps candidates slightly over memory for the compiler to judge;
  # without a compiler, the cost model decides.
  is_compiled = chips.compiler(slices.chip.kind)
  if not is_compiled:
    candidates = [c for c in candidates if c.plan['fits']]
  print(
    f'{len(candidates)} candidates may fit into {slices.name} x {slices.count},'
    f' with a batch of {settings.train.batch_size} rows'
  )
  fit = []
  for i, candidate in enumerate(candidates[: values.search]):
    start = time.monotonic()
    try:
      plan = program_plans.plan(candidate.job, slices)
    # If the compiler fails on a mesh, the search continues.
    except errors.UserError as error:
      result = f'no plan ({program_plans.first_line(error)})'
    else:
      result = disk.format_bytes(plan['memory']['peak'])
      result += ', fits' if plan['fits'] else ', does not fit'
      if plan['fits']:
        fit.append(dataclasses.replace(candidate, plan=plan))
        rows = [
          {'flags': c.flags, 'hours': c.hours, 'plan': c.plan} for c in fit
        ]
        # Write after each candidate, as compiling may take hours.
        _write(values, slices, {'candidates': rows})
    if is_compiled:
      seconds = time.monotonic() - start
      print(f'{i + 1}/{values.search}: {result}, {seconds:.0f} s', flush=True)
  if fit:
    print(plan_search.text(fit, slices, values.price_per_hour))
  else:
    print('none of these fits; try --search=N')
  print(calibration.text(calibration.table()))
  return 0 if fit else DOES_NOT_FIT


if __name__ == '__main__':
  command.main(__doc__, define_flags, main)
