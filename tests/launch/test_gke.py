"""Commands of GKE, which xpk's own parser accepts.

The parser needs xpk in an environment of its own, whose dependencies differ
from ours: XPK_PYTHON=/path/to/its/python.
"""

import json
import os
import shlex
import subprocess

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


_PARSE = """
import argparse, json, sys
from xpk.parser import core
parser = argparse.ArgumentParser(prog='xpk')
core.set_parser(parser=parser)
found = vars(parser.parse_args(sys.argv[1:]))
print(json.dumps({k: v for k, v in found.items() if k != 'func'}, default=str))
"""


@pytest.mark.slow
def test_xpk_accepts_the_commands():
  python = os.environ.get('XPK_PYTHON')
  if not python:
    pytest.skip('XPK_PYTHON does not name a Python with xpk==1.16.0')
  parsed = {}
  for verb, (_, line) in COMMANDS.items():
    program, *words = shlex.split(line)
    if program == 'xpk':
      command = [python, '-c', _PARSE, *words]
      output = subprocess.check_output(command, text=True)
      parsed[verb] = json.loads(output.splitlines()[-1])
  assert parsed['train']['restart_on_exit_codes'] == '75,76'
  assert int(parsed['train']['termination_grace_period_seconds']) == 600
  assert shlex.split(parsed['train']['command'])[-1] == '--x=a b'
  assert parsed['create']['num_slices'] == 2
  assert parsed['create']['reservation'] == 'r'
