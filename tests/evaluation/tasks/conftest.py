"""Models that the tests of tasks share."""

import pytest

from tests import toy_models


@pytest.fixture(scope='package')
def models(tmp_path_factory):
  """Models with a vocabulary by kind."""
  stack = toy_models.stack(vocab_size=toy_models.GEMMA_SIZE, window=64)
  folder = tmp_path_factory.mktemp('models')
  return {
    kind: toy_models.save(folder / kind, config, scale=0.2)
    for kind, config in toy_models.pair_and_decoder(stack).items()
  }
