"""Tiny tokenizers of every family, made once."""

import functools

import pytest

from tests import tiny_tokenizers


@pytest.fixture(scope='session')
def tiny_folder(tmp_path_factory):
  """A function: family -> folder with its tokenizer.json."""

  @functools.cache
  def folder(family):
    path = tmp_path_factory.mktemp(family) / 'model'
    return tiny_tokenizers.save(path, family, tiny_tokenizers.TEXTS, 600)

  return folder
