"""Losses: how a job gets its loss, and teachers of any kind."""

import dataclasses
import pathlib

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from encdec_adapt.base import errors, keys
from encdec_adapt.models import architecture, build, model_config
from encdec_adapt.objectives import framing, objective_names
from encdec_adapt.training import losses
from encdec_adapt.training.losses import cross_entropy, distillation
from tests import gemma_ids, toy_models
from tests.ops import dense_loss
from tests.training import conftest


def test_the_modules_of_the_package_are_the_losses():
  folder = pathlib.Path(losses.__file__).parent
  modules = {path.stem for path in folder.glob('*.py')}
  bases = {'__init__', 'loss', 'comparison', 'rollout_options'}
  assert {entry.name for entry in losses.CLASSES} == modules - bases


def _section(**changes):
  defaults = {}
  for entry in losses.CLASSES:
    defaults |= keys.defaults(entry)
  return defaults | changes


def _classifier(role='bidirectional'):
  stack = dataclasses.replace(conftest.STACK, role=role, classes=3)
  return model_config.DecoderOnlyConfig(stack)


def test_the_keys_and_the_model_choose_the_loss():
  pair, share = conftest.PAIR, {'distillation': 0.5}
  for model, changes, name in (
    (pair, {}, 'cross_entropy'),
    (pair, share, 'distillation'),
    (pair, {'kind': 'distill'}, 'distillation'),
    (_classifier(), {}, 'label_loss'),
  ):
    assert losses.from_section(_section(**changes), model).name == name
  with pytest.raises(errors.UserError, match='distillation and label_loss'):
    losses.from_section(_section(**share), _classifier())
  with pytest.raises(errors.UserError, match='temperature is 0'):
    losses.from_section(_section(temperature=0.0), pair)


def _of_kind(kind):
  if kind is architecture.ENCODER_DECODER:
    return conftest.PAIR
  stack = dataclasses.replace(conftest.STACK, role=kind.role)
  return model_config.DecoderOnlyConfig(stack)


@pytest.mark.parametrize(
  'kind', distillation.Distillation().accepts, ids=lambda kind: kind.name
)
def test_a_teacher_of_every_kind_predicts_the_targets(kind):
  teacher = build.build(_of_kind(kind))
  params = toy_models.params(teacher.config)
  student = build.build(conftest.PAIR)
  own = toy_models.params(conftest.PAIR, 2)
  options = {'distillation': 0.5, 'chunk': 16, 'models': {'teacher': teacher}}
  distilled = distillation.Distillation(**options)
  plain = cross_entropy.CrossEntropy(chunk=16)
  batch = jax.tree.map(jnp.asarray, conftest.make_batch(4, teacher=True))
  sums = jax.jit(distilled.sums, static_argnums=0)
  same = sums(teacher, params, batch, {'teacher': params})
  # A model learns nothing from itself.
  assert float(same['distillation']) == pytest.approx(0, abs=1e-3)
  found = sums(student, own, batch, {'teacher': params})
  alone = jax.jit(plain.sums, static_argnums=0)(student, own, batch)
  assert float(found['cross_entropy']) == pytest.approx(
    float(alone['cross_entropy']), rel=1e-5
  )
  assert float(found['distillation']) > 0.1


def test_distill_by_name_is_the_whole_loss():
  pair = _section(kind='distill:divergence=js,beta=0.1')
  loss = losses.from_section(pair, conftest.PAIR)
  assert loss.options == distillation.Options('js', 0.1)
  model, params = build.build(conftest.PAIR), toy_models.params(conftest.PAIR)
  loss = dataclasses.replace(loss, models={'teacher': model}, chunk=16)
  batch = jax.tree.map(jnp.asarray, conftest.make_batch(4))
  teacher = toy_models.params(conftest.PAIR, 2)
  terms = jax.jit(loss.sums, static_argnums=0)(
    model, params, batch, {'teacher': teacher}
  )
  assert float(terms['loss']) == float(terms['distillation']) > 0.1
  for kind, words in (
    ('distil', "did you mean 'distill'"),
    ('distill:beta=0.1', 'the divergence is forward; leave it out'),
    ('distill:beta=1,divergence=js', 'beta is 1.0; it must be below 1'),
    ('distill + cross_entropy@0.1', 'cannot be added to distill'),
  ):
    with pytest.raises(errors.UserError, match=words):
      losses.from_section(_section(kind=kind), conftest.PAIR)


@pytest.mark.slow
@pytest.mark.parametrize('divergence', ['forward', 'reverse', 'js,beta=0.3'])
def test_distillation_of_a_pair_equals_dense_logits(divergence):
  """The teacher is a decoder that reads inputs and targets in a row."""
  teacher, student = build.build(conftest.SOURCE), conftest.MODEL
  frozen = toy_models.params(conftest.SOURCE)
  loss = distillation.Distillation(
    kind=f'distill:divergence={divergence}',
    chunk=16,
    models={'teacher': teacher},
  )
  batch = jax.tree.map(jnp.asarray, conftest.make_batch(4, teacher=True))

  def actual(params):
    terms = loss.sums(student, params, batch, {'teacher': frozen})
    return loss.objective(terms, loss.divisors(batch))

  def expected(params):
    models = {'teacher': (teacher, frozen), 'student': (student, params)}
    outputs = {k: loss.predict(*x, batch) for k, x in models.items()}
    hidden, table, stack = outputs['student']
    sums = dense_loss.cross_entropy(
      hidden,
      table,
      batch['targets'],
      batch['weights'],
      vocab_size=stack.outputs,
      softcap=stack.final_softcap,
      teacher=loss.teacher(outputs, batch),
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
  (objective,) = objective_names.parse('t5gemma2')
  loss = distillation.Distillation(kind='distill', chunk=16)
  loss = loss.for_objectives((objective,))
  loss.check(conftest.PAIR, (objective,))
  assert loss.accepts == (architecture.CAUSAL_DECODER,)
  teacher, student = build.build(conftest.SOURCE), conftest.MODEL
  loss = dataclasses.replace(loss, models={'teacher': teacher})
  frozen = toy_models.params(conftest.SOURCE)
  own = toy_models.params(conftest.PAIR, 2)
  row = framing.frame_row([pair], conftest.LENGTHS, gemma_ids.FRAMING)
  rows = loss.frame(framing.stack_rows([row]), ids)
  batch = jax.tree.map(jnp.asarray, rows)
  terms = jax.jit(loss.sums, static_argnums=0)(
    student, own, batch, {'teacher': frozen}
  )

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


def test_masked_inputs_are_no_targets():
  loss = losses.from_section(_section(on_inputs=True), conftest.SOURCE)
  with pytest.raises(errors.UserError, match='leave out on_inputs'):
    objectives = objective_names.parse('pairs | meap_prefix_lm')
    loss.check(conftest.SOURCE, objectives)


@pytest.mark.parametrize(
  'objective, options, words',
  [
    ('ul2', {'kind': 'distill:divergence=reverse'}, 'set divergence=forward'),
    ('ul2', {'kind': 'distill:on_policy=0.5'}, 'leave out on_policy'),
    ('pairs | ul2', {'kind': 'distill'}, 'mix it with objectives of texts'),
    ('bart', {'kind': 'distill'}, 'a teacher predicts the targets of'),
    ('meap_prefix_lm', {'kind': 'distill'}, 'without masks'),
  ],
)
def test_teachers_that_cannot_predict_are_refused(objective, options, words):
  loss = distillation.Distillation(**options)
  with pytest.raises(errors.UserError, match=words):
    loss.check(conftest.PAIR, objective_names.parse(objective))


def test_inputs_are_learnt_from_causal_teachers_alone():
  accepts = distillation.Distillation(on_inputs=True).accepts
  assert accepts == (architecture.CAUSAL_DECODER,)
