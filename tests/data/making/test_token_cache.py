"""Tokens that are kept between passes."""

import numpy as np

from encdec_adapt.data.making import token_cache


def test_a_text_is_tokenised_once(tmp_path):
  calls = []

  def encode(text):
    calls.append(text)
    return np.arange(len(text), dtype=np.int32)

  texts = ['one', 'three', '', 'one', 'a\u00e9\ud7ff'] * 2
  with token_cache.TokenCache(tmp_path) as cache:
    for text in texts:
      tokens = cache.encode(text, encode)
      assert tokens.tolist() == list(range(len(text)))
      assert tokens.dtype == np.int32
    assert not list(tmp_path.iterdir())  # Nothing is left if it is killed.
  assert calls == ['one', 'three', '', 'a\u00e9\ud7ff']
