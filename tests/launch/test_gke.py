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
    ' --reservation=r --create_flag=--enable-workload-identity',
    f'xpk cluster create {CLUSTER} --project=p --tpu-type=v5p-64'
    ' --num-slices=2 --reservation=r --enable-workload-identity',
  ),
  'image': (
    IMAGE,
    'docker buildx build --file=launch/docker/Dockerfile'
    ' --build-arg=platform=tpu --build-arg=git=abc-dirty --platform=linux/amd64'
    ' --tag=europe-docker.pkg.dev/p/r/encdec_adapt:1 --push .',
  ),
  'train': (
    f'--name=pair {CLUSTER} --accelerator=tpu7x-4x4x4 {IMAGE}'
    " --grace_seconds=600 --env A=1 --env 'B=x y' "
    + shlex.join([*cloud_lib.JOB, '--config=gemma2:topology=tpu7x:4x4x4']),
    f'xpk workload create {CLUSTER} --workload=pair --tpu-type=tpu7x-4x4x4'
    ' --num-slices=1 --docker-image=europe-docker.pkg.dev/p/r/encdec_adapt:1'
    " --env=A=1 '--env=B=x y'"
    ' --max-restarts=1000 --restart-on-exit-codes=75,76'
    ' --termination-grace-period-seconds=600 '
    + shlex.quote(
      '--command=exec python -m encdec_adapt.train --coordinator=auto '
      + shlex.join([*cloud_lib.JOB[1:], '--config=gemma2:topology=tpu7x:4x4x4'])
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
  cloud.put('git', 'echo abc-dirty')
  done = cloud.launch('gke', verb, '--dry_run', *shlex.split(flags))
  assert done.stdout == f'$ {command}\n' and cloud.calls() == []
  cloud.launch('gke', verb, *shlex.split(flags))
  assert cloud.calls() == [shlex.split(command)]


@pytest.mark.parametrize(
  'verb, signal', [('stop', 'TERM'), ('profile', 'USR1')]
)
def test_every_pod_gets_the_signal(cloud, verb, signal):
  pods = ['pod/pair-0', 'pod/pair-1']
  cloud.put(
    'kubectl',
    f'[ $1 = get ] && echo {" ".join(pods)} || echo "$@" >>"$FAKE_CLOUD/sent"',
  )
  done = cloud.launch('gke', verb, '--name=pair', '--dry_run')
  assert 'workload=pair' in done.stdout and f'kill -{signal}' in done.stdout
  assert not (cloud.folder / 'sent').exists()
  cloud.launch('gke', verb, '--name=pair')
  sent = sorted((cloud.folder / 'sent').read_text().splitlines())
  assert [line.split()[1] for line in sent] == pods
  assert all(f' -- sh -c kill -{signal} ' in line for line in sent)
  cloud.put('kubectl', 'exit 0')
  done = cloud.launch('gke', verb, '--name=pair', status=2)
  assert 'no pod of pair is running' in done.stderr
