"""Training on a GPU cluster under SLURM.

  bash launch/install.sh --platform=gpu-cuda12
  python3 -m launch.slurm train --name=pair --nodes=2 --gpus_per_node=8 \\
    --time=24:00:00 -- \\
    --config=configs/gemma2.py:size=2b_2b,topology=h100:16 \\
    --workdir=/shared/runs/pair --config.init.encoder=/shared/GEMMA2 \\
    --config.teacher.checkpoint=/shared/GEMMA2 \\
    --config.data.vocabulary=/shared/GEMMA2 \\
    --config.data.source='jsonl:/shared/data/*.jsonl'
  python3 -m launch.slurm status --name=pair
  python3 -m launch.slurm delete --name=pair

Run from a checkout that all machines see, on one where sbatch is. The lines
of all processes go to runs/launch/NAME/JOB.log, after the process' number. The
job is told to stop --notice_seconds before its time is over, and when it is
preempted, with what notice the cluster gives then: it saves, ends with status
75, and is put back in line to continue; so is one that was killed. Failures
are tried --retries times in a row.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys

from launch import commands

_VERBS = {
  'train': 'put a job in line',
  'status': 'print where the job is',
  'delete': 'end the job for good',
}


def _parse(argv: list[str]) -> argparse.Namespace:
  parser = commands.make_parser('slurm', __doc__)
  verbs = parser.add_subparsers(dest='verb', metavar='VERB', required=True)
  for name, what in _VERBS.items():
    verb = commands.add_verb(verbs, name, what)
    verb.add_argument('--name', required=True, help='of the job')
    if name == 'train':
      _add_request(verb)
  options = parser.parse_args(argv)
  commands.check_name('name', options.name)
  if options.verb == 'train':
    _check(options)
    options.training = []
  return options


def _add_request(verb: argparse.ArgumentParser) -> None:
  add = verb.add_argument
  add('--nodes', type=int, required=True, help='machines')
  add('--gpus_per_node', type=int, default=8, help='0 for none; default: 8')
  add(
    '--processes_per_node',
    type=int,
    default=1,
    help='which share its GPUs; default: 1, which uses all of them',
  )
  add('--time', required=True, help='as 24:00:00; one start takes no longer')
  add(
    '--notice_seconds',
    type=int,
    default=300,
    help='before the end of that time the job is told to stop, for up to two'
    ' steps and a save; default: 300',
  )
  add('--partition', default='', help="default: the cluster's")
  add('--account', default='', help="default: the cluster's")
  add('--qos', default='', help="default: the cluster's")
  add(
    '--sbatch_flag',
    action='append',
    default=[],
    help='any other flag of sbatch, as --sbatch_flag=--mem=0; repeat it',
  )
  add('--python', default='.venv/bin/python', help='has encdec_adapt')
  add('--retries', type=int, default=2, help='in a row, of failures; 2')


def _check(options: argparse.Namespace) -> None:
  """Refuses what would fail in line."""
  commands.check_least(
    options, 1, 'nodes', 'processes_per_node', 'notice_seconds'
  )
  commands.check_least(options, 0, 'retries')
  gpus, processes = options.gpus_per_node, options.processes_per_node
  if gpus < 0 or (gpus and gpus % processes):
    raise commands.LaunchError(
      f'--processes_per_node={processes} does not divide'
      f' --gpus_per_node={gpus}; give each process as many GPUs.'
    )
  limit = limit_seconds(options.time)
  if limit and limit <= options.notice_seconds:
    raise commands.LaunchError(
      f'--time={options.time} is over in {limit} s, and'
      f' --notice_seconds={options.notice_seconds} before that the job would be'
      ' told to stop, at its beginning. Give more time, or less notice.'
    )
  # A path through a link is kept, a virtual environment's python being one.
  python = commands.ROOT / options.python
  if not options.dry_run and not python.is_file():
    raise commands.LaunchError(
      f'--python={options.python} is not there; make it with `bash'
      ' launch/install.sh --platform=gpu-cuda12`, on a file system that all'
      ' machines see.'
    )


def limit_seconds(time: str) -> int:
  """Seconds of a limit as sbatch takes it; 0 for none, or another form.

  Args:
    time: minutes, minutes:seconds, hours:minutes:seconds, days-hours,
      days-hours:minutes or days-hours:minutes:seconds (sbatch's manual page).
  """
  found = re.fullmatch(r'(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?', time)
  if not found:
    return 0
  days, first, second, third = (int(part or 0) for part in found.groups())
  if found[1] or found[4]:
    return ((days * 24 + first) * 60 + second) * 60 + third
  return first * 60 + second


def train(options: argparse.Namespace) -> list[str]:
  """The command that puts the job in line."""
  folder = pathlib.Path('runs') / 'launch' / options.name
  given = {
    'partition': options.partition,
    'account': options.account,
    'qos': options.qos,
  }
  gpus = []
  if options.gpus_per_node:
    gpus.append(f'--gpus-per-node={options.gpus_per_node}')
    if options.processes_per_node > 1:
      share = options.gpus_per_node // options.processes_per_node
      gpus.append(f'--gpus-per-task={share}')
  return [
    'sbatch',
    f'--job-name={options.name}',
    f'--nodes={options.nodes}',
    f'--ntasks-per-node={options.processes_per_node}',
    *gpus,
    f'--time={options.time}',
    *(f'--{flag}={value}' for flag, value in given.items() if value),
    '--requeue',
    f'--signal=TERM@{options.notice_seconds}',
    '--open-mode=append',
    f'--output={folder}/%j.log',
    *options.sbatch_flag,
    'launch/slurm/job.sh',
    options.python,
    str(options.retries),
    str(options.notice_seconds),
    str(folder),
    *options.training,
  ]


def _act(options: argparse.Namespace, shell: commands.Shell) -> int:
  if options.verb == 'status':
    return shell.run(['squeue', '--me', f'--name={options.name}'])
  if options.verb == 'delete':
    return shell.run(['scancel', '--me', f'--name={options.name}'])
  commands.check_shared_workdir(options.training, 'the machines')
  if options.gpus_per_node:  # Otherwise --sbatch_flag may ask for some.
    commands.check_topology(
      options.training,
      '',
      options.nodes * options.gpus_per_node,
      1,
      f'--nodes={options.nodes} --gpus_per_node={options.gpus_per_node}',
    )
  shell.require(['mkdir', '-p', f'runs/launch/{options.name}'])
  shell.require(train(options))
  return 0


if __name__ == '__main__':
  sys.exit(commands.main(_parse, _act, sys.argv[1:]))
