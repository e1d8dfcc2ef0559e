"""Fixtures of the launchers' tests."""

import pytest

from tests.launch import cloud as clouds


@pytest.fixture
def cloud(tmp_path):
  """A fake cloud with a checkout to launch from."""
  return clouds.Cloud(tmp_path)
