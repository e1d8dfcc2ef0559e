"""Flag parsing, subcommands and help, shared by every main.

Each main defines its flags in a function: importing a main defines no flags,
and a study can parse and run several mains in one process. This module must not
import jobs: it only knows their flags.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import io
import re
import shlex
import sys
import traceback
import typing
from typing import Any

from absl import app as absl_app
from absl import flags, logging
from ml_collections import config_flags

from encdec_adapt import configs
from encdec_adapt.base import errors, exit_status, keys
from encdec_adapt.cluster import distributed, host_memory

# absl and ml_collections raise these for bad flags and configuration keys.
_BAD_FLAGS = (flags.Error, LookupError, AttributeError, TypeError, ValueError)
_LIBRARIES = re.compile('/(absl|ml_collections)/')
DefineFlags = Callable[[flags.FlagValues], None]
# Flag kind by value type.
_KINDS = {bool: 'bool', int: 'integer', float: 'float', str: 'string'}
_AGREES = 'agrees'  # Flag attribute: whether processes must agree on it.
_ARGUMENTS = 'arguments'  # Attribute of --config: all arguments of the command.


@dataclasses.dataclass(frozen=True)
class Subcommand:
  """A subcommand such as `convert export`.

  Attributes:
    summary: a line for --help.
    define: defines its flags.
    run: takes the flag values and the operands; returns an exit status.
    operands: names of the positional arguments, for the usage: ('A', 'B').
    more: whether the last operand may be repeated.
  """

  summary: str
  define: DefineFlags
  run: Callable[[flags.FlagValues, list[str]], int]
  operands: tuple[str, ...] = ()
  more: bool = False


def flag(
  kind: str, name: str, *arguments: Any, default: Any = None, **options: Any
) -> DefineFlags:
  """Returns a function that defines a flag.

  Args:
    kind: flag kind, such as 'string' for `flags.DEFINE_string`.
    name: flag name.
    *arguments: help text, after the allowed values of an enum.
    default: default value.
    **options: options of the kind, such as `lower_bound`, and `agrees`: whether
      all processes of a job must have the same value (default: True).
  """
  agrees = options.pop(_AGREES, True)
  define = getattr(flags, f'DEFINE_{kind}')

  def define_flag(values: flags.FlagValues) -> None:
    define(name, default, *arguments, flag_values=values, **options)
    setattr(values[name], _AGREES, agrees)

  return define_flag


class _AllFlag(flags.BooleanFlag):
  """A boolean flag that also accepts the string 'all'."""

  def _parse(self, value):
    return value if value == 'all' else super()._parse(value)


def boolean_or_all(name: str, text: str) -> DefineFlags:
  """Returns a function that defines a flag `--name` or `--name=all`."""

  def define_flag(values: flags.FlagValues) -> None:
    flags.DEFINE_flag(_AllFlag(name, False, text), values)
    setattr(values[name], _AGREES, True)

  return define_flag


string = functools.partial(flag, 'string')
boolean = functools.partial(flag, 'bool')
integer = functools.partial(flag, 'integer')
number = functools.partial(flag, 'float')
choice = functools.partial(flag, 'enum')


def options(section: type, *names: str) -> DefineFlags:
  """Returns a function that defines flags for fields of a dataclass.

  Args:
    section: dataclass with fields made by `keys.key`, which checks the bounds.
    *names: names of the fields; all of them by default.
  """
  types = typing.get_type_hints(section)
  definitions = []
  for name, _, key, default in keys.keys_of(section):
    # In a union with None, the field's type comes first.
    kind, *_ = typing.get_args(types[name]) or [types[name]]
    kind = 'multi_string' if default == () else _KINDS[kind]
    if name in (names or types):
      definitions.append(flag(kind, name, key.doc, default=default))
  return define(*definitions)


def define(*definitions: DefineFlags) -> DefineFlags:
  """Returns a function that defines several flags."""

  def define_flags(values: flags.FlagValues) -> None:
    for definition in definitions:
      definition(values)

  return define_flags


# Flags of multi-process commands.
define_processes = define(
  string('coordinator', 'host:port of process 0, or auto.', agrees=False),
  integer('processes', 'Number of processes.', agrees=False),
  integer('process', '0-based index of this process.', agrees=False),
  integer(
    'start_seconds',
    'Seconds to wait for all processes at the start.',
    default=distributed.START_TIMEOUT,
    agrees=False,
  ),
)


@contextlib.contextmanager
def processes(values: flags.FlagValues, **inputs: Any) -> Iterator[None]:
  """Runs a job on one or several processes, which fail together.

  Args:
    values: flags of the command, including `define_processes`.
    **inputs: further values that must be equal in every process.
  """
  with distributed.fail_together():
    distributed.initialize(
      values.coordinator,
      values.processes,
      values.process,
      flags={**agreed(values), **inputs},
      timeout=values.start_seconds,
    )
    yield


def agreed(values: flags.FlagValues) -> dict[str, Any]:
  """Returns the flags that must agree across processes, by name."""
  # absl and ml_collections define further flags. ml_collections adds a flag per
  # key, and `config` below contains its value.
  equal = [name for name in values if getattr(values[name], _AGREES, False)]
  agreed = {name: values[name].value for name in equal}
  if 'config' in agreed:
    agreed['config'] = agreed['config'].to_dict()
  return agreed


def made_by(values: flags.FlagValues, name: str) -> dict[str, str]:
  """Returns the provenance of a parsed command, for the work directory.

  Args:
    values: flags of the command, including `define_config`.
    name: command name, such as 'train'.

  Returns:
    The command line and the configuration's file and argument.
  """
  flag = values['config']
  file, _, argument = config_flags.get_config_filename(flag).partition(':')
  line = ['python', '-m', f'encdec_adapt.{name}', *getattr(flag, _ARGUMENTS)]
  return {
    'command': shlex.join(line),
    'config_file': file,
    'config_argument': argument,
  }


class _ConfigParser(config_flags.config_flags.ConfigFileFlagParser):
  """Loads FILE[:ARG], or a shipped configuration by its name."""

  def parse(self, path: str) -> Any:
    """Returns the result of the file's `get_config`."""
    return super().parse(configs.locate(path))


def define_config(values: flags.FlagValues) -> None:
  """Defines --config=FILE[:ARG] and --config.KEY=VALUE."""
  config_flags.DEFINE_config_file(
    'config',
    None,
    'Configuration file, such as FILE.py:run=adapted, or the name of a shipped'
    ' one, quickstart:run=adapted; any leaf is changed by --config.KEY=VALUE.',
    lock_config=True,
    flag_values=values,
  )
  values['config'].parser = _ConfigParser('config')
  setattr(values['config'], _AGREES, True)


def parse(define: DefineFlags, argv: Sequence[str]) -> flags.FlagValues:
  """Parses flags into values separate from absl's global flags.

  Args:
    define: defines the flags.
    argv: arguments without the program's name.

  Raises:
    UserError: an unknown flag or configuration key, a value of the wrong
      type, a missing configuration file.
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
  """Parses like `parse`; also returns the positional arguments."""
  values = flags.FlagValues()
  values.set_gnu_getopt(True)  # Flags may follow operands.
  arguments = [sys.argv[0], *argv]
  try:
    with _argv(arguments):
      define(values)
      flags.DEFINE_bool(
        'help', False, 'Print the flags.', short_name='h', flag_values=values
      )
      operands = values(arguments)[1:]
      if 'config' in values and values.config is not None:
        values.config.to_dict()  # Raises if the file failed to load.
        setattr(values['config'], _ARGUMENTS, list(argv))
  except _BAD_FLAGS as error:
    bad_config = _user_error_within(error)
    if bad_config is not None:
      raise bad_config from None
    raise errors.UserError(_explain(error, arguments)) from error
  except (OSError, ImportError) as error:
    raise errors.UserError(
      f'the configuration file could not be read: {_last_line(error)}; give'
      ' --config=FILE, or the name of a shipped one, such as --config=base.'
    ) from error
  return values, operands


def main(
  description: str,
  define: DefineFlags,
  run: Callable[..., int],
  *,
  operands: bool = False,
) -> None:
  """Parses the command line, runs, and exits with the status of `run`.

  A `UserError` is printed as a paragraph, with status 2.

  Args:
    description: text for --help.
    define: defines the flags.
    run: takes the values of the flags; returns an exit status.
    operands: whether `run` also takes the positional arguments.
  """

  def start(argv: Sequence[str]) -> int:
    host_memory.share_arena()
    parser = parse_operands if operands else parse
    parsed = parser(define, argv)
    values, *names = parsed if operands else (parsed,)
    if values.help:
      print(f'{description}\n\nflags:\n{values.get_help()}')
      return 0
    return run(values, *names)

  _run(start)


def main_of(description: str, commands: Mapping[str, Subcommand]) -> None:
  """Runs like `main`; the first argument names a subcommand."""
  _run(lambda argv: run_subcommand(description, commands, argv))


def run_subcommand(
  description: str, commands: Mapping[str, Subcommand], argv: Sequence[str]
) -> int:
  """Runs the subcommand named by the first argument.

  Args:
    description: text for --help.
    commands: subcommands by name.
    argv: arguments without the program's name.

  Returns:
    The exit status.

  Raises:
    UserError: missing or unknown subcommand, bad flags or operands.
  """
  name = argv[0] if argv else ''
  if name in ('-h', '--help', '--helpfull'):
    width = max(map(len, commands)) + 2
    lines = [f'  {n:<{width}}{c.summary}' for n, c in commands.items()]
    print(f'{description}\n\ncommands:\n' + '\n'.join(lines))
    return 0
  if name not in commands:
    raise errors.UserError(
      f'{name!r} is not a command; the first argument is one of'
      f' {", ".join(commands)}.'
    )
  command = commands[name]
  usage = ' '.join(command.operands) + (' ...' if command.more else '')
  values, operands = parse_operands(command.define, argv[1:])
  if values.help:
    print(f'{name} {usage}: {command.summary}\nflags:\n{values.get_help()}')
    return 0
  extra = len(operands) - len(command.operands)
  if extra < 0 or (extra and not command.more):
    raise errors.UserError(
      f'{name} takes {usage or "flags only"}, not'
      f' {" ".join(operands) or "nothing"}; see {name} --help.'
    )
  return command.run(values, operands)


def _run(start: Callable[[Sequence[str]], int]) -> None:
  def run(argv: Sequence[str]) -> int:
    logging.set_verbosity(logging.WARNING)  # Orbax logs much at INFO.
    # Python buffers 8 KB for files and pipes: hours of a job's output.
    if isinstance(sys.stdout, io.TextIOWrapper):
      # A terminal's encoding may lack characters.
      sys.stdout.reconfigure(line_buffering=True, errors='backslashreplace')
    return exit_status.guard(start, argv[1:])

  # absl and Grain's workers require parsed global flags; ours are separate.
  absl_app.run(run, flags_parser=lambda argv: flags.FLAGS(argv[:1]) + argv[1:])


def arguments(options: Mapping[str, Any]) -> list[str]:
  """Returns command-line arguments for options keyed by flag name.

  Args:
    options: values by flag name; None omits a flag, a list repeats it.
  """
  return [
    f'--{name}={item}'
    for name, value in options.items()
    for item in (value if isinstance(value, (list, tuple)) else [value])
    if item is not None
  ]


def require(values: flags.FlagValues, *names: str) -> None:
  """Raises UserError if a flag is missing."""
  for name in names:
    if not values[name].value:
      raise errors.UserError(f'--{name} is missing; see --help.')


@contextlib.contextmanager
def _argv(arguments: Sequence[str]):
  saved = sys.argv
  sys.argv = list(arguments)
  try:
    yield
  finally:
    sys.argv = saved


def _user_error_within(error: BaseException) -> BaseException | None:
  # config_flags raises an error of the same type with a traceback as its text,
  # and absl wraps that error. The context of the inner error is the file's
  # error.
  while error is not None and not isinstance(error, errors.UserError):
    error = error.__context__
  return error and error.__context__


def _explain(error: Exception, arguments: Sequence[str]) -> str:
  text = str(error)
  frames = re.findall(r'File "(.*)", line (\d+), in', text)
  if frames:  # The configuration file was running.
    file, line = frames[-1]
    position = f'at {file}:{line}'
    # get_config does not accept the argument.
    if file == config_flags.config_flags.__file__:
      position = 'with what follows the colon'
    return f'the configuration file failed {position}: {_last_line(error)}.'
  if isinstance(error, (KeyError, AttributeError)):
    # ml_collections names only the last part of the key, and the nearest key.
    name = re.search(r'(?:Key ")?(\w+)|$', text)[1] or ''
    nearest = re.search(r'Did you mean "(\w+)"', text)
    # `convert` changes a target's architecture with --model.KEY.
    keys = re.findall(r'--(?:config|model)\.([^= ]+)', ' '.join(arguments))
    full = next((key for key in keys if name in key.split('.')), name)
    text = f'the configuration has no key {full!r}'
    if nearest:
      text += f' (did you mean {nearest[1]!r}?)'
    text = _configuration_line(error) + text
  return (
    f'{text.rstrip(".")}. See --help; train --print_config shows every key.'
  )


def _configuration_line(error: Exception) -> str:
  frames = traceback.extract_tb(error.__traceback__)
  ours = [x for x in frames if not _LIBRARIES.search(x.filename)]
  file, line = ours[-1].filename, ours[-1].lineno
  # This module calls the libraries, and they call the configuration file.
  return '' if file == __file__ else f'{file}:{line}: '


def _last_line(error: Exception) -> str:
  return str(error).strip().splitlines()[-1].strip()
