"""A checkout to launch from, with a stand-in for the training command."""

import os
import pathlib
import shutil
import subprocess
import sys

from tests import tiny

HERE = pathlib.Path(__file__).resolve().parent


class Checkout:
  """Launchers in a folder of their own, and programs on its PATH."""

  def __init__(self, folder: pathlib.Path):
    """Copies the launchers; `folder` is the test's."""
    self.root = folder / 'checkout'
    self.bin = folder / 'bin'
    self.called = folder / 'called'
    self.environment = {
      name: value
      for name, value in os.environ.items()
      if name not in ('PYTHONPATH', 'PYTHONUNBUFFERED', 'VIRTUAL_ENV')
      and not name.endswith('_MEM_FRACTION')
    }
    self.environment['PATH'] = f'{self.bin}:{os.environ["PATH"]}'
    self.bin.mkdir()
    skip = shutil.ignore_patterns('__pycache__')
    for path in ('launch', 'configs'):
      shutil.copytree(tiny.ROOT / path, self.root / path, ignore=skip)
    for path in ('setup.py', 'pyproject.toml'):
      shutil.copy(tiny.ROOT / path, self.root)
    package = self.root / 'encdec_adapt'
    package.mkdir()
    (package / '__init__.py').touch()
    shutil.copy(HERE / 'stand_in_train.py', package / 'train.py')

  def put(self, name: str, script: str) -> None:
    """Puts a shell script on PATH."""
    path = self.bin / name
    path.write_text(f'#!/usr/bin/env bash\n{script}\n')
    path.chmod(0o755)

  def put_recorder(self, *names: str) -> None:
    """Puts stand-ins on PATH that note how they are called, in `called`.

    They succeed, unless a flag is not in tool_flags.json.
    """
    recorder = HERE / 'record_call.py'
    for name in names:
      self.put(
        name, f'exec {sys.executable} {recorder} {self.called} {name} "$@"'
      )

  def launch(
    self, module: str, *arguments: str, timeout: float = 120
  ) -> subprocess.CompletedProcess:
    """Runs a launcher to its end."""
    return subprocess.run(
      [sys.executable, '-m', f'launch.{module}', *arguments],
      cwd=self.root,
      env=self.environment,
      capture_output=True,
      text=True,
      timeout=timeout,
    )
