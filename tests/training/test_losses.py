"""Distillation: teachers of any kind, and what they cannot predict."""

import dataclasses
import functools

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.models import architecture, build, model_config
from encdec_adapt.objectives import framing
from encdec_adapt.training import losses
from encdec_adapt.training.losses import cross_entropy
from tests import gemma_ids, toy_models
from tests.ops import dense_loss
from tests.training import conftest


def _of_kind(kind):
  if kind is architecture.ENCODER_DECODER:
    return conftest.PAIR
  stack = dataclasses.replace(conftest.STACK, role=kind.role)
  return model_config.DecoderOnlyConfig(stack)


@pytest.mark.long
@pytest.mark.parametrize(
  'kind', architecture.GENERATING, ids=lambda kind: kind.name
)
def test_a_teacher_of_every_kind_predicts_the_targets(kind):
  teacher = build.build(_of_kind(kind))
  params = toy_models.params(teacher.config)
  student = build.build(conftest.PAIR)
  own = toy_models.params(conftest.PAIR, 2)
  distilled = conftest.make_loss('distill:share=0.5')
  plain = cross_entropy.CrossEntropy(chunk=16)
  batch = jax.tree.map(jnp.asarray, conftest.make_batch(4, teacher=True))

  def sums(loss, model, params, *frozen):
    models = {'teacher': (teacher, *frozen)} if frozen else {}
    return conftest.sums(loss, model, params, batch, models)

  sums = jax.jit(sums, static_argnums=(0, 1))
  same = sums(distilled, teacher, params, params)
  # A model learns nothing from itself.
  assert float(same['distillation']) == pytest.approx(0, abs=1e-3)
  found = sums(distilled, student, own, params)
  alone = sums(plain, student, own)
  assert float(found['cross_entropy']) == pytest.approx(
    float(alone['cross_entropy']), rel=1e-5
  )
  assert float(found['distillation']) > 0.1


def test_distillation_is_the_whole_loss_by_default():
  loss = conftest.make_loss('distill:divergence=js,beta=0.1')
  model, params = build.build(conftest.PAIR), toy_models.params(conftest.PAIR)
  batch = jax.tree.map(jnp.asarray, conftest.make_batch(4))
  teacher = {'teacher': toy_models.params(conftest.PAIR, 2)}
  terms = jax.jit(conftest.sums, static_argnums=(0, 1))(
    loss, model, params, batch, teacher
  )
  assert float(terms['loss']) == float(terms['distillation']) > 0.1
  for options, words in (
    ('beta=0.1', 'the divergence is forward; leave it'),
    ('beta=1,divergence=js', 'distill.beta is 1.0; it must be below 1'),
    ('temperature=0', 'distill.temperature is 0.0'),
  ):
    with pytest.raises(errors.UserError, match=words):
      conftest.make_loss(f'distill:{options}')


@pytest.mark.slow
@pytest.mark.parametrize('divergence', ['forward', 'reverse', 'js,beta=0.3'])
def test_distillation_of_a_pair_equals_dense_logits(divergence):
  """The teacher is a decoder that reads inputs and targets in a row."""
  teacher, student = build.build(conftest.SOURCE), conftest.MODEL
  frozen = toy_models.params(conftest.SOURCE)
  loss = conftest.make_loss(f'distill:divergence={divergence}')
  batch = jax.tree.map(jnp.asarray, conftest.make_batch(4, teacher=True))

  def actual(params):
    models = {'teacher': (teacher, frozen)}
    terms = conftest.sums(loss, student, params, batch, models)
    return conftest.value(loss, terms, batch)

  def expected(params):
    hidden, table, stack = loss.predict(student, params, batch)
    readers = {'teacher': functools.partial(loss.predict, teacher, frozen)}
    sums = dense_loss.cross_entropy(
      hidden,
      table,
      batch['targets'],
      batch['weights'],
      vocab_size=stack.outputs,
      softcap=stack.final_softcap,
      teacher=loss._teacher(readers, batch),
    )
    return sums.total / sums.weight

  (value, gradients), (dense, dense_gradients) = (
    jax.jit(jax.value_and_grad(f))(toy_models.params(conftest.PAIR, 2))
    for f in (actual, expected)
  )
  assert float(value) == pytest.approx(float(dense), rel=1e-5)
  scale = max(float(abs(x).max()) for x in jax.tree.leaves(dense_gradients))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * scale),
    gradients,
    dense_gradients,
  )


def test_spans_are_learnt_from_the_text_and_sentinels_as_they_are():
  """The loss of a literal pair of UL2, from logits of its text alone."""
  A, B, R = 50, 51, 52
  ids = dataclasses.replace(gemma_ids.SIDE, sentinels=(A, B), modes=(R,))
  inputs, targets = [R, 11, 12, A, 14, B], [A, 13, B, 15, 16, gemma_ids.EOS]
  text = [gemma_ids.BOS, 11, 12, 13, 14, 15, 16, gemma_ids.EOS]
  pair = framing.Pair(*(np.array(x, np.int32) for x in (inputs, targets)))
  recipe = _recipe('t5gemma2', {'loss.chunk': 16})
  loss, declared = recipe.loss, recipe.frozen['teacher']
  assert declared.accepts == (architecture.CAUSAL_DECODER,)
  teacher, student = build.build(conftest.SOURCE), conftest.MODEL
  frozen = toy_models.params(conftest.SOURCE)
  own = toy_models.params(conftest.PAIR, 2)
  row = framing.frame_row([pair], conftest.LENGTHS, gemma_ids.FRAMING)
  rows = recipe.rows.transform(framing.stack_rows([row]), ids)
  batch = jax.tree.map(jnp.asarray, rows)
  models = {'teacher': losses.loss.Frozen(teacher, frozen)}
  terms = losses.loss.sums(loss, student, own, batch, models)

  tokens = jnp.array([text])
  fields = jnp.ones_like(tokens), jnp.arange(len(text))[None]
  hidden = teacher.decode(frozen, tokens, *fields)
  logits = np.asarray(teacher.logits(frozen, hidden))[0, :, : conftest.VOCAB]
  said = jax.nn.softmax(logits)
  hidden = student.architecture.predict(student, own, batch)
  scores = np.asarray(student.logits(own, hidden))[0, :, : conftest.VOCAB]
  scores = jax.nn.log_softmax(scores)
  expected = -scores[0, A] - scores[2, B]
  # 13 follows 12, at index 2 of the text, and so on.
  for target, index in ((1, 2), (3, 4), (4, 5), (5, 6)):
    expected -= jnp.sum(said[index] * scores[target])
  assert float(terms['loss']) == pytest.approx(float(expected), rel=1e-5)


def _recipe(objective, changes):
  """The recipe of distillation of a pair, or of a causal decoder."""
  config = config_lib.defaults()
  config.loss.kind, config.data.objective = 'distill', objective
  config.model.kind = 'encoder_decoder'
  config.data.source, config.data.encoder_length = '', 64
  config.update_from_flattened_dict(changes)
  return config_lib.load(config, sources=False).recipe


ON_INPUTS = {'loss.on_inputs': True, 'model.kind': 'decoder_only'}


@pytest.mark.parametrize(
  'objective, changes, words',
  [
    (
      'ul2',
      {'loss.distill.divergence': 'reverse'},
      'set divergence to forward',
    ),
    ('ul2', {'loss.distill.on_policy': 0.5}, 'leave out on_policy'),
    ('pairs | ul2', {}, 'mix it with objectives of texts'),
    ('bart', {}, 'a teacher predicts the targets of'),
    ('meap_prefix_lm', {}, 'without masks'),
    ('preferences', {}, 'rows have several answers'),
    ('pairs | meap_prefix_lm', ON_INPUTS, 'leave out on_inputs'),
  ],
)
def test_teachers_that_cannot_predict_are_refused(objective, changes, words):
  with pytest.raises(errors.UserError, match=words):
    _recipe(objective, changes)


def test_inputs_are_learnt_from_causal_teachers_alone():
  declared = _recipe('pairs', ON_INPUTS).frozen['teacher']
  assert declared.accepts == (architecture.CAUSAL_DECODER,)
