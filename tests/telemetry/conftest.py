"""A clock that the tests move."""

import pytest


class _Clock:
  now = 100.0

  def __call__(self):
    return self.now


@pytest.fixture
def clock():
  return _Clock()
