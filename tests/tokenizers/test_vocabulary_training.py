"""Training a vocabulary: the same every time, bounded, whole or not at all."""

import itertools

import pytest

from encdec_adapt.base import errors
from encdec_adapt.tokenizers import vocabulary_training
from tests import tiny_tokenizers

SIZE = 512


def test_training_is_deterministic_and_atomic(tmp_path):
  first, second = (
    vocabulary_training.train_vocabulary(
      itertools.cycle(tiny_tokenizers.TEXTS),
      tmp_path / name,
      SIZE,
      max_bytes=100_000,
    )
    for name in ('a.model', 'b.model')
  )
  assert first.fingerprint == second.fingerprint
  assert len(first.fingerprint) == 64
  assert sorted(p.name for p in tmp_path.iterdir()) == ['a.model', 'b.model']
  other = vocabulary_training.train_vocabulary(
    tiny_tokenizers.TEXTS, tmp_path / 'b.model', SIZE + 1, max_bytes=100_000
  )
  assert other.size == SIZE + 1 and other.fingerprint != first.fingerprint


def test_training_refuses(tmp_path):
  path = tmp_path / 'a.model'
  with pytest.raises(errors.UserError, match='there is no text'):
    vocabulary_training.train_vocabulary(['', '\n'], path, SIZE)
  with pytest.raises(errors.UserError, match='vocabulary size 100000 does not'):
    vocabulary_training.train_vocabulary(
      tiny_tokenizers.TEXTS[:2], path, 100_000
    )
  with pytest.raises(errors.UserError, match='vocabulary size 64 does not'):
    vocabulary_training.train_vocabulary(tiny_tokenizers.TEXTS[:2], path, 64)
  assert not list(tmp_path.iterdir())
  (tmp_path / 'file').touch()
  with pytest.raises(errors.UserError, match='cannot be written'):
    vocabulary_training.train_vocabulary(
      tiny_tokenizers.TEXTS, tmp_path / 'file' / 'a', SIZE, max_bytes=50_000
    )
