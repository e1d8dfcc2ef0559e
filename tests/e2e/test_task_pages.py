"""The pages of configs/tasks: there is one a task, and its commands pass."""

import subprocess
import sys

import pytest

from tests import tiny
from tests.e2e import task_pages

pytestmark = pytest.mark.e2e
TASKS = (
  'summarise translate classify answer chat search prefer reward distil'
  ' pretrain'
).split()


def test_there_is_a_page_for_each_task():
  assert sorted(TASKS) == [page.stem for page in task_pages.PAGES]
  index = (tiny.ROOT / 'configs' / 'README.md').read_text()
  for page in task_pages.PAGES:
    assert f'(tasks/{page.name})' in index, page
    assert len(page.read_text().splitlines()) <= 60, page


@pytest.mark.long
def test_every_command_passes(tmp_path):
  done = subprocess.run(
    [sys.executable, '-m', 'tests.e2e.task_pages', str(tmp_path)],
    cwd=tiny.ROOT,
    env=tiny.environment(),
    capture_output=True,
    text=True,
  )
  # The last lines are the error, the page and the command.
  assert done.returncode == 0, done.stderr
