"""Fixtures of the launchers' tests."""

import pytest

from tests.launch import cloud as cloud_lib


@pytest.fixture
def cloud(tmp_path):
  """A fake cloud with a checkout to launch from."""
  return cloud_lib.Cloud(tmp_path)
