"""Losses: how a job gets its loss, teachers of any kind, and a new loss."""

import dataclasses
import pathlib
from typing import ClassVar

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from encdec_adapt.base import errors, keys
from encdec_adapt.evaluation.measures import perplexity
from encdec_adapt.models import architecture, build, model_config
from encdec_adapt.objectives import framing
from encdec_adapt.training import losses
from encdec_adapt.training.losses import cross_entropy, distillation, loss
from tests import gemma_ids, toy_models, toy_preferences
from tests.training import conftest


@dataclasses.dataclass(frozen=True)
class Preference(loss.Loss):
  """The second row of an example is better than the first (DPO)."""

  name: ClassVar[str] = 'preference'
  references: ClassVar[tuple[str, ...]] = ('teacher',)
  held_out_references: ClassVar[tuple[str, ...]] = ('teacher',)
  metrics: ClassVar[dict[str, str]] = loss.Loss.metrics | {
    'margin': 'mean',
    'examples': 'sum',
  }
  held_out: ClassVar[tuple[str, ...]] = ('loss', 'margin')
  curves: ClassVar[tuple[str, ...]] = ('loss', 'margin')
  selects: ClassVar[str] = 'margin'
  highest: ClassVar[bool] = True
  unit: ClassVar[str] = 'per example'

  preference: float = keys.key(1.0, 'Scale of the margin.', at_least=0)

  def weight(self, batch):
    return jnp.sum(jnp.any(batch['weights'] > 0, axis=(1, 2))) * 1.0

  def predict(self, model, params, batch, **options):
    rows = {name: x.reshape(-1, x.shape[-1]) for name, x in batch.items()}
    return super().predict(model, params, rows, **options)

  def margins(self, outputs, references, batch):
    scores = [
      self._log_probs(x, batch) for x in (outputs, references['teacher'])
    ]
    difference = scores[0] - scores[1]
    return difference[:, 1] - difference[:, 0]

  def _log_probs(self, outputs, batch):
    logits = jnp.einsum('RTD,VD->RTV', outputs.hidden, outputs.table)
    log_probs = jax.nn.log_softmax(logits).reshape(*batch['targets'].shape, -1)
    chosen = jnp.take_along_axis(log_probs, batch['targets'][..., None], -1)
    return jnp.sum(chosen[..., 0] * batch['weights'], axis=-1)

  def terms(self, outputs, references, batch):
    margins = self.margins(outputs, references, batch)
    return {
      'loss': -jnp.sum(jax.nn.log_sigmoid(self.preference * margins)),
      'margin': jnp.sum(margins),
      'examples': self.weight(batch),
    }

  def row_ratios(self, model, params, batch, references=None):
    outputs = self.predict(model, params, batch)
    frozen = self.predict(self.models['teacher'], references['teacher'], batch)
    margins = self.margins(outputs, {'teacher': frozen}, batch)
    ones = jnp.ones_like(margins)
    nats = -jax.nn.log_sigmoid(self.preference * margins)
    return jnp.stack([jnp.stack([nats, ones]), jnp.stack([margins, ones])])


def test_a_loss_compares_the_answers_of_an_example():
  # With `toy_preferences`, all that a preference loss adds to the package.
  model = build.build(conftest.SOURCE)
  preference = Preference(models={'teacher': model})
  maker, rng = toy_preferences.OBJECTIVE.maker, np.random.default_rng(0)
  documents = [(str(i), rng.integers(10, 60, (3, 4))) for i in range(4)]
  lengths = framing.Lengths(8, 8)
  examples = maker('preferences', lengths).examples(documents, None)
  batch = framing.stack_rows(
    [
      maker.frame([example], lengths, gemma_ids.FRAMING, teacher=True)
      for example in examples
    ]
  )
  maker.check(batch, gemma_ids.FRAMING)
  axes = {name: maker.axes[name] for name in batch}
  trainer = conftest.Trainer(
    loss=preference, axes=axes, model=model, microbatches=2
  )
  state = trainer.init(trainer.where.place(model.init, jax.random.key(0)))
  frozen = {'teacher': jax.tree.map(jnp.copy, state.params)}
  seen = []
  for _ in range(4):
    state, metrics = trainer.step(state, batch, frozen)
    seen.append({name: float(value) for name, value in metrics.items()})
  # Of the model and its copy the margin is 0.
  assert seen[0]['loss'] == pytest.approx(np.log(2), rel=1e-5)
  assert seen[0]['examples'] == 4
  assert seen[0]['weight'] == pytest.approx(batch['weights'].sum())
  assert seen[-1]['loss'] < seen[0]['loss'] < seen[-1]['margin']

  evaluator = perplexity.Evaluator(trainer.where, preference, axes)
  before, after = (
    evaluator(params, [batch], frozen).values
    for params in (frozen['teacher'], state.params)
  )
  assert before['loss'] == pytest.approx(np.log(2), rel=1e-5)
  ranks = [preference.rank(values['margin']) for values in (before, after)]
  assert ranks[1] < ranks[0]


def test_the_modules_of_the_package_are_the_losses():
  folder = pathlib.Path(losses.__file__).parent
  modules = {path.stem for path in folder.glob('*.py')} - {'__init__', 'loss'}
  assert {entry.name for entry in losses.CLASSES} == modules


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


def test_inputs_are_learnt_from_causal_teachers_alone():
  accepts = distillation.Distillation(on_inputs=True).accepts
  assert accepts == (architecture.CAUSAL_DECODER,)
