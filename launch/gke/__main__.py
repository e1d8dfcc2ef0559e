"""Training on TPU slices of a GKE cluster, as a JobSet made by xpk.

  python3 -m launch.gke create --cluster=pod --zone=us-west4-a \\
    --accelerator=v5litepod-16
  python3 -m launch.gke image --image=HOST/PROJECT/encdec_adapt:1
  python3 -m launch.gke train --name=pair --cluster=pod --zone=us-west4-a \\
    --accelerator=v5litepod-16 --image=HOST/PROJECT/encdec_adapt:1 -- \\
    --config=configs/gemma2.py:size=2b_2b,topology=v5e:4x4 \\
    --workdir=gs://BUCKET/runs/pair --config.init.encoder=gs://BUCKET/GEMMA2 \\
    --config.teacher.checkpoint=gs://BUCKET/GEMMA2 \\
    --config.data.vocabulary=gs://BUCKET/GEMMA2 \\
    --config.data.source='jsonl:/data/*.jsonl' \\
    --config.data.folder=gs://BUCKET/records
  python3 -m launch.gke logs --name=pair
  python3 -m launch.gke delete --name=pair --cluster=pod --zone=us-west4-a
  python3 -m launch.gke delete_cluster --cluster=pod --zone=us-west4-a

A pod that gets SIGTERM saves and exits with status 75, and the JobSet restarts
it on the next machines, as after SIGKILL and a hang (76), up to --max_restarts
times in all; bad input and exceptions end the job. A pod has --grace_seconds to
stop, 15 s when a spot machine is reclaimed. `stop` and `profile` send a signal
to every pod's process. launch/gke/README.md sets up the registry and the access
of pods to buckets.

Needs xpk 1.16 (pip install xpk==1.16.0), gcloud, kubectl, and docker with
buildx.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys

from launch import commands

_VERBS = {
  'create': 'create a cluster with TPU slices',
  'image': 'build the container and push it to a registry',
  'train': 'run a job on all slices, restarted after preemptions',
  'status': 'print the jobs of the cluster',
  'logs': 'follow the output of all pods',
  'stop': 'make the job save and exit (the JobSet restarts it)',
  'profile': 'make the job trace its next steps with the profiler',
  'delete': 'delete the job; the cluster stays, and costs',
  'delete_cluster': 'delete the cluster with everything in it',
}
_TIERS = ('spot', 'on_demand', 'reserved')
_SIGNALS = {'stop': 'TERM', 'profile': 'USR1'}
# Signals the process of the job, which xpk starts below a shell that forwards
# nothing but SIGTERM. The container has no pgrep.
_SEND = (
  'kill -{} "$(grep -lzx encdec_adapt[.]train /proc/[0-9]*/cmdline'
  ' | cut -d / -f 3 | sort -n | head -n 1)"'
)
# Describes the commit of the source, as encdec_adapt.telemetry does.
_GIT = 'git describe --always --dirty --abbrev=40 --exclude=*'


def _parse(argv: list[str]) -> argparse.Namespace:
  parser, verbs = commands.make_parser('gke', __doc__, _VERBS)
  for name, verb in verbs.items():
    add = verb.add_argument
    if name in ('train', 'logs', 'delete', *_SIGNALS):
      add('--name', required=True, help='name of the job')
    if name not in ('image', 'logs', *_SIGNALS):
      add('--cluster', required=True, help='name of the cluster')
      add('--zone', required=True, help='such as us-west4-a')
      add('--project', default='', help="default: gcloud's")
    if name in ('create', 'train'):
      add(
        '--accelerator',
        required=True,
        help='type of a slice, such as v5litepod-16 or tpu7x-4x4x4',
      )
      add('--slices', type=int, default=1, help='default: 1')
    if name == 'create':
      add('--tier', choices=_TIERS, default='spot', help='default: spot')
      add('--reservation', default='', help='for --tier=reserved')
      add(
        '--create_flag',
        action='append',
        default=[],
        help='another flag of `xpk cluster create`, such as'
        ' --create_flag=--enable-workload-identity; may be repeated',
      )
    if name in ('image', 'train'):
      add('--image', required=True, help='HOST/PROJECT/REPOSITORY/NAME:TAG')
    if name == 'train':
      add('--max_restarts', type=int, default=1000, help='default: 1000')
      add(
        '--grace_seconds',
        type=int,
        default=300,
        help='from SIGTERM to SIGKILL; stopping takes up to two steps and a'
        ' save; default: 300',
      )
  options = parser.parse_args(argv)
  _check(options)
  return options


def _check(options: argparse.Namespace) -> None:
  given = vars(options)
  for flag in ('name', 'cluster'):
    if flag in given:
      commands.check_name(flag, given[flag])
  if 'slices' in given:
    commands.tpu_chips(options.accelerator, extents=True)
    commands.check_least(options, 1, 'slices')
  if 'grace_seconds' in given:
    commands.check_least(options, 1, 'grace_seconds')
    commands.check_least(options, 0, 'max_restarts')
  if given.get('tier') == 'reserved' and not options.reservation:
    raise commands.LaunchError(
      '--reservation is empty; --tier=reserved needs the name of one.'
    )
  if 'image' in given and ':' not in options.image.rpartition('/')[2]:
    raise commands.LaunchError(
      f'--image={options.image} has no tag; end it in :TAG, a new one for every'
      ' build, so that restarts run the same image.'
    )


def _xpk(options: argparse.Namespace, *arguments: str) -> list[str]:
  return [
    'xpk',
    *arguments,
    f'--cluster={options.cluster}',
    f'--zone={options.zone}',
    *([f'--project={options.project}'] if options.project else []),
  ]


def _command(options: argparse.Namespace) -> list[str]:
  if options.verb == 'create':
    tier = {
      'spot': '--spot',
      'on_demand': '--on-demand',
      'reserved': f'--reservation={options.reservation}',
    }[options.tier]
    return [
      *_xpk(options, 'cluster', 'create'),
      f'--tpu-type={options.accelerator}',
      f'--num-slices={options.slices}',
      tier,
      *options.create_flag,
    ]
  if options.verb == 'image':
    return [
      *('docker', 'buildx', 'build', '--file=launch/docker/Dockerfile'),
      *('--build-arg=platform=tpu', f'--build-arg=git={options.git}'),
      *('--platform=linux/amd64', f'--tag={options.image}', '--push', '.'),
    ]
  if options.verb == 'train':
    job = ['python', '-m', 'encdec_adapt.train', '--coordinator=auto']
    return [
      *_xpk(options, 'workload', 'create'),
      f'--workload={options.name}',
      f'--tpu-type={options.accelerator}',
      f'--num-slices={options.slices}',
      f'--docker-image={options.image}',
      *(f'--env={assignment}' for assignment in options.env),
      f'--max-restarts={options.max_restarts}',
      # xpk adds 42 and 127 to 255 (killed, aborted) itself.
      f'--restart-on-exit-codes={commands.RESTART},{commands.HANG}',
      f'--termination-grace-period-seconds={options.grace_seconds}',
      # xpk wraps it into a subshell and forwards signals to that.
      f'--command=exec {shlex.join(job + options.training)}',
    ]
  if options.verb == 'logs':
    return [
      *('kubectl', 'logs', '--follow', '--prefix', '--all-containers'),
      f'--selector=xpk.google.com/workload={options.name}',
      '--max-log-requests=512',
      '--tail=-1',
    ]
  if options.verb == 'status':
    return _xpk(options, 'workload', 'list')
  if options.verb == 'delete':
    return _xpk(options, 'workload', 'delete') + [f'--workload={options.name}']
  return _xpk(options, 'cluster', 'delete')


def _signal(options: argparse.Namespace, shell: commands.Shell) -> int:
  listing = [
    *('kubectl', 'get', 'pods', '--output=name'),
    f'--selector=xpk.google.com/workload={options.name}',
    '--field-selector=status.phase=Running',
  ]
  send = ['sh', '-c', _SEND.format(_SIGNALS[options.verb])]
  shell.show(listing)
  if shell.dry_run:
    shell.show(['kubectl', 'exec', 'POD', '--', *send])
    return 0
  status, pods, stderr = shell.ask(listing)
  if status or not pods:
    raise commands.LaunchError(
      f'no pod of {options.name} is running'
      f' ({stderr or "see the verb status"}).'
    )
  # In sequence, hosts of a large slice would trace different steps.
  sent = [
    shell.start(['kubectl', 'exec', pod, '--', *send]) for pod in pods.split()
  ]
  for process in sent:
    print(process.communicate()[0], end='')
  return max(process.returncode for process in sent)


def _act(options: argparse.Namespace, shell: commands.Shell) -> int:
  if options.verb in _SIGNALS:
    return _signal(options, shell)
  if options.verb == 'image':
    # A downloaded archive has no history, and this machine perhaps no git.
    has_git = shutil.which('git') is not None
    status, answer, _ = shell.ask(_GIT.split()) if has_git else (1, '', '')
    options.git = '' if status else answer
  if options.verb == 'train':
    commands.check_shared_workdir(options.training, 'the pods')
    commands.check_topology(
      options.training,
      *commands.tpu_chips(options.accelerator, extents=True),
      options.slices,
      f'--accelerator={options.accelerator} --slices={options.slices}',
    )
  shell.require(_command(options))
  return 0


if __name__ == '__main__':
  sys.exit(commands.main(_parse, _act, sys.argv[1:]))
