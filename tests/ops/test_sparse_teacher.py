"""Chosen tokens of a teacher against its dense distribution."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt.ops import (
  distillation_loss,
  sparse_teacher,
  vocabulary_loss,
)
from tests.ops import dense_loss
from tests.ops.test_vocabulary_loss import assert_same, make_case, on_mesh

VOCAB, DRAWS = 13, 6


@functools.cache
def _case():
  """States of 8 x 64 tokens, all equal, a table, and their distribution."""
  hidden, table, *_ = make_case(B=1, T=1, D=4, V=16, vocab_size=VOCAB)
  logits = dense_loss.logits(hidden, table, vocab_size=VOCAB, softcap=5.0)
  p = np.asarray(jax.nn.softmax(logits))[0, 0]
  return jnp.tile(hidden, (8, 64, 1)), table, p


def _choose(form, count=DRAWS):
  def run(hidden, table, draws):
    return sparse_teacher.choose(
      hidden, table, draws, form=form, vocab_size=VOCAB, softcap=5.0
    )

  draws = jax.random.uniform(jax.random.key(0), (8, 64, count))
  return run, (*_case()[:2], draws)


def _mean(form):
  """The mean target distribution, and its standard error."""
  run, arguments = _choose(form)
  ids, weights = map(np.asarray, jax.jit(run)(*arguments))
  weights = weights / weights.sum(-1, keepdims=True)
  dense = (weights[..., None] * (ids[..., None] == np.arange(VOCAB))).sum(-2)
  dense = dense.reshape(-1, VOCAB)
  return dense.mean(0), dense.std(0) / np.sqrt(len(dense)) + 1e-9


def test_the_expectation_of_counts_is_the_distribution():
  p = _case()[2]
  mean, error = _mean('counts')
  assert np.all(abs(mean - p) < 4 * error + 1e-3)
  # Renormalised probabilities of drawn tokens are not: the head has too much.
  mean, error = _mean('gemma3')
  head = p.argmax()
  assert mean[head] - p[head] > 5 * error[head]


def test_counts_are_those_of_the_draws():
  run, arguments = _choose('counts')
  ids, counts = map(np.asarray, jax.jit(run)(*arguments))
  np.testing.assert_array_equal(counts.sum(-1), DRAWS)
  # By the definition: the first token whose cumulative probability is larger.
  drawn = np.searchsorted(_case()[2].cumsum(), arguments[2], side='right')
  for i in range(0, 64, 7):
    values, expected = np.unique(drawn[0, i], return_counts=True)
    chosen = counts[0, i] > 0
    np.testing.assert_array_equal(ids[0, i][chosen], values)
    np.testing.assert_array_equal(counts[0, i][chosen], expected)


@pytest.mark.sharded
@pytest.mark.parametrize('form', sparse_teacher.FORMS)
def test_mesh_equals_one_device(form):
  run, arguments = _choose(form)
  expected = jax.jit(run)(*arguments)
  sharded = on_mesh((1, 2, 2, 2), run, vocab=('fsdp', 'tensor'))
  assert_same(sharded(*arguments), expected)


def test_all_tokens_give_the_online_loss():
  run, (_, _, draws) = _choose('top', VOCAB)
  hidden, table, targets, weights, _ = make_case(
    B=8, T=64, D=4, V=16, vocab_size=VOCAB
  )
  teacher, rows, *_ = make_case(B=8, T=64, D=4, V=16, vocab_size=VOCAB, seed=1)

  def sums(source):
    def total(hidden, table):
      sums = vocabulary_loss.cross_entropy(
        hidden, table, targets, weights, vocab_size=VOCAB, teacher=source
      )
      return sums.total, sums

    return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(
      hidden, table
    )

  stored = distillation_loss.StoredTeacher(*jax.jit(run)(teacher, rows, draws))
  online = distillation_loss.Teacher(teacher, rows, softcap=5.0)
  assert_same(sums(stored), sums(online), rtol=1e-4)
