"""Shared by the launchers: flags, errors, printing and running commands."""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import typing

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Files that a machine needs to run a job.
SOURCE = ('setup.py', 'pyproject.toml', 'README.md')
SOURCE += ('encdec_adapt', 'configs', 'launch')
# Exit statuses of a job: copies of those in encdec_adapt.base.exit_status,
# which the launchers cannot import; a test compares them.
USER_ERROR = 2
DIVERGED = 3
RESTART = 75
HANG = 76
# Prefix of a Google Cloud accelerator type -> name of the chip in a topology,
# and the cores that the type's number counts per chip.
TPUS = {
  'v4': ('v4', 2),
  'v5litepod': ('v5e', 1),
  'v5p': ('v5p', 2),
  'v6e': ('v6e', 1),
  'tpu7x': ('tpu7x', 2),
}
TRAIN = 'train'  # The verb that starts a job.
# Names become parts of names of machines, pods and folders. GKE's limit is the
# shortest: a pod's name has 63 characters and starts with the job's.
_NAME = re.compile(r'[a-z]([-a-z0-9]{0,28}[a-z0-9])?')


class LaunchError(Exception):
  """User error, printed in one paragraph: exit status 2, no traceback."""


class _Parser(argparse.ArgumentParser):
  """Parser without abbreviations, which raises a LaunchError."""

  def __init__(self, **options):
    options.setdefault('allow_abbrev', False)
    options.setdefault('formatter_class', argparse.RawDescriptionHelpFormatter)
    super().__init__(**options)

  def error(self, message: str) -> typing.NoReturn:
    raise LaunchError(f'{message}; see {self.prog} --help')


def make_parser(
  module: str, description: str, verbs: typing.Mapping[str, str]
) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
  """Makes the parser of `python3 -m launch.MODULE`, and those of its verbs.

  Args:
    module: name of the launcher.
    description: text of --help.
    verbs: verb -> its description for --help.

  Returns:
    The parser, and the parsers of the verbs with the flags that all launchers
    have.
  """
  parser = _Parser(prog=f'python3 -m launch.{module}', description=description)
  parsers = parser.add_subparsers(dest='verb', metavar='VERB', required=True)
  added = {
    name: parsers.add_parser(name, help=what, description=what)
    for name, what in verbs.items()
  }
  for verb in added.values():
    verb.add_argument(
      '--dry_run', action='store_true', help='print every command, run none'
    )
  added[TRAIN].add_argument(
    '--env',
    action='append',
    default=[],
    type=_assignment,
    metavar='NAME=VALUE',
    help='environment variable of the job; may be repeated',
  )
  return parser, added


def _assignment(text: str) -> str:
  if not re.fullmatch('[A-Za-z_][A-Za-z0-9_]*=.*', text, re.DOTALL):
    raise LaunchError(
      f'--env={text} must be NAME=VALUE, such as --env TPU_STDERR_LOG_LEVEL=0.'
    )
  return text


def main(
  parse: typing.Callable[[list[str]], argparse.Namespace],
  act: typing.Callable[[argparse.Namespace, Shell], int],
  argv: list[str],
) -> int:
  """Runs a launcher.

  Args:
    parse: parses and checks the flags before `--`.
    act: gets the parsed flags, for `TRAIN` with the flags after `--` as
      `training`.
    argv: arguments of the process, without its name.

  Returns:
    Exit status; `USER_ERROR` for bad input.
  """
  own, training = _split(argv)
  try:
    options = parse(own)
    if options.verb == TRAIN:
      check_training(training)
      options.training = training
    elif training:
      raise LaunchError(
        f'{shlex.join(training)} after --: this verb starts no training job.'
      )
    return act(options, Shell(options.dry_run))
  except LaunchError as error:
    print(f'Error: {error}', file=sys.stderr)
    return USER_ERROR
  except KeyboardInterrupt:
    print('\nInterrupted; remote jobs keep running.', file=sys.stderr)
    return 130


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
  """Splits the arguments at the first `--`."""
  if '--' not in argv:
    return argv, []
  at = argv.index('--')
  return argv[:at], argv[at + 1 :]


def check_name(flag: str, name: str) -> None:
  """Refuses a name that is invalid for a machine, a pod or a folder."""
  if not _NAME.fullmatch(name):
    raise LaunchError(
      f'--{flag}={name}: give 1 to 30 small letters, digits and hyphens,'
      ' beginning with a letter and not ending with a hyphen.'
    )


def check_least(options: argparse.Namespace, least: float, *names: str) -> None:
  """Refuses flags whose number is below a minimum or not finite."""
  for name in names:
    value = getattr(options, name)
    if not (math.isfinite(value) and value >= least):
      raise LaunchError(f'--{name}={value}: give {least} or more.')


def tpu_chips(accelerator: str, *, extents: bool = False) -> tuple[str, int]:
  """Returns the chip's name in a topology and the chips of a TPU slice.

  Args:
    accelerator: accelerator type, such as v5litepod-16.
    extents: also accept a type with extents, such as v5litepod-4x4.

  Raises:
    LaunchError: the type is unknown.
  """
  kind, _, number = accelerator.partition('-')
  name, count = TPUS.get(kind, ('', 1))
  if name and re.fullmatch('[1-9][0-9]*', number):
    return name, int(number) // count
  if name and extents and re.fullmatch('[1-9][0-9]*(x[1-9][0-9]*)+', number):
    return name, math.prod(map(int, number.split('x')))
  raise LaunchError(
    f'--accelerator={accelerator} is unknown;'
    f' give KIND-NUMBER, as v5litepod-16, with KIND of {list(TPUS)}.'
    ' The number counts chips (v5litepod, v6e) or cores, two to a chip'
    ' (v4, v5p, tpu7x).'
  )


def flag_values(arguments: list[str]) -> dict[str, str]:
  """Returns the flags of the form --name=value by name."""
  return dict(
    argument.lstrip('-').partition('=')[::2] for argument in arguments
  )


def check_training(arguments: list[str]) -> None:
  """Refuses flags of encdec_adapt.train that cannot work on other machines."""
  flags = flag_values(arguments)
  for name in ('config', 'workdir'):
    if not flags.get(name):
      raise LaunchError(
        f'--{name}= of encdec_adapt.train is missing; give its flags after --,'
        ' as in `-- --config=configs/gemma2.py:size=2b_2b'
        ' --workdir=gs://BUCKET/runs/RUN`.'
      )
  config = flags['config'].partition(':')[0]
  # As the job does, which also finds a shipped file by its name.
  file = f'configs/{config}.py' if config.isidentifier() else config
  if pathlib.PurePath(config).is_absolute() or not (ROOT / file).is_file():
    raise LaunchError(
      f'--config={flags["config"]} after --: {config} is not a file of this'
      ' repository, which is what the machines get; put it under configs/.'
    )


def check_topology(
  training: list[str], kind: str, chips: int, slices: int, request: str
) -> None:
  """Refuses a configuration whose topology differs from the request.

  Args:
    training: flags of encdec_adapt.train.
    kind: name of the chip in a topology; '' for any GPU.
    chips: chips of a slice.
    slices: number of slices.
    request: flags of the request, for the message.
  """
  config = flag_values(training)['config']
  found = re.search(r'\btopology="?([^,"]+)', config)
  if not found:
    return
  given = re.search(r'\bslices=(\d+)', config)
  many = int(given[1]) if given else 1
  wanted, _, extents = found[1].partition(':')
  size = math.prod(map(int, re.findall(r'\d+', extents)))
  tpus = {name for name, _ in TPUS.values()}
  fits = wanted == kind if kind else wanted not in tpus
  if not fits or (size, many) != (chips, slices):
    raise LaunchError(
      f'--config={config} is for {many} x {size} {wanted} chips; {request}'
      f' requests {slices} x {chips} {kind or "GPU"}. Change one of them.'
    )


def check_shared_workdir(arguments: list[str], machines: str) -> None:
  """Refuses a work directory that would be lost with a machine.

  Args:
    arguments: flags of encdec_adapt.train.
    machines: the machines, for the message.
  """
  workdir = flag_values(arguments)['workdir']
  if not re.match('/|gs://[^/]+/[^/]', workdir):
    raise LaunchError(
      f'--workdir={workdir} after --: it would lie on the local disks of'
      f' {machines}; give a folder of a bucket, gs://BUCKET/RUN, or the'
      ' absolute path of a file system that all of them mount.'
    )


class Shell:
  """Prints and runs commands; with `dry_run`, only prints them."""

  def __init__(self, dry_run: bool):
    """Makes a shell.

    Args:
      dry_run: print commands only.
    """
    self.dry_run = dry_run

  def note(self, text: str) -> None:
    """Prints a comment among the commands."""
    print(f'# {text}', flush=True)

  def show(self, command: typing.Sequence[str]) -> None:
    """Prints a command as it can be typed."""
    print(f'$ {shlex.join(command)}', flush=True)

  def run(self, command: typing.Sequence[str]) -> int:
    """Prints and runs a command; returns its status (0 with dry_run)."""
    self.show(command)
    if self.dry_run:
      return 0
    try:
      return subprocess.run(command, cwd=ROOT).returncode
    except FileNotFoundError:
      raise _missing(command) from None

  def require(self, command: typing.Sequence[str]) -> None:
    """Prints and runs a command.

    Raises:
      LaunchError: the command failed; its message is on the terminal.
    """
    status = self.run(command)
    if status:
      raise LaunchError(
        f'`{shlex.join(command)}` ended with status {status}; see its output'
        ' above.'
      )

  def rehearse(self, command: typing.Sequence[str]) -> None:
    """With dry_run, runs a script in its own dry-run mode."""
    if self.dry_run:
      subprocess.run(command, cwd=ROOT, check=True)

  def ask(self, command: typing.Sequence[str]) -> tuple[int, str, str]:
    """Runs a query without printing it.

    Returns:
      Status, standard output and standard error, stripped.
    """
    try:
      done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
      raise _missing(command) from None
    return done.returncode, done.stdout.strip(), done.stderr.strip()

  def start(self, command: typing.Sequence[str]) -> subprocess.Popen:
    """Prints and starts a command whose output is one text pipe."""
    self.show(command)
    try:
      return subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors='replace',
      )
    except FileNotFoundError:
      raise _missing(command) from None

  def pack(self, path: pathlib.Path) -> str:
    """Archives the source with tar.

    With dry_run, the archive is temporary: later commands name its checksum.

    Returns:
      'CHECKSUM-SIZE', as cksum prints them.
    """

    def archive(to: str) -> list[str]:
      return ['tar', '--exclude=__pycache__', '-czf', to, *SOURCE]

    self.show(['mkdir', '-p', str(path.parent)])
    if not self.dry_run:
      (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
      self.require(archive(str(path)))
      return self._checksum(str(path))
    self.show(archive(str(path)))
    with tempfile.TemporaryDirectory() as folder:
      draft = os.path.join(folder, path.name)
      subprocess.run(archive(draft), cwd=ROOT, check=True)
      return self._checksum(draft)

  def _checksum(self, path: str) -> str:
    """Returns "CHECKSUM-SIZE" of a file."""
    status, answer, stderr = self.ask(['cksum', path])
    if status:
      raise LaunchError(f'cksum of {path} failed: {stderr}')
    return '-'.join(answer.split()[:2])


def _missing(command: typing.Sequence[str]) -> LaunchError:
  return LaunchError(
    f'{command[0]} is not on PATH; install it, or use --dry_run.'
  )
