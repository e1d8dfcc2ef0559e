"""Runs a command: `python -m encdec_adapt train` is `encdec-adapt train`."""

import sys

from encdec_adapt.cli import console

if __name__ == '__main__':
  sys.exit(console.main())
