"""Models of transformers and the folders that it saves, made once."""

import pytest

import encdec_adapt


@pytest.fixture(scope='session')
def saved(tmp_path_factory):
  """A function: case name -> (their model, its folder, our model)."""
  # Here: without torch the tests that import it are skipped.
  from tests.parity import tiny_models

  made = {}

  def get(name):
    if name not in made:
      case = tiny_models.CASES[name]
      model = tiny_models.make(case)
      folder = tmp_path_factory.mktemp(name)
      model.save_pretrained(folder)
      ours = encdec_adapt.load(folder, encoder_window=case.encoder_window)
      made[name] = model, folder, ours
    return made[name]

  return get
