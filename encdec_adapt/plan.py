r"""Says what a configuration costs on hardware that is not here.

    python -m encdec_adapt.plan --config=configs/gemma2.py:size=2b_2b \
      --topology=v5e:4x4 [--num_slices=2] [--programs=train,eval,decode]

Compiles the programs with the TPU's own compiler (libtpu), which needs no TPU,
and reports memory, FLOPs, collectives and a roofline estimate per device.
Exits with status 3 where a program does not fit into memory.
"""

import dataclasses
import os

from absl import flags
import jax

from encdec_adapt import config as config_lib
from encdec_adapt import job
from encdec_adapt.planning import chips, kernels, programs, report
from encdec_adapt.runtime import command, errors, files
from encdec_adapt.sharding import mesh as mesh_lib

DOES_NOT_FIT = 3  # Exit status.


def define_flags(values: flags.FlagValues) -> None:
  """The flags of this command."""
  command.define_config(values)
  define = dict(flag_values=values)
  flags.DEFINE_string(
    'topology', None, 'Chips, such as v5e:4x4 or v5p:8x8x8.', **define
  )
  flags.DEFINE_integer('num_slices', 1, 'Slices of that shape.', **define)
  flags.DEFINE_list('programs', ['train'], 'Of train, eval, decode.', **define)
  flags.DEFINE_float(
    'hbm_gib', 0.0, 'Memory budget of a device; 0: all it has.', **define
  )
  flags.DEFINE_string('output', '', 'JSON file of the report.', **define)


def main(values: flags.FlagValues) -> int:
  """Runs the command."""
  command.require(values, 'config', 'topology')
  where = chips.parse(values.topology, values.num_slices)
  for name in values.programs:
    if name not in programs.PROGRAMS:
      raise errors.UserError(
        f'--programs={name} is not known; choose of'
        f' {", ".join(programs.PROGRAMS)}.'
      )
  settings = config_lib.load(values.config, sources=False)
  plans = make(settings, where, values.programs, values.hbm_gib)
  for name, plan in plans.items():
    print(f'[{name}] {where.name} x {where.count}: {where.devices} chips')
    print(report.text(plan))
  if values.output:
    files.write_json(values.output, plans)
  return 0 if all(p['fits'] for p in plans.values()) else DOES_NOT_FIT


def make(
  settings: config_lib.Settings,
  where: chips.Slice,
  names: list[str],
  hbm_gib: float = 0.0,
) -> dict[str, dict]:
  """Plans of the named programs; see `report.describe`.

  Raises:
    UserError: the mesh or a batch does not divide, libtpu is missing, or
      the topology does not exist.
  """
  # The compiler needs neither a TPU nor to be alone, and asks no server.
  jax.config.update('jax_platforms', 'cpu')
  os.environ['ALLOW_MULTIPLE_LIBTPU_LOAD'] = '1'
  os.environ['TPU_SKIP_MDS_QUERY'] = '1'
  try:
    mesh = mesh_lib.make_mesh(settings.mesh, chips.devices_of(where))
  except ValueError as error:
    raise errors.UserError(str(error)) from error
  job.check_batches(settings, mesh)
  lengths = settings.data.train.lengths
  taught = bool(settings.loss.distillation)
  question = report.Question(
    where,
    mesh,
    hbm_gib * 2**30 or where.chip.hbm_bytes,
    kernels.attentions(
      settings.model,
      lengths.encoder,
      lengths.decoder,
      lengths.teacher if taught else 0,
    ),
    0.0,
  )
  plans = {}
  for name in names:
    program = programs.PROGRAMS[name](settings, mesh)
    asked = question
    if name == 'train':
      teacher = programs.teacher(settings, mesh)
      model_flops = job.step_flops(settings, teacher)
      asked = dataclasses.replace(question, model_flops=model_flops)
    plans[name] = report.describe(program, asked)
  return plans


if __name__ == '__main__':
  command.main(__doc__, define_flags, main)
