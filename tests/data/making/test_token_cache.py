"""Tokens that are kept between passes."""

import numpy as np

from encdec_adapt.data.making import token_cache


def test_a_text_is_tokenised_once(tmp_path):
  asked = []

  def encode(text):
    asked.append(text)
    return np.arange(len(text), dtype=np.int32)

  texts = ['one', 'three', '', 'one', 'a\u00e9\ud7ff'] * 2
  with token_cache.TokenCache(tmp_path) as cache:
    for text in texts:
      found = cache.encode(text, encode)
      assert found.tolist() == list(range(len(text)))
      assert found.dtype == np.int32
    assert not list(tmp_path.iterdir())  # Nothing is left if it is killed.
  assert asked == ['one', 'three', '', 'a\u00e9\ud7ff']
