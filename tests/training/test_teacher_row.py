"""The teacher's row: packing changes nothing, and it is plain continuation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.models import build, model_config
from encdec_adapt.objectives import framing
from tests import gemma_ids
from tests.training.conftest import STACK, VOCAB

WINDOW = 4
CONFIG = model_config.DecoderOnlyConfig(
  dataclasses.replace(
    STACK, window=WINDOW, pattern=('local', 'global'), layers=2
  )
)


@pytest.fixture(scope='module')
def teacher():
  model = build.build(CONFIG)
  return model, model.init(jax.random.key(3))


@pytest.fixture(scope='module')
def pairs():
  rng = np.random.default_rng(0)

  def tokens(count):
    return rng.integers(5, VOCAB, count, dtype=np.int32)

  # Each longer than the window, prefixes and targets too.
  return [framing.Pair(tokens(m), tokens(n)) for m, n in ((9, 7), (6, 8))]


def _logits(teacher, pairs, lengths):
  """Logits at the targets of each pair, read from one row."""
  model, params = teacher
  row = framing.stack_rows(
    [framing.frame_row(pairs, lengths, gemma_ids.FRAMING, teacher=True)]
  )
  row = jax.tree.map(jnp.asarray, row)
  hidden = model.architecture.predict(model, params, row)
  logits = np.asarray(model.logits(params, hidden))[0]
  return [
    logits[row['decoder_segments'][0] == segment]
    for segment in range(1, len(pairs) + 1)
  ]


@pytest.mark.long
def test_packed_logits_equal_unpacked_ones_above_the_window(teacher, pairs):
  packed = _logits(teacher, pairs, framing.Lengths(20, 20))
  for pair, logits in zip(pairs, packed, strict=True):
    (alone,) = _logits(teacher, [pair], framing.Lengths(12, 10))
    assert len(pair.inputs) + len(pair.targets) > 2 * WINDOW
    np.testing.assert_allclose(logits, alone, atol=1e-5)


@pytest.mark.long
def test_targets_are_predicted_as_the_continuation(teacher, pairs):
  model, params = teacher
  for pair in pairs:
    text = jnp.concatenate(
      [jnp.array([gemma_ids.BOS]), pair.inputs, pair.targets]
    )[None]
    ones, positions = jnp.ones_like(text), jnp.arange(text.shape[1])[None]
    hidden = model.decode(params, text, ones, positions)
    logits = np.asarray(model.logits(params, hidden))[0]
    m = len(pair.inputs)
    (found,) = _logits(teacher, [pair], framing.Lengths(12, 10))
    np.testing.assert_allclose(found, logits[m:-1], atol=1e-5)
