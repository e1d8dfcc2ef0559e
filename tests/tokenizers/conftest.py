"""Tiny tokenizers of every family, made once."""

import functools

import pytest

from encdec_adapt.tokenizers import vocabulary_pair
from tests import tiny_tokenizers


@pytest.fixture(scope='session')
def tiny_folder(tmp_path_factory):
  """A function: family -> folder with its tokenizer.json."""

  @functools.cache
  def folder(family):
    path = tmp_path_factory.mktemp(family) / 'model'
    return tiny_tokenizers.save(path, family, tiny_tokenizers.TEXTS, 600)

  return folder


@pytest.fixture(scope='module')
def vocabulary(family, tiny_folder):
  """The vocabulary of a family, of the fixture that a file has for them."""
  return vocabulary_pair.open_vocabulary(tiny_folder(family))
