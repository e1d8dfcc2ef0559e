"""The console script `encdec-adapt COMMAND [flags]`.

`encdec-adapt train` is `python -m encdec_adapt.train`. This module must not
import the commands: it runs only the named command.
"""

from collections.abc import Sequence
import importlib
import runpy
import sys

from encdec_adapt.base import errors, exit_status

_PACKAGE = 'encdec_adapt'
# In the order of use.
COMMANDS = ('materialize', 'train', 'evaluate', 'generate')
COMMANDS += ('convert', 'serve', 'plan', 'study')


def main() -> int:
  """Runs the command named by the first argument; returns its exit status."""
  return exit_status.guard(_run, sys.argv[1:])


def _run(arguments: Sequence[str]) -> int:
  name = arguments[0] if arguments else '--help'
  if name == '--version':
    print(_PACKAGE, importlib.import_module(_PACKAGE).__version__)
  elif name in ('-h', '--help'):
    print(
      'encdec-adapt COMMAND [flags], where COMMAND is one of'
      f' {", ".join(COMMANDS)}; --help after it shows its flags'
    )
  elif name in COMMANDS:
    del sys.argv[1]
    # Like `python -m`: worker processes import the main module by its name.
    runpy.run_module(f'{_PACKAGE}.{name}', run_name='__main__', alter_sys=True)
  else:
    raise errors.UserError(
      f'{name!r} is not a command{errors.nearest(name, COMMANDS)}; the first'
      f' argument is one of {", ".join(COMMANDS)}.'
    )
  return 0
