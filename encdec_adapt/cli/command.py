"""How the commands parse flags and end: shared by every main.

Mains define their flags in a function, so that importing one defines none
and a study can run several in one process, parsed as from a shell.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import difflib
import io
import re
import sys
from typing import Any

from absl import flags, logging
from ml_collections import config_flags

from encdec_adapt.cli import app, errors

DefineFlags = Callable[[flags.FlagValues], None]


@dataclasses.dataclass(frozen=True)
class Subcommand:
  """One of the things that a command with subcommands does.

  Attributes:
    summary: what, in a line.
    define: defines its flags.
    run: takes their values and the operands; returns a status.
    operands: what stands beside the flags, for the usage: ('A', 'B').
    more: the last operand may be repeated.
  """

  summary: str
  define: DefineFlags
  run: Callable[[flags.FlagValues, list[str]], int]
  operands: tuple[str, ...] = ()
  more: bool = False

  def check(self, name: str, operands: Sequence[str]) -> None:
    """Refuses too few or too many operands."""
    count, wanted = len(operands), len(self.operands)
    if count < wanted or (count > wanted and not self.more):
      raise errors.UserError(
        f'{name} takes {self.usage() or "flags only"}, not'
        f' {" ".join(operands) or "nothing"}; see {name} --help.'
      )

  def usage(self) -> str:
    """The operands as they are written."""
    return ' '.join(self.operands) + (' ...' if self.more else '')


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
  values, operands = parse_operands(define, argv)
  if operands:
    raise errors.UserError(
      f'argument {operands[0]!r} is not a flag; flags are --name=value.'
    )
  return values


def parse_operands(
  define: DefineFlags, argv: Sequence[str]
) -> tuple[flags.FlagValues, list[str]]:
  """As `parse`, with the arguments that are no flags, in any place."""
  values = flags.FlagValues()
  values.set_gnu_getopt(True)
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
  except (
    flags.Error,
    LookupError,
    AttributeError,
    TypeError,
    ValueError,
  ) as error:
    raise errors.UserError(
      _unknown_key(define, arguments) or _explain(error, values)
    ) from error
  except (OSError, ImportError) as error:
    raise errors.UserError(
      f'the configuration file could not be read: {_last_line(error)}; give'
      ' --config=FILE, for example --config=configs/base.py, in the root of'
      ' the repository.'
    ) from error
  return values, rest[1:]


def main(
  description: str, define: DefineFlags, run: Callable[[flags.FlagValues], int]
) -> None:
  """Parses the command line, runs, and exits with the status of `run`.

  A `UserError` is printed as one paragraph, with status 2.
  """

  def start(argv: Sequence[str]) -> int:
    """Reads the flags and runs, or prints the help."""
    values = parse(define, argv)
    if values.help:
      print(f'{description}\n\nflags:\n{values.get_help()}')
      return 0
    return run(values)

  _run(start)


def main_of(description: str, commands: Mapping[str, Subcommand]) -> None:
  """As `main`, for a command whose first argument says what to do."""
  _run(lambda argv: run_subcommand(description, commands, argv))


def run_subcommand(
  description: str, commands: Mapping[str, Subcommand], argv: Sequence[str]
) -> int:
  """Runs the subcommand that the first argument names.

  Args:
    description: of the whole command, for its help.
    commands: name -> subcommand.
    argv: the arguments, without the program's name.

  Returns:
    The status.

  Raises:
    UserError: no or an unknown subcommand; bad flags or operands.
  """
  name = argv[0] if argv else ''
  if name in ('-h', '--help', '--helpfull'):
    lines = [f'  {n:<9}{c.summary}' for n, c in commands.items()]
    print(f'{description}\n\ncommands:\n' + '\n'.join(lines))
    return 0
  if name not in commands:
    near = difflib.get_close_matches(name, commands, 1)
    hint = f' Did you mean {near[0]}?' if near else ''
    what = f'{name!r} is no command' if name else 'a command is missing'
    raise errors.UserError(
      f'{what}; the first argument is one of {", ".join(commands)}.{hint}'
    )
  command = commands[name]
  values, operands = parse_operands(command.define, argv[1:])
  if values.help:
    print(f'{name} {command.usage()}: {command.summary}')
    print(f'flags:\n{values.get_help()}')
    return 0
  command.check(name, operands)
  return command.run(values, operands)


def _run(start: Callable[[Sequence[str]], int]) -> None:
  """Runs a main on its arguments and exits with its status."""

  def parse_flags(argv: Sequence[str]) -> Sequence[str]:
    """Leaves the arguments to us."""
    # absl, and Grain's workers, want the global flags parsed; ours are not
    # among them.
    flags.FLAGS(argv[:1])
    return argv

  def run(argv: Sequence[str]) -> int:
    """What absl calls: the arguments without the program's name."""
    logging.set_verbosity(logging.WARNING)  # Orbax reports at length.
    # Into a file or a pipe Python writes 8 KB at once: hours of a job's lines.
    if isinstance(sys.stdout, io.TextIOWrapper):
      sys.stdout.reconfigure(line_buffering=True)
    return start(argv[1:])

  app.run(run, parse_flags=parse_flags)


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


# What a value must be, by the name that absl gives its flag's type.
_TYPES = {
  'int': 'an integer',
  'float': 'a number',
  'bool': 'True or False',
}


def _unknown_key(define: DefineFlags, arguments: Sequence[str]) -> str:
  """Says which key the configuration lacks; '' if it lacks none.

  Args:
    define: of the flags that were being parsed.
    arguments: all of them.
  """
  given = [re.match(r'--?(?:no)?config\.([^=]*)', a) for a in arguments]
  values = flags.FlagValues()
  values.set_gnu_getopt(True)
  define(values)
  if 'config' not in values or not any(given):
    return ''
  others = [a for a, key in zip(arguments, given, strict=True) if not key]
  try:
    with _argv(others):
      values(others, known_only=True)
    keys = list(_keys(values.config.to_dict()))
  except Exception:  # Of the file or of another flag: that is said instead.
    return ''
  for key in (key[1] for key in given if key):
    if key not in keys:
      return f'the configuration has no key {key!r}; {_near(key, keys)}'
  return ''


def _keys(config: Mapping[str, Any], section: str = '') -> Iterator[str]:
  """The dotted names of all sections and leaves."""
  for name, value in config.items():
    yield section + name
    if isinstance(value, Mapping):
      yield from _keys(value, f'{section}{name}.')


def _near(key: str, keys: Sequence[str]) -> str:
  """What may have been meant by a key, or what is where it would be."""
  section, _, name = key.rpartition('.')
  parents = {k: k.rpartition('.') for k in keys}
  namesakes = [k for k in keys if parents[k][2] == name]
  beside = {parents[k][2]: k for k in keys if parents[k][0] == section}
  near = (
    difflib.get_close_matches(key, namesakes, 1, 0)
    or [beside[n] for n in difflib.get_close_matches(name, beside, 1)]
    or (not beside and difflib.get_close_matches(key, keys, 1, 0.75))
  )
  if near:
    return f'the nearest is {near[0]!r}. configs/base.py lists every key.'
  inside = beside.values() or [k for k in keys if '.' not in k]
  return f'there are {", ".join(inside)}. configs/base.py lists every key.'


def _explain(error: Exception, values: flags.FlagValues) -> str:
  """What is wrong with a flag or its value."""
  text = str(error)
  if isinstance(error, KeyError):
    text = text.strip('"\'')  # It shows its message as Python writes it.
  frames = re.findall(r'File "(.*)", line (\d+), in', text)
  if frames:  # The configuration file was running.
    file, line = frames[-1]
    own = file != config_flags.config_flags.__file__
    where = f'at {file}:{line}' if own else 'with what follows the colon'
    return f'the configuration file failed {where}: {_last_line(error)}.'
  return _wrong_type(text, error.__context__, values) or (
    f'{text}. See --help, and configs/base.py for every key.'
  )


def _wrong_type(
  text: str, cause: BaseException | None, values: flags.FlagValues
) -> str:
  """Says what type a flag has; '' where the error is another.

  Args:
    text: absl's 'flag --NAME=VALUE: CAUSE'.
    cause: what the parser of the value raised.
    values: the flags, which know their types.
  """
  flag = re.match(r'flag --([^=]+)=', text)
  if not flag or flag[1] not in values:
    return ''
  wanted = _TYPES.get(values[flag[1]].flag_type())
  if not wanted:
    return ''
  given = text[flag.end() :].removesuffix(f': {cause}')
  return f'{flag[1]} is {given!r}; it must be {wanted}.'


def _last_line(error: Exception) -> str:
  """The cause: what config_flags says last, or the import that failed."""
  return str(error).strip().splitlines()[-1].strip()
