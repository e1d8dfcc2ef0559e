r"""Says what a configuration costs on hardware that is not here.

    python -m encdec_adapt.plan --config=configs/gemma2.py:size=2b_2b \
      --topology=v5e:4x4 [--num_slices=2] [--programs=train,eval,decode]

Compiles the programs with the TPU's own compiler (libtpu), which needs no TPU,
and reports memory, FLOPs, collectives and a roofline estimate per device. Of
GPUs (--topology=h100:64) it reports the same from shapes alone.
Exits with status 3 where a program does not fit into memory.

    python -m encdec_adapt.plan --config=... --topology=v5e:4x4 --search[=6]

ranks meshes, remat policies and rows a chip by shapes, compiles the best six,
and ranks those again.

    python -m encdec_adapt.plan --calibrate=all

plans training whose speed was published, and keeps how far off it is.

    python -m encdec_adapt.plan --table=configs/plans

prints a table of plans that were written with --output.
"""

import dataclasses
import importlib.metadata
import math
import os
import time

from absl import flags
import jax

from encdec_adapt import config as config_lib
from encdec_adapt.cli import command, errors
from encdec_adapt.files import atomic, disk
from encdec_adapt.planning import (
  calibration,
  chips,
  hlo,
  kernels,
  plan_report,
  programs,
  remedies,
  search,
  shapes,
  stored,
)
from encdec_adapt.sharding import layout_report as sharding_report
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.training import setup

DOES_NOT_FIT = 3  # Exit status.
_CANDIDATES = 6  # That --search compiles by itself.


class _CountParser(flags.IntegerParser):
  """A number; of a flag without one, which absl calls 'true', the usual."""

  def convert(self, argument):
    words = {'true': _CANDIDATES, 'false': 0}
    return words[argument] if argument in words else super().convert(argument)


def define_flags(values: flags.FlagValues) -> None:
  """The flags of this command."""
  command.define_config(values)
  define = dict(flag_values=values)
  flags.DEFINE_string(
    'topology', None, 'Chips, such as v5e:4x4, v5p:8x8x8 or h100:64.', **define
  )
  flags.DEFINE_integer('num_slices', 1, 'Slices of that shape.', **define)
  flags.DEFINE_list('programs', ['train'], 'Of train, eval, decode.', **define)
  flags.DEFINE_float(
    'hbm_gib', 0.0, 'Memory budget of a device; 0: all it has.', **define
  )
  flags.DEFINE_bool(
    'sharding',
    False,
    'Print how every array is sharded, and compile nothing.',
    **define,
  )
  # Boolean, so that it may stand without a value.
  parser = _CountParser(lower_bound=0)
  flags.DEFINE_flag(
    flags.Flag(
      parser,
      flags.ArgumentSerializer(),
      'search',
      0,
      'Candidates to compile of those that rank best; without a number'
      f' {_CANDIDATES}. Rows a chip are searched, so the batch is not kept.',
      boolean=True,
    ),
    **define,
  )
  flags.DEFINE_list(
    'calibrate',
    None,
    "Published runs to plan anew, by parts of their names; 'all' of them.",
    **define,
  )
  flags.DEFINE_string('table', '', 'Folder of written plans.', **define)
  flags.DEFINE_string('output', '', 'JSON file of the report.', **define)


def main(values: flags.FlagValues) -> int:
  """Runs the command."""
  if values.output:
    for name in ('calibrate', 'table', 'sharding'):
      if values[name].value:
        raise errors.UserError(
          f'--output={values.output} gets nothing of --{name}, which writes no'
          ' report; leave one of them out.'
        )
    disk.require_output(values.output)
  if values.search and (values.sharding or values.programs != ['train']):
    other = 'sharding' if values.sharding else 'programs'
    raise errors.UserError(
      f'--search={values.search} ranks training steps by their plans, and'
      f' --{other} asks for something else; leave one of them out.'
    )
  if values.calibrate:
    return _calibrate(values.calibrate)
  if values.table:
    print(stored.markdown(stored.read(values.table)))
    print(f'\n{calibration.text(calibration.table())}')
    return 0
  command.require(values, 'config', 'topology')
  where = chips.parse(values.topology, values.num_slices)
  known = ', '.join(programs.PROGRAMS)
  if not values.programs:
    raise errors.UserError(f'--programs= names none; choose of {known}.')
  for name in values.programs:
    if name not in programs.PROGRAMS:
      raise errors.UserError(
        f'--programs={name} is not known; choose of {known}.'
      )
  settings = config_lib.load(values.config, sources=False)
  setup.check_attention(settings.compute.attention, where.chip.kind)
  budget = values.hbm_gib * 2**30 or where.chip.hbm_bytes
  if values.sharding:
    mesh = _mesh(settings, describe_devices(where))
    for name in values.programs:
      program = programs.PROGRAMS[name](settings, mesh)
      print(f'[{name}]\n{sharding_report.text(programs.rows(program))}')
    return 0
  if values.search:
    return _search(settings, where, budget, values)
  plans = make(settings, where, values.programs, budget)
  for name, plan in plans.items():
    print(f'[{name}] {where.name} x {where.count}: {where.devices} chips')
    print(plan_report.text(plan))
  print(calibration.text(calibration.table()))
  if values.output:
    job = {'job': stored.setup(settings)}
    _write(values, where, job | stored.content(plans))
  return 0 if all(p['fits'] for p in plans.values()) else DOES_NOT_FIT


def _write(values, where: chips.Slice, found: dict) -> None:
  """Writes a report, with what was asked and what estimates are worth."""
  asked = stored.question(values['config'], where)
  worth = {'calibration': calibration.table()}
  atomic.write_json(values.output, {**asked, **found, **worth})


def make(
  settings: config_lib.Settings,
  where: chips.Slice,
  names: list[str],
  budget: float,
) -> dict[str, dict]:
  """Plans of the named programs; see `report.describe`.

  Raises:
    UserError: the mesh or a batch does not divide, libtpu is missing, the
      topology does not exist, or the compiler fails.
  """
  devices = describe_devices(where)
  mesh = _mesh(settings, devices)
  if where.chip.kind == 'gpu':
    plans = {
      name: shapes.describe(name, settings, mesh, where, budget)
      for name in names
    }
  else:
    plans = {
      name: _compiled_or_refused(name, settings, mesh, where, budget)
      for name in names
    }
  for name, plan in plans.items():
    if not plan['fits']:
      plan |= remedies.find(name, settings, plan, where, devices)
  return plans


def describe_devices(where: chips.Slice):
  """Devices of the chips, or others that stand for GPUs.

  Raises:
    UserError: libtpu is missing, or the topology does not exist.
  """
  if where.chip.kind == 'gpu':
    return shapes.stand_in_devices(where.devices)
  # The compiler needs neither a TPU nor to be alone, and asks no server.
  jax.config.update('jax_platforms', 'cpu')
  os.environ['ALLOW_MULTIPLE_LIBTPU_LOAD'] = '1'
  os.environ['TPU_SKIP_MDS_QUERY'] = '1'
  return chips.devices_of(where)


def _mesh(settings: config_lib.Settings, devices):
  try:
    mesh = mesh_lib.make_mesh(settings.mesh, devices)
  except ValueError as error:
    raise errors.UserError(str(error)) from error
  lengths = settings.data.train.lengths
  setup.check_batches(settings.train, lengths, mesh, settings.rules)
  return mesh


def _compiled_or_refused(name, settings, mesh, where, budget) -> dict:
  """The plan of one program.

  Raises:
    UserError: the compiler fails, and not for memory; or what it made of the
      program is not understood.
  """
  try:
    return _compiled(name, settings, mesh, where, budget)
  except (jax.errors.JaxRuntimeError, hlo.UnknownProgramError) as error:
    reason = str(error).strip().splitlines()[0]
    of = f'program {name!r} for {where.name} x {where.count}'
    libtpu = f'libtpu {importlib.metadata.version("libtpu")}'
    if isinstance(error, hlo.UnknownProgramError):
      message = (
        f'what the compiler made of {of} cannot be counted: {reason}. That is'
        f' not known of {libtpu}: report it, with this command. Estimates by'
        ' shapes, which compile nothing, are what --search prints first.'
      )
    else:
      message = (
        f'the compiler fails on {of}: {reason}. That is an error of {libtpu};'
        ' change config.mesh, the topology or that version.'
      )
    raise errors.UserError(message) from error


def _compiled(name, settings, mesh, where, budget) -> dict:
  """The plan of one program, compiled."""
  lengths = settings.data.train.lengths
  loss = {'train': programs.loss, 'eval': programs.evaluation_loss}.get(name)
  question = plan_report.Question(
    where,
    mesh,
    budget,
    known=kernels.attentions(
      settings.model,
      lengths.encoder,
      lengths.decoder,
      lengths.teacher
      * setup.reads_teacher_row(
        settings.model, lengths, settings.loss.distillation
      ),
      math.prod(mesh.shape[axis] for axis in settings.rules.length),
    ),
    model_flops=programs.model_flops(name, settings, mesh),
    loss=loss and loss(settings, mesh),
  )
  return plan_report.describe(programs.PROGRAMS[name](settings, mesh), question)


def _search(settings, where, budget, values) -> int:
  """Ranks candidates by shapes, compiles the first, ranks them again.

  Of GPUs, those are described whole; nothing is compiled.
  """
  devices = describe_devices(where)
  found = search.ranked(settings, where, devices, budget)
  print(
    f'{len(found)} candidates may fit into {where.name} x {where.count}. They'
    ' have rows a chip of their own: a job keeps its batch of'
    f' {settings.train.batch_size} by config.train.microbatches.'
  )
  if where.chip.kind == 'gpu':
    fit = [one for one in found if one.plan['fits']][: values.search]
    fit = [_whole(one, devices, where, budget) for one in fit]
  else:
    chosen, fit = found[: values.search], []
    print(search.text(chosen))
    for one in _compiled_candidates(chosen, devices, where, budget):
      fit.append(one)
      _write_candidates(values, where, fit)  # A search may take hours.
    fit.sort(key=lambda one: -one.rate)
  _write_candidates(values, where, fit)
  print(search.text(fit))
  if not fit:
    print(
      'none of these fits; --search=N with a number above'
      f' {values.search} tries more of those that may.'
    )
  print(calibration.text(calibration.table()))
  return 0 if fit else DOES_NOT_FIT


def _whole(one, devices, where, budget):
  """A candidate with all that shapes say of it, of its own mesh."""
  mesh = _mesh(one.settings, devices)
  plan = shapes.describe('train', one.settings, mesh, where, budget)
  return dataclasses.replace(one, plan=plan)


def _compiled_candidates(chosen, devices, where, budget):
  """Yields those that fit, with their plans; what becomes of each is printed.

  One that the compiler refuses for another reason than memory is left out.
  """
  for i, one in enumerate(chosen):
    began = time.monotonic()
    mesh = _mesh(one.settings, devices)
    plan = None
    try:
      plan = _compiled('train', one.settings, mesh, where, budget)
    except (jax.errors.JaxRuntimeError, hlo.UnknownProgramError) as error:
      result = f'no plan ({str(error).strip().splitlines()[0]})'
    else:
      fits = 'fits' if plan['fits'] else 'does not fit'
      result = f'{disk.format_bytes(plan["memory"]["peak"])}, {fits}'
    print(
      f'{i + 1}/{len(chosen)}: {result}, {time.monotonic() - began:.0f} s:'
      f' {" ".join(one.flags)}',
      flush=True,
    )
    if plan and plan['fits']:
      yield dataclasses.replace(one, plan=plan)


def _write_candidates(values, where, fit) -> None:
  if values.output:
    rows = [{'flags': one.flags, 'plan': one.plan} for one in fit]
    _write(values, where, {'candidates': rows})


def _calibrate(names: list[str]) -> int:
  """Plans the published runs and writes the table of errors.

  Raises:
    UserError: a name is part of none of theirs.
  """
  for part in names if names != ['all'] else ():
    if not any(part in name for name in calibration.RUNS):
      raise errors.UserError(
        f'--calibrate={part} is part of no name of a published run; those are'
        f' {"; ".join(calibration.RUNS)}.'
      )
  rows = {row['name']: row for row in calibration.table()}
  topologies = [chips.parse(run.topology) for run in calibration.RUNS.values()]
  shapes.stand_in_devices(
    max(where.devices for where in topologies if where.chip.kind == 'gpu')
  )
  for name, run in calibration.RUNS.items():
    if names != ['all'] and not any(part in name for part in names):
      continue
    values = command.parse(define_flags, [f'--config={run.config}'])
    settings = config_lib.load(values.config, sources=False)
    where = chips.parse(run.topology)
    plan = make(settings, where, ['train'], where.chip.hbm_bytes)['train']
    print(f'[{name}]\n{plan_report.text(plan)}', flush=True)
    rows[name] = calibration.row(name, plan)
    ordered = [rows[n] for n in calibration.RUNS if n in rows]
    atomic.write_json(calibration.path(), ordered)
  print(calibration.text(list(rows.values())))
  return 0


if __name__ == '__main__':
  command.main(__doc__, define_flags, main)
