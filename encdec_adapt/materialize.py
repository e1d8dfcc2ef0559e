r"""Makes the vocabulary and the records of a configuration ahead of training.

    python -m encdec_adapt.materialize --config=configs/quickstart.py \
      --workdir=runs/quickstart [--config.data.workers=4]

Finished shards are kept when the command is interrupted and given again.
`encdec_adapt/data/materialization.py` does the work.
"""

from absl import flags

from encdec_adapt.cli import command
from encdec_adapt.data import materialization


def define_flags(values: flags.FlagValues) -> None:
  """Defines the flags of this command."""
  command.define_config(values)
  flags.DEFINE_string(
    'workdir',
    '',
    'Folder of the job; records go below it if config.data.folder is empty.',
    flag_values=values,
  )


def main(values: flags.FlagValues) -> int:
  """Runs the command."""
  # Not at the top: it is slow, and worker processes import this module.
  from encdec_adapt import config as config_lib

  command.require(values, 'config')
  if not values.config.data.folder:
    command.require(values, 'workdir')
  # Records depend on text and vocabularies only; sources of weights and the
  # teacher may not exist yet.
  settings = config_lib.load(values.config, values.workdir, sources=False)
  materialization.materialize(settings.data)
  return 0


if __name__ == '__main__':
  command.main(__doc__, define_flags, main)
