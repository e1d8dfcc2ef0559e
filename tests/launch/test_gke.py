"""Commands of GKE; `tool_flags.json` has the flags that xpk 1.16 knows."""

import shlex

import pytest

from tests.launch import cloud as cloud_lib

CLUSTER = '--cluster=pod --zone=us-west4-a'
IMAGE = '--image=europe-docker.pkg.dev/p/r/encdec_adapt:1'
# Verb -> flags and the command that is run.
COMMANDS = {
  'create': (
    f'{CLUSTER} --accelerator=v5p-64 --slices=2 --project=p --tier=reserved'
    ' --reservation=r',
    f'xpk cluster create {CLUSTER} --project=p --tpu-type=v5p-64'
    ' --num-slices=2 --reservation=r',
  ),
  'image': (
    IMAGE,
    'docker buildx build --file=launch/docker/Dockerfile'
    ' --build-arg=platform=tpu --platform=linux/amd64'
    ' --tag=europe-docker.pkg.dev/p/r/encdec_adapt:1 --push .',
  ),
  'train': (
    f'--name=pair {CLUSTER} --accelerator=v6e-16 {IMAGE} --grace_seconds=600 '
    + shlex.join(cloud_lib.JOB),
    f'xpk workload create {CLUSTER} --workload=pair --tpu-type=v6e-16'
    ' --num-slices=1 --docker-image=europe-docker.pkg.dev/p/r/encdec_adapt:1'
    ' --max-restarts=1000 --restart-on-exit-codes=75,76'
    ' --termination-grace-period-seconds=600 '
    + shlex.quote(
      '--command=exec python -m encdec_adapt.train --coordinator=auto '
      + shlex.join(cloud_lib.JOB[1:])
    ),
  ),
  'status': (CLUSTER, f'xpk workload list {CLUSTER}'),
  'logs': (
    '--name=pair',
    'kubectl logs --follow --prefix --all-containers'
    ' --selector=xpk.google.com/workload=pair --max-log-requests=512 --tail=-1',
  ),
  'delete': (
    f'--name=pair {CLUSTER}',
    f'xpk workload delete {CLUSTER} --workload=pair',
  ),
  'delete_cluster': (CLUSTER, f'xpk cluster delete {CLUSTER}'),
}


@pytest.mark.parametrize('verb', COMMANDS)
def test_dry_run_prints_what_is_run(cloud, verb):
  flags, command = COMMANDS[verb]
  done = cloud.launch('gke', verb, '--dry_run', *shlex.split(flags))
  assert done.stdout == f'$ {command}\n' and cloud.calls() == []
  cloud.launch('gke', verb, *shlex.split(flags))
  assert cloud.calls() == [shlex.split(command)]
