"""What the launchers share: flags, errors, commands shown and run."""

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
# What a machine needs that runs jobs.
SOURCE = ('setup.py', 'pyproject.toml', 'encdec_adapt', 'configs', 'launch')
# Statuses of a job; encdec_adapt.cli.app owns them, and a test holds them
# equal.
USER_ERROR = 2
RESTART = 75
HANG = 76
# Accelerator types of Google Cloud begin so: the chip's name in a topology, and
# how many the type's number counts for each of them.
TPUS = {
  'v4': ('v4', 2),
  'v5litepod': ('v5e', 1),
  'v5p': ('v5p', 2),
  'v6e': ('v6e', 1),
}
# What the launchers tell a job themselves.
_OURS = ('coordinator', 'processes', 'process')
# Names go into names of machines, pods and folders. GKE's limit is the
# shortest: a name is the start of a pod's, of 63 characters in all.
_NAME = re.compile(r'[a-z]([-a-z0-9]{0,28}[a-z0-9])?')


class LaunchError(Exception):
  """Said to the user in one paragraph; nothing has been created for it."""


class _Parser(argparse.ArgumentParser):
  """Flags of one spelling, whose errors end in one line."""

  def __init__(self, **options):
    options.setdefault('allow_abbrev', False)
    options.setdefault('formatter_class', argparse.RawDescriptionHelpFormatter)
    super().__init__(**options)

  def error(self, message: str) -> typing.NoReturn:
    raise LaunchError(f'{message}; see {self.prog} --help')


def make_parser(module: str, description: str) -> argparse.ArgumentParser:
  """A parser of flags and of verbs, which are added with `add_verb`.

  Args:
    module: as in `python3 -m launch.MODULE`.
    description: shown by --help.
  """
  return _Parser(prog=f'python3 -m launch.{module}', description=description)


def add_verb(verbs, name: str, what: str) -> argparse.ArgumentParser:
  """A verb with the flags that every verb has.

  Args:
    verbs: from `parser.add_subparsers`.
    name: of the verb.
    what: it does, for --help.
  """
  verb = verbs.add_parser(name, help=what, description=what)
  verb.add_argument(
    '--dry_run', action='store_true', help='print every command, run none'
  )
  return verb


def main(
  parse: typing.Callable[[list[str]], argparse.Namespace],
  act: typing.Callable[[argparse.Namespace, Shell], int],
  argv: list[str],
) -> int:
  """Frame of a launcher.

  Args:
    parse: reads the flags before `--` and checks them.
    act: gets what `parse` returned, `training` (what came after `--`) in it.
    argv: of the process, without its name.

  Returns:
    Exit status; `USER_ERROR` for bad input.
  """
  own, training = _split(argv)
  try:
    options = parse(own)
    if hasattr(options, 'training'):
      check_training(training)
      for caution in cautions(training):
        print(f'Warning: {caution}', file=sys.stderr)
      options.training = training
    elif training:
      raise LaunchError(
        f'{shlex.join(training)} after -- is for a training job; this verb'
        ' starts none.'
      )
    return act(options, Shell(options.dry_run))
  except LaunchError as error:
    print(f'Error: {error}', file=sys.stderr)
    return USER_ERROR
  except KeyboardInterrupt:
    print('\nInterrupted here; what runs elsewhere goes on.', file=sys.stderr)
    return 130


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
  """Arguments before the first `--`, and those after it."""
  if '--' not in argv:
    return argv, []
  at = argv.index('--')
  return argv[:at], argv[at + 1 :]


def check_name(flag: str, name: str) -> None:
  """Refuses a name that some machine, pod or folder cannot have."""
  if not _NAME.fullmatch(name):
    raise LaunchError(
      f'--{flag}={name}: give 1 to 30 small letters, digits and hyphens,'
      ' beginning with a letter and not ending with a hyphen.'
    )


def check_zone(zone: str) -> None:
  """Refuses what is no zone of Google Cloud, such as a region."""
  if not re.fullmatch('[a-z]+-[a-z]+[0-9]+-[a-z]', zone):
    raise LaunchError(
      f'--zone={zone}: give a zone, as us-west4-a; `gcloud compute tpus'
      ' locations list` prints those with TPUs.'
    )


def check_least(options: argparse.Namespace, least: float, *names: str) -> None:
  """Refuses flags whose number is below a least one, or is none."""
  for name in names:
    value = getattr(options, name)
    if not (math.isfinite(value) and value >= least):
      raise LaunchError(f'--{name}={value}: give {least} or more.')


def tpu_chips(accelerator: str, *, extents: bool = False) -> tuple[str, int]:
  """The chips of a TPU slice.

  Args:
    accelerator: its type, as v5litepod-16.
    extents: the type may end in them, as v5litepod-4x4, which counts chips.

  Returns:
    Their name in a topology, and how many there are.

  Raises:
    LaunchError: there is no such type.
  """
  kind, _, number = accelerator.partition('-')
  name, count = TPUS.get(kind, ('', 1))
  if name and re.fullmatch('[1-9][0-9]*', number):
    return name, int(number) // count
  if name and extents and re.fullmatch('[1-9][0-9]*(x[1-9][0-9]*)+', number):
    return name, math.prod(map(int, number.split('x')))
  near = {'v5e': 'v5litepod', 'v5lite': 'v5litepod', 'v6': 'v6e'}.get(kind)
  raise LaunchError(
    f'--accelerator={accelerator} is not known;'
    + (f' say {near}-{number}.' if near else '')
    + f' Give KIND-NUMBER, as v5litepod-16, with KIND of {list(TPUS)}.'
    ' The number counts chips (v5litepod, v6e) or cores, two to a chip'
    ' (v4, v5p).'
  )


def flag_values(arguments: list[str]) -> dict[str, str]:
  """Flags of the form --name=value, by name."""
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
  for name in _OURS:
    if name in flags:
      raise LaunchError(
        f'--{name}={flags[name]} after --: processes are numbered by the'
        ' launcher; leave it out.'
      )
  config = flags['config'].partition(':')[0]
  if pathlib.PurePath(config).is_absolute() or not (ROOT / config).is_file():
    raise LaunchError(
      f'--config={flags["config"]} after --: {config} is not a file of this'
      ' repository, which is what the machines get; put it under configs/.'
    )


def cautions(arguments: list[str]) -> list[str]:
  """What is allowed in flags of encdec_adapt.train, and rarely meant."""
  config = flag_values(arguments)['config']
  path, _, given = config.partition(':')
  if path != 'configs/gemma2.py' or re.search(r'\btopology=', given):
    return []
  return [
    f'--config={config} names no topology: the whole batch, 4.2M tokens, is'
    ' one microbatch, and no attention kernel is chosen. Say which chips it is'
    f' to be spread over, as in {path}:{given or "size=2b_2b"},topology=v5e:4x4'
  ]


def check_topology(
  training: list[str], kind: str, chips: int, slices: int, asked: str
) -> None:
  """Refuses a configuration that is of other chips than are asked for.

  Args:
    training: flags of encdec_adapt.train.
    kind: of the chips, as in a topology; '' for GPUs of any.
    chips: of a slice.
    slices: how many.
    asked: the flags that ask for them, for the message.
  """
  config = flag_values(training)['config']
  found = re.search(r'\btopology=([^,]+)', config)
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
      f'--config={config} is of {many} x {size} {wanted} chips; {asked} are'
      f' {slices} x {chips} {f"of {kind}" if kind else "GPUs"}. Change either.'
    )


def check_shared_workdir(arguments: list[str], machines: str) -> None:
  """Refuses a work directory that goes with a machine.

  Args:
    arguments: of encdec_adapt.train.
    machines: that would keep it, for the message.
  """
  workdir = flag_values(arguments)['workdir']
  if not re.match('/|gs://[^/]+/[^/]', workdir):
    raise LaunchError(
      f'--workdir={workdir} after --: it would lie on the disks of {machines},'
      ' each its own, and go with them; give a folder of a bucket,'
      ' gs://BUCKET/RUN, or the absolute path of a file system that all of'
      ' them mount.'
    )


class Shell:
  """Shows commands and runs them; with `dry_run`, only shows them."""

  def __init__(self, dry_run: bool):
    """Nothing is run yet."""
    self.dry_run = dry_run

  def note(self, text: str) -> None:
    """Says what is going on, as a comment among the commands."""
    print(f'# {text}', flush=True)

  def show(self, command: typing.Sequence[str]) -> None:
    """Prints a command as one could type it."""
    print(f'$ {shlex.join(command)}', flush=True)

  def run(self, command: typing.Sequence[str]) -> int:
    """Shows and runs a command; returns its status (0 with dry_run)."""
    self.show(command)
    if self.dry_run:
      return 0
    try:
      return subprocess.run(command, cwd=ROOT).returncode
    except FileNotFoundError:
      raise _missing(command) from None

  def require(self, command: typing.Sequence[str]) -> None:
    """Shows and runs a command that must succeed.

    Raises:
      LaunchError: it did not; its own message is on the terminal.
    """
    status = self.run(command)
    if status:
      raise LaunchError(
        f'`{shlex.join(command)}` ended with status {status}; what it said is'
        ' above. Nothing was done after it.'
      )

  def rehearse(self, command: typing.Sequence[str]) -> None:
    """With dry_run, runs a script that only prints what it would run."""
    if self.dry_run:
      subprocess.run(command, cwd=ROOT, check=True)

  def ask(self, command: typing.Sequence[str]) -> tuple[int, str, str]:
    """Runs a command that only looks, without showing it.

    Returns:
      Status, standard output and standard error, stripped.
    """
    try:
      done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
      raise _missing(command) from None
    return done.returncode, done.stdout.strip(), done.stderr.strip()

  def start(self, command: typing.Sequence[str]) -> subprocess.Popen:
    """Shows and starts a command whose output, all of it, is a text pipe."""
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
    """Writes the source to an archive, by the command that it shows.

    With dry_run, the archive is made elsewhere and deleted: other commands
    name its checksum.

    Returns:
      Its checksum and size, as cksum prints them, with a hyphen between.
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
    """Checksum and size of a file, with a hyphen between."""
    status, answer, complaint = self.ask(['cksum', path])
    if status:
      raise LaunchError(f'cksum of {path} failed: {complaint}')
    return '-'.join(answer.split()[:2])


def _missing(command: typing.Sequence[str]) -> LaunchError:
  return LaunchError(
    f'{command[0]} is not on PATH; install it, or run with --dry_run to see'
    ' what would be run.'
  )
