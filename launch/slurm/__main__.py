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

Run it where sbatch is, in a checkout that all machines see. All processes
write to runs/launch/NAME/JOB.log, each line after the process number. SLURM
signals the job --notice_seconds before its time limit and at a preemption; it
saves, exits with status 75 and is requeued, as is a job that was killed.
Failures are retried --retries times in a row.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

from launch import commands

_VERBS = {
  'train': 'submit a job',
  'status': 'print the state of the job',
  'delete': 'cancel the job',
}


def _parse(argv: list[str]) -> argparse.Namespace:
  parser = commands.make_parser('slurm', __doc__)
  verbs = parser.add_subparsers(dest='verb', metavar='VERB', required=True)
  for name, what in _VERBS.items():
    verb = commands.add_verb(verbs, name, what)
    verb.add_argument('--name', required=True, help='name of the job')
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
  add('--nodes', type=int, required=True, help='number of machines')
  add('--gpus_per_node', type=int, default=8, help='0 for none; default: 8')
  add(
    '--processes_per_node',
    type=int,
    default=1,
    help="processes that share a node's GPUs; default: 1",
  )
  add('--time', required=True, help='time limit of one start, such as 24:00:00')
  add(
    '--notice_seconds',
    type=int,
    default=300,
    help='notice before the time limit; stopping takes up to two steps and a'
    ' save; default: 300',
  )
  add(
    '--sbatch_flag',
    action='append',
    default=[],
    help='another flag of sbatch, such as --sbatch_flag=--partition=gpu; may be'
    ' repeated',
  )
  add(
    '--python', default='.venv/bin/python', help='Python that has encdec_adapt'
  )
  add('--retries', type=int, default=2, help='consecutive failures; default: 2')


def _check(options: argparse.Namespace) -> None:
  """Refuses values that would fail after submission."""
  commands.check_least(
    options, 1, 'nodes', 'processes_per_node', 'notice_seconds'
  )
  commands.check_least(options, 0, 'retries')
  gpus, processes = options.gpus_per_node, options.processes_per_node
  if gpus < 0 or (gpus and gpus % processes):
    raise commands.LaunchError(
      f'--processes_per_node={processes} does not divide'
      f' --gpus_per_node={gpus}; every process needs the same number.'
    )
  # Not resolved: a virtual environment's python is a symbolic link.
  python = commands.ROOT / options.python
  if not options.dry_run and not python.is_file():
    raise commands.LaunchError(
      f'--python={options.python} does not exist; make it with `bash'
      ' launch/install.sh --platform=gpu-cuda12`, on a shared file system.'
    )


def train(options: argparse.Namespace) -> list[str]:
  """Returns the command that submits the job."""
  folder = pathlib.Path('runs') / 'launch' / options.name
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
  if options.gpus_per_node:  # Else --sbatch_flag may request GPUs.
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
