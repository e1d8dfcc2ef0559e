"""Models on disk that the tests of conversions share."""

import pytest

from tests import tiny
from tests.e2e import folders


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('convert')


@pytest.fixture(scope='module')
def pairs(folder):
  """Flags of an encoder-decoder job."""
  return tiny.make_records(folder)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
  monkeypatch.chdir(tiny.ROOT)


@pytest.fixture(scope='module')
def gemma(folder, pairs):
  return folders.make_folder(
    folder / 'gemma', folders.GEMMA, folder / 'vocabulary.model'
  )


@pytest.fixture(scope='module')
def wide(folder, pairs):
  """A wider one, without a tokenizer.model."""
  return folders.make_folder(
    folder / 'wide', {**folders.GEMMA, 'width': 24}, seed=1
  )


@pytest.fixture(scope='module')
def llama(folder):
  return folders.make_folder(folder / 'llama', folders.LLAMA, seed=2)


@pytest.fixture(scope='module')
def imported(folder, gemma):
  return folders.import_folder(gemma, folder / 'imported')


@pytest.fixture(scope='module')
def adapted(folder, imported):
  return folders.adapt(folder / 'adapted', f'--encoder={imported}')


@pytest.fixture(scope='module')
def cross_family(folder, gemma, llama):
  """Of Gemma's and Llama's: no class of transformers."""
  flags = [f'--encoder={gemma}', f'--decoder={llama}']
  return folders.adapt(folder / 'cross_family', *flags)
