"""GKE: what is printed, and that xpk's own parser takes it.

The parser needs xpk in an environment of its own, for its dependencies are
not ours: XPK_PYTHON=/path/to/python of it.
"""

import json
import os
import pathlib
import shlex
import subprocess

import pytest

from tests.launch import checkout

WHERE = ('--cluster=pod', '--zone=us-west4-a')
JOB = ('--', '--config=configs/base.py', "--workdir=gs://b/it's")
IMAGE = '--image=europe-docker.pkg.dev/p/r/encdec_adapt:1'
# Of every verb, and tier, what is given and what is printed.
COMMANDS = {
  'create': (
    [*WHERE, '--accelerator=v5litepod-16', '--slices=2', '--project=p'],
    [
      'xpk cluster create --cluster=pod --zone=us-west4-a --project=p'
      ' --tpu-type=v5litepod-16 --num-slices=2 --spot'
    ],
  ),
  'create, on demand': (
    [*WHERE, '--accelerator=v6e-4x4', '--tier=on_demand'],
    [
      'xpk cluster create --cluster=pod --zone=us-west4-a --tpu-type=v6e-4x4'
      ' --num-slices=1 --on-demand'
    ],
  ),
  'create, reserved': (
    [*WHERE, '--accelerator=v5p-64', '--tier=reserved', '--reservation=r'],
    [
      'xpk cluster create --cluster=pod --zone=us-west4-a --tpu-type=v5p-64'
      ' --num-slices=1 --reservation=r'
    ],
  ),
  'image': (
    [IMAGE],
    [
      'docker buildx build --file=launch/docker/Dockerfile'
      ' --build-arg=platform=tpu --platform=linux/amd64'
      ' --tag=europe-docker.pkg.dev/p/r/encdec_adapt:1 --push .'
    ],
  ),
  'train': (
    ['--name=pair', *WHERE, '--accelerator=v6e-16', IMAGE]
    + ['--grace_seconds=600', *JOB],
    [
      'xpk workload create --cluster=pod --zone=us-west4-a --workload=pair'
      ' --tpu-type=v6e-16 --num-slices=1'
      ' --docker-image=europe-docker.pkg.dev/p/r/encdec_adapt:1'
      ' --max-restarts=1000 --restart-on-exit-codes=75,76'
      ' --termination-grace-period-seconds=600 '
      + shlex.quote(
        '--command=exec python -m encdec_adapt.train --coordinator=auto'
        " --config=configs/base.py '--workdir=gs://b/it'\"'\"'s'"
      )
    ],
  ),
  'status': (
    [*WHERE],
    ['xpk workload list --cluster=pod --zone=us-west4-a'],
  ),
  'logs': (
    ['--name=pair'],
    [
      'kubectl logs --follow --prefix --all-containers'
      ' --selector=xpk.google.com/workload=pair --max-log-requests=512'
      ' --tail=-1'
    ],
  ),
  'delete': (
    ['--name=pair', *WHERE],
    [
      'xpk workload delete --cluster=pod --zone=us-west4-a --workload=pair',
    ],
  ),
  'delete_cluster': (
    [*WHERE],
    ['xpk cluster delete --cluster=pod --zone=us-west4-a'],
  ),
}


@pytest.fixture
def here(tmp_path):
  """A checkout whose programs note how they were called, and succeed."""
  found = checkout.Checkout(tmp_path)
  found.put_recorder('xpk', 'docker', 'kubectl')
  return found


@pytest.mark.parametrize('name', COMMANDS)
def test_dry_run_prints_what_is_run(here, name):
  flags, wanted = COMMANDS[name]
  verb = name.partition(',')[0]
  done = here.launch('gke', verb, '--dry_run', *flags)
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines() == [f'$ {line}' for line in wanted]
  assert not here.called.exists()

  done = here.launch('gke', verb, *flags)
  assert done.returncode == 0, done.stderr
  called = here.called.read_text().splitlines()
  assert called == [word for line in wanted for word in shlex.split(line)]


@pytest.mark.parametrize(
  'verb, flags, said',
  [
    ('image', ['--image=localhost:5000/b'], 'has no tag'),
    ('delete', ['--name=a_b', *WHERE], '--name=a_b: give 1 to 30'),
    ('status', [*WHERE, *JOB], 'this verb starts no training job'),
    ('train', ['--name=a', *WHERE, IMAGE, *JOB], '--accelerator'),
    (
      'train',
      ['--name=a', *WHERE, IMAGE, '--accelerator=v5p-4x4x4', '--']
      + ['--config=configs/gemma2.py:topology=v5p:4x4x4,slices=2']
      + ['--workdir=gs://b/r'],
      '--accelerator=v5p-4x4x4 --slices=1 requests 1 x 64 v5p',
    ),
  ],
)
def test_bad_flags_are_named(here, verb, flags, said):
  done = here.launch('gke', verb, *flags)
  assert done.returncode == 2
  assert said in done.stderr and 'Traceback' not in done.stderr
  assert not here.called.exists()


# Reads the command line, or prints the long options of every command.
_PARSE = """
import argparse, json, sys
from xpk.parser import core
parser = argparse.ArgumentParser(prog='xpk')
core.set_parser(parser=parser)
found = vars(parser.parse_args(sys.argv[1:]))
print(json.dumps({k: v for k, v in found.items() if k != 'func'}, default=str))
"""
_LIST = """
import argparse, json
from xpk.parser import core
parser = argparse.ArgumentParser(prog='xpk')
core.set_parser(parser=parser)
def walk(parser, name):
  kind = argparse._SubParsersAction
  below = [a for a in parser._actions if isinstance(a, kind)]
  if not below:
    words = [o for a in parser._actions for o in a.option_strings]
    found[name] = sorted(o for o in words if o.startswith('--'))
  for action in below:
    for word, one in action.choices.items():
      walk(one, f'{name} {word}')
found = {}
walk(parser, 'xpk')
print(json.dumps(found))
"""


def ask_xpk(code: str, *arguments: str):
  """What code says that is run where xpk is installed."""
  python = os.environ.get('XPK_PYTHON')
  if not python:
    pytest.skip('XPK_PYTHON does not name a Python with xpk==1.16.0')
  done = subprocess.run(
    [python, '-c', code, *arguments], capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_xpk_takes_what_is_printed():
  read = {}
  for verb, (_, lines) in COMMANDS.items():
    for line in lines:
      words = shlex.split(line)
      if words[0] == 'xpk':
        read[verb] = ask_xpk(_PARSE, *words[1:])
  assert set(read) == set(COMMANDS) - {'image', 'logs'}
  assert read['train']['restart_on_exit_codes'] == '75,76'
  assert int(read['train']['max_restarts']) == 1000
  assert int(read['train']['termination_grace_period_seconds']) == 600
  assert shlex.split(read['train']['command'])[-1] == "--workdir=gs://b/it's"
  assert read['create']['spot'] is True
  assert read['create']['num_slices'] == 2
  assert read['create, on demand']['on_demand'] is True
  assert read['create, reserved']['reservation'] == 'r'


@pytest.mark.slow
def test_the_list_of_flags_is_that_of_xpk():
  path = pathlib.Path(__file__).with_name('tool_flags.json')
  listed = json.loads(path.read_text())['commands']
  listed = {k: flags for k, flags in listed.items() if k.startswith('xpk ')}
  found = ask_xpk(_LIST)
  assert listed == {name: found[name] for name in listed}
