"""A run again, from its work directory alone.

    python -m encdec_adapt.train --config=configs/rerun.py:run=runs/adapted \
      --workdir=runs/adapted_again [--config.seed=1]

The configuration is that of `run`, with its resolved values and every flag that
was given; the vocabularies are the copies in the folder. Records that were in
the work directory are made again, to the same bytes, and those of a folder of
their own are read. `runs/adapted/config.json` also states the command that made
it (`made_by`).
"""

from encdec_adapt import config as config_lib


def get_config(arg=None):
  """`run`: work directory of the run."""
  return config_lib.saved(config_lib.parse_arg(arg, run='')['run'])
