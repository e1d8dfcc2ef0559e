"""Random preferences framed as batches, and dense formulas of the losses."""

import jax
import jax.numpy as jnp
import numpy as np

from encdec_adapt.objectives import framing, preferences
from tests import gemma_ids
from tests.training import conftest

AXES = preferences.ROWS.axes


def make_batch(rows, filler=0, seed=0):
  """Rows of answers of 2 to 7 tokens, the last of them filler."""
  rng = np.random.default_rng(seed)

  def tokens(least, most):
    count = rng.integers(least, most)
    return rng.integers(5, conftest.VOCAB, count, dtype=np.int32)

  examples = [
    [preferences.Preference(tokens(1, 9), tokens(2, 8), tokens(2, 8))]
    for _ in range(rows - filler)
  ] + [[]] * filler
  frame = preferences.ROWS.frame
  return framing.stack_rows(
    [
      frame(row, conftest.LENGTHS, gemma_ids.FRAMING, teacher=True)
      for row in examples
    ]
  )


def dense_log_probs(model, params, batch):
  """Log-probabilities [P, 2, T], 0 at padding, by materialised logits."""
  hidden = model.architecture.predict(model, params, batch)
  log_probs = jax.nn.log_softmax(model.logits(params, hidden))
  targets = batch['targets'].reshape(-1, batch['targets'].shape[-1])
  chosen = jnp.take_along_axis(log_probs, targets[..., None], -1)[..., 0]
  return chosen.reshape(batch['targets'].shape) * batch['weights']


def dense_loss(kind, log_probs, reference, lengths):
  """The mean loss, written out for each of some kinds."""
  difference = (log_probs - reference).sum(-1)
  h = difference[:, 0] - difference[:, 1]
  mean = log_probs.sum(-1) / lengths
  odds = mean - jnp.log1p(-jnp.exp(mean))
  share = -log_probs[:, 0].sum() / lengths[:, 0].sum()
  per_token = difference / lengths

  def log_sigmoid(x):
    return -jnp.log1p(jnp.exp(-x))

  return {
    'dpo:beta=0.3,smoothing=0.2,cross_entropy=0.5': jnp.mean(
      -0.8 * log_sigmoid(0.3 * h) - 0.2 * log_sigmoid(-0.3 * h)
    )
    + 0.5 * share,
    'robust:smoothing=0.2': jnp.mean(
      -0.8 * log_sigmoid(0.1 * h) + 0.2 * log_sigmoid(-0.1 * h)
    )
    / 0.6,
    'hinge': jnp.mean(jnp.maximum(1 - 0.1 * h, 0)),
    'squared_hinge': jnp.mean(jnp.maximum(1 - 0.1 * h, 0) ** 2),
    'ipo': jnp.mean((h - 5) ** 2),
    'ipo:log_probs=mean': jnp.mean(
      (per_token[:, 0] - per_token[:, 1] - 5) ** 2
    ),
    'simpo:gamma=0.5': -jnp.mean(
      log_sigmoid(2 * (mean[:, 0] - mean[:, 1]) - 0.5)
    ),
    'orpo:weight=0.4': share
    - 0.4 * jnp.mean(log_sigmoid(odds[:, 0] - odds[:, 1])),
  }[kind]


KINDS = (
  'dpo:beta=0.3,smoothing=0.2,cross_entropy=0.5',
  'robust:smoothing=0.2',
  'hinge',
  'squared_hinge',
  'ipo',
  'ipo:log_probs=mean',
  'simpo:gamma=0.5',
  'orpo:weight=0.4',
)
