"""How the commands parse flags and end: shared by every main.

Mains define their flags in a function, so that importing one defines none
and a study can run several in one process, parsed as from a shell.
"""

from collections.abc import Callable, Sequence
import contextlib
import re
import sys

from absl import flags, logging
from ml_collections import config_flags

from encdec_adapt.runtime import app, errors

DefineFlags = Callable[[flags.FlagValues], None]


def define_config(values: flags.FlagValues) -> None:
  """Defines --config=FILE[:ARG] and --config.KEY=VALUE."""
  config_flags.DEFINE_config_file(
    'config',
    None,
    'Configuration file, such as configs/quickstart.py:run=adapted; any leaf'
    ' is changed by --config.KEY=VALUE.',
    lock_config=True,
    flag_values=values,
  )


def parse(define: DefineFlags, argv: Sequence[str]) -> flags.FlagValues:
  """Parses flags (without the program's name) into values of their own.

  Raises:
    UserError: an unknown flag or key, a value of the wrong type, a missing
      configuration file; names the nearest right key.
  """
  values = flags.FlagValues()
  define(values)
  flags.DEFINE_bool(
    'help', False, 'Print the flags.', short_name='h', flag_values=values
  )
  arguments = [sys.argv[0], *argv]
  try:
    with _argv(arguments):
      rest = values(arguments)
      if 'config' in values and values.config is not None:
        values.config.to_dict()  # A file that failed to load says so here.
  except errors.UserError:
    raise
  except (flags.Error, KeyError, AttributeError, TypeError) as error:
    raise errors.UserError(_explain(error)) from error
  except (OSError, ImportError) as error:
    raise errors.UserError(
      f'the configuration file could not be read: {_last_line(error)}; give'
      ' --config=FILE, for example --config=configs/base.py, in the root of'
      ' the repository.'
    ) from error
  if len(rest) > 1:
    raise errors.UserError(
      f'argument {rest[1]!r} is not a flag; flags are --name=value.'
    )
  return values


def main(
  description: str, define: DefineFlags, run: Callable[[flags.FlagValues], int]
) -> None:
  """Parses the command line, runs, and exits with the status of `run`.

  A `UserError` is printed as one paragraph, with status 2.
  """
  parsed = []

  def parse_flags(argv: Sequence[str]) -> Sequence[str]:
    # absl, and Grain's workers, want the global flags parsed; ours are not
    # among them.
    flags.FLAGS(argv[:1])
    parsed.append(parse(define, argv[1:]))
    return argv[:1]

  def start(_: Sequence[str]) -> int:
    logging.set_verbosity(logging.WARNING)  # Orbax reports at length.
    (values,) = parsed
    if values.help:
      print(f'{description}\n\nflags:\n{values.get_help()}')
      return 0
    return run(values)

  app.run(start, parse_flags=parse_flags)


def require(values: flags.FlagValues, *names: str) -> None:
  """Refuses flags that were not given."""
  for name in names:
    if not values[name].value:
      raise errors.UserError(f'--{name} is missing; see --help.')


@contextlib.contextmanager
def _argv(arguments: Sequence[str]):
  """config_flags looks for its overrides in sys.argv, not in what it parses."""
  saved = sys.argv
  sys.argv = list(arguments)
  try:
    yield
  finally:
    sys.argv = saved


def _explain(error: Exception) -> str:
  text = str(error).strip('"\'')
  found = re.search(r'[Dd]id you mean "(.*?)" instead of "(.*?)"', text)
  if found:
    right, wrong = found.groups()
    return (
      f'the configuration has no key {wrong!r}; the nearest is {right!r}.'
      ' configs/base.py lists every key.'
    )
  if isinstance(error, KeyError | AttributeError):
    key = re.search(r"'([^']+)", str(error))
    name = key.group(1) if key else text
    return (
      f'the configuration has no key {name!r}; configs/base.py lists every key.'
    )
  return f'{text}. See --help, and configs/base.py for every key.'


def _last_line(error: Exception) -> str:
  """The cause: what config_flags says last, or the import that failed."""
  return str(error).strip().splitlines()[-1].strip()
