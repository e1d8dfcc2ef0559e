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
COMMANDS = {
  'materialize': 'makes records of text, or shows them',
  'train': 'adapts, pretrains, tunes or post-trains a model',
  'evaluate': 'measures checkpoints on records, tasks or examples',
  'generate': 'continues prompts',
  'convert': 'imports, exports, adapts, merges and compares models',
  'serve': "answers over HTTP as OpenAI's API does",
  'plan': 'predicts memory and time of a job on chips',
  'study': 'runs the stages of a study and writes its report',
}


def main() -> int:
  """Runs the command named by the first argument; returns its exit status."""
  return exit_status.guard(_run, sys.argv[1:])


def _run(arguments: Sequence[str]) -> int:
  name = arguments[0] if arguments else '--help'
  if name == '--version':
    print(_PACKAGE, importlib.import_module(_PACKAGE).__version__)
  elif name in ('-h', '--help'):
    print('encdec-adapt COMMAND [flags]; --help after COMMAND shows its flags')
    for command, purpose in COMMANDS.items():
      print(f'  {command:<12} {purpose}')
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
