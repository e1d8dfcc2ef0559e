"""Every configuration key with its default; experiments start from these.

    python -m encdec_adapt.train --config=configs/base.py --print_config

prints them with their documentation; `configs/keys.md` has the same page.
Any leaf is overridden on the command line, for example
`--config.optimizer.learning_rate=1e-3`. Keys that are not there do not exist:
a mistyped one is an error that names the nearest right one.
"""

from encdec_adapt import config


def get_config():
  """Returns the defaults."""
  return config.defaults()
