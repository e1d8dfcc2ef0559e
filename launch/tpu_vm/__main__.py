"""Training on Cloud TPU VMs, by queued resources.

  python3 -m launch.tpu_vm train --name=pair --zone=us-west4-a \\
    --accelerator=v5litepod-16 --records=gs://BUCKET/records -- \\
    --config=configs/gemma2.py:size=2b_2b,topology=v5e:4x4 \\
    --workdir=gs://BUCKET/runs/pair --config.init.encoder=gs://BUCKET/GEMMA2 \\
    --config.teacher.checkpoint=gs://BUCKET/GEMMA2 \\
    --config.data.vocabulary=gs://BUCKET/GEMMA2 \\
    --config.data.source='jsonl:/data/*.jsonl' --config.data.folder=records
  python3 -m launch.tpu_vm delete --name=pair --zone=us-west4-a

`train` creates the resource unless it exists, waits for it, copies this source
to every worker, installs launch/locks/tpu.txt, runs the job on all of them and
prints their lines as [slice.worker] line, also into runs/launch/NAME/log.txt. A
preempted resource is deleted and created again, and the job resumes from its
work directory. Interrupting the launcher does not touch the job: the same
command shows it again. `create`, `setup`, `status`, `stop`, `profile` and
`delete` do one thing each.

Needs gcloud, logged in, and a key for SSH in an agent:
  eval "$(ssh-agent)" && ssh-add ~/.ssh/google_compute_engine
"""

from __future__ import annotations

import argparse
import dataclasses
import posixpath
import sys

from launch import commands
from launch.tpu_vm import job as job_lib
from launch.tpu_vm import resource as resource_lib

# Folder of the records on every worker, below the job's (worker.sh).
_RECORDS = 'records'
_VERBS = {
  'create': 'create the resource, and wait until it is active',
  'setup': 'copy the source to all workers, and install',
  'train': 'create, set up and run; again after preemptions',
  'status': "print the resource's state",
  'stop': 'make the job save and exit (its launcher restarts it)',
  'profile': 'make the job trace its next steps with the profiler',
  'delete': 'delete the resource and its machines; nothing else stops costs',
}


def _parse(argv: list[str]) -> argparse.Namespace:
  parser, verbs = commands.make_parser('tpu_vm', __doc__, _VERBS)
  for name, verb in verbs.items():
    verb.add_argument('--name', required=True, help='name of the resource')
    verb.add_argument('--zone', required=True, help='such as us-west4-a')
    verb.add_argument('--project', default='', help="default: gcloud's")
    verb.add_argument('--slices', type=int, default=1, help='default: 1')
    verb.add_argument(
      '--route',
      choices=resource_lib.ROUTES,
      default='external',
      help='how to reach workers: external addresses (default), internal, iap',
    )
    if name in ('create', 'train'):
      _add_creation(verb)
    if name in ('setup', 'train'):
      verb.add_argument(
        '--records',
        default='',
        help='gs:// folder, copied to every worker as the folder records'
        ' (--config.data.folder=records) with checksums compared',
      )
    if name in ('create', 'setup', 'train'):
      verb.add_argument(
        '--data_disk',
        default='',
        help='instead of --records: disk whose ext4 file system, labeled'
        ' records, every worker mounts as that folder; such as'
        ' source=projects/PROJECT/zones/ZONE/disks/DISK,mode=read-only',
      )
  _add_restarts(verbs['train'])
  options = parser.parse_args(argv)
  _resource(options).check()
  commands.check_least(options, 1, 'slices')
  records = getattr(options, 'records', '')
  if records and not records.startswith('gs://'):
    raise commands.LaunchError(
      f'--records={records}: give a folder of a bucket, gs://BUCKET/FOLDER.'
    )
  if records and options.data_disk:
    raise commands.LaunchError(
      f'--records={records} and --data_disk={options.data_disk}: give one of'
      ' them.'
    )
  if options.verb == 'train':
    commands.check_least(options, 0, 'max_restarts', 'retries')
    commands.check_least(options, 0, 'grace_seconds')
    commands.check_least(options, 0.01, 'poll_seconds')
  return options


def _add_creation(verb: argparse.ArgumentParser) -> None:
  add = verb.add_argument
  add(
    '--accelerator', required=True, help='type of a slice, such as v5litepod-16'
  )
  add(
    '--tier',
    choices=resource_lib.TIERS,
    default='spot',
    help='default: spot, which may be preempted at any time',
  )
  add('--runtime', default='', help='software version; default: by accelerator')
  add('--service_account', default='', help='account of the machines')
  add(
    '--create_flag',
    action='append',
    default=[],
    help='another flag of `gcloud compute tpus queued-resources create`, such'
    ' as --create_flag=--network=NAME; may be repeated',
  )


def _add_restarts(verb: argparse.ArgumentParser) -> None:
  add = verb.add_argument
  add('--max_restarts', type=int, default=1000, help='restarts; default: 1000')
  add('--retries', type=int, default=2, help='consecutive failures; default: 2')
  add(
    '--delete_when_done',
    action='store_true',
    help='delete the resource after success',
  )
  add('--poll_seconds', type=float, default=60.0, help='default: 60')
  add('--grace_seconds', type=float, default=120.0, help='default: 120')


def _resource(options: argparse.Namespace) -> resource_lib.Resource:
  names = {field.name for field in dataclasses.fields(resource_lib.Resource)}
  given = vars(options)
  return resource_lib.Resource(**{k: given[k] for k in names & given.keys()})


def _act(options: argparse.Namespace, shell: commands.Shell) -> int:
  resource = _resource(options)
  records = getattr(options, 'records', '')
  job = job_lib.Job(
    resource,
    shell,
    records=job_lib.DISK if resource.data_disk else records,
    poll_seconds=getattr(options, 'poll_seconds', 60.0),
    grace_seconds=getattr(options, 'grace_seconds', 120.0),
  )
  if options.verb == 'create':
    job.bring_up()
    return 0
  if options.verb == 'setup':
    return job.set_up()
  if options.verb == 'train':
    return _train(options, job)
  if options.verb in ('stop', 'profile'):
    return job.on_workers(options.verb)
  command = {'status': resource.explain(), 'delete': resource.delete()}
  return shell.run(command[options.verb])


def _check_records(options: argparse.Namespace) -> None:
  folder = commands.flag_values(options.training).get('config.data.folder', '')
  there = posixpath.normpath(folder) == _RECORDS
  flag = 'data_disk' if options.data_disk else 'records'
  given = getattr(options, flag)
  if given and not there:
    raise commands.LaunchError(
      f'--{flag}={given} becomes the folder {_RECORDS} of every worker; give'
      f' --config.data.folder={_RECORDS} after --, or leave --{flag} out.'
    )
  if there and not given:
    raise commands.LaunchError(
      f'--config.data.folder={folder} after --: no worker has that folder;'
      ' give --records=gs://BUCKET/FOLDER or --data_disk before --, or'
      ' --config.data.folder=gs://BUCKET/FOLDER.'
    )


def _train(options: argparse.Namespace, job: job_lib.Job) -> int:
  commands.check_shared_workdir(options.training, 'the workers')
  _check_records(options)
  job.resource.check_topology(options.training)
  status = job.train(
    [*options.env, *options.training],
    max_restarts=options.max_restarts,
    retries=options.retries,
  )
  if options.delete_when_done and status == 0:
    job.take_down()
  elif not job.shell.dry_run:
    job.shell.note('the machines still exist and cost; to delete them:')
    job.shell.show(job.resource.delete())
  return status


if __name__ == '__main__':
  sys.exit(commands.main(_parse, _act, sys.argv[1:]))
