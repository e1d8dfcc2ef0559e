"""Training on a GPU cluster under SLURM.

  bash launch/install.sh --platform=gpu-cuda13
  python3 -m launch.slurm train --name=pair --nodes=2 --gpus_per_node=8 \\
    --time=24:00:00 -- \\
    --config=configs/gemma2.py:size=2b_2b,topology=h100:16 \\
    --workdir=/shared/runs/pair --config.init.encoder=/shared/GEMMA2 \\
    --config.teacher.checkpoint=/shared/GEMMA2 \\
    --config.data.vocabulary=/shared/GEMMA2 \\
    --config.data.source='jsonl:/shared/data/*.jsonl'
  python3 -m launch.slurm status --name=pair
  python3 -m launch.slurm delete --name=pair

Run it where sbatch is, in a checkout that all machines see. With
--container_image (pyxis, such as the image of launch/docker for gpu-cuda13) the
processes run in it, and only the batch script outside. All processes
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
  'logs': "follow the output of the job's latest submission",
  'stop': 'make the job save and exit (SLURM requeues it)',
  'profile': 'make the job trace its next steps with the profiler',
  'delete': 'cancel the job',
}
_SIGNALS = {'stop': 'TERM', 'profile': 'USR1'}


def _parse(argv: list[str]) -> argparse.Namespace:
  parser, verbs = commands.make_parser('slurm', __doc__, _VERBS)
  for verb in verbs.values():
    verb.add_argument('--name', required=True, help='name of the job')
  _add_request(verbs['train'])
  options = parser.parse_args(argv)
  commands.check_name('name', options.name)
  if options.verb == 'train':
    _check(options)
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
  add('--cpus_per_process', type=int, help='CPU cores of a process')
  add(
    '--memory', help="of a machine, such as 200G; 0 for all; default: SLURM's"
  )
  add(
    '--container_image',
    help='image that pyxis starts the processes in: HOST#PATH:TAG, or a file of'
    ' enroot',
  )
  add(
    '--container_mounts',
    help='HOST_FOLDER:FOLDER,.. in the container, such as /shared:/shared',
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
    '--python',
    help='Python that has encdec_adapt; default: .venv/bin/python, in a'
    ' container python',
  )
  add('--retries', type=int, default=2, help='consecutive failures; default: 2')


def _check(options: argparse.Namespace) -> None:
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
  if options.cpus_per_process is not None:
    commands.check_least(options, 1, 'cpus_per_process')
  if options.container_mounts and not options.container_image:
    raise commands.LaunchError(
      f'--container_mounts={options.container_mounts} needs --container_image.'
    )
  if options.container_image:
    options.python = options.python or 'python'
    return
  options.python = options.python or '.venv/bin/python'
  # Not resolved: a virtual environment's python is a symbolic link.
  python = commands.ROOT / options.python
  if not options.dry_run and not python.is_file():
    raise commands.LaunchError(
      f'--python={options.python} does not exist; make it with `bash'
      ' launch/install.sh --platform=gpu-cuda13`, on a shared file system.'
    )


def _folder(options: argparse.Namespace) -> pathlib.Path:
  return pathlib.Path('runs') / 'launch' / options.name


def _step_flags(options: argparse.Namespace) -> list[str]:
  names = [assignment.partition('=')[0] for assignment in options.env]
  values = {
    # Since SLURM 22.05 srun no longer takes this from the job.
    'cpus-per-task': options.cpus_per_process,
    'container-image': options.container_image,
    'container-mounts': options.container_mounts,
    # pyxis would keep the image's value of a variable that both set.
    'container-env': ','.join(names) if options.container_image else '',
  }
  return [f'--{name}={value}' for name, value in values.items() if value]


def train(options: argparse.Namespace) -> list[str]:
  """Returns the command that submits the job."""
  folder = _folder(options)
  gpus = []
  if options.gpus_per_node:
    gpus.append(f'--gpus-per-node={options.gpus_per_node}')
    if options.processes_per_node > 1:
      share = options.gpus_per_node // options.processes_per_node
      gpus.append(f'--gpus-per-task={share}')
  cpus, memory = options.cpus_per_process, options.memory
  return [
    # A job gets the environment in which it is submitted.
    *(['env', *options.env] if options.env else []),
    'sbatch',
    f'--job-name={options.name}',
    f'--nodes={options.nodes}',
    f'--ntasks-per-node={options.processes_per_node}',
    *gpus,
    *([f'--cpus-per-task={cpus}'] if cpus else []),
    *([f'--mem={memory}'] if memory else []),
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
    *_step_flags(options),
    '--',
    *options.training,
  ]


def _follow(options: argparse.Namespace, shell: commands.Shell) -> int:
  folder = commands.ROOT / _folder(options)
  logs = folder.glob('*.log')
  latest = max(logs, key=lambda log: log.stat().st_mtime, default=None)
  if latest is None and shell.dry_run:
    latest = folder / 'JOB.log'
  elif latest is None:
    raise commands.LaunchError(
      f'{_folder(options)} has no log yet; the verb status says whether'
      f' {options.name} waits in the queue.'
    )
  path = latest.relative_to(commands.ROOT)
  return shell.run(['tail', '--lines=+1', '--follow=name', str(path)])


def _act(options: argparse.Namespace, shell: commands.Shell) -> int:
  if options.verb == 'status':
    return shell.run(['squeue', '--me', f'--name={options.name}'])
  if options.verb == 'delete':
    return shell.run(['scancel', '--me', f'--name={options.name}'])
  if options.verb in _SIGNALS:
    # Signals the processes of running jobs, not the batch script.
    signal = f'--signal={_SIGNALS[options.verb]}'
    mine = ['scancel', '--me', f'--name={options.name}', '--state=RUNNING']
    return shell.run([*mine, signal])
  if options.verb == 'logs':
    return _follow(options, shell)
  commands.check_shared_workdir(options.training, 'the machines')
  if options.gpus_per_node:  # Otherwise --sbatch_flag may request GPUs.
    commands.check_topology(
      options.training,
      '',
      options.nodes * options.gpus_per_node,
      1,
      f'--nodes={options.nodes} --gpus_per_node={options.gpus_per_node}',
    )
  shell.require(['mkdir', '-p', str(_folder(options))])
  shell.require(train(options))
  return 0


if __name__ == '__main__':
  sys.exit(commands.main(_parse, _act, sys.argv[1:]))
