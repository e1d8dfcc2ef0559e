"""The contrastive loss: literal values, a dense formula, parts and meshes."""

import dataclasses
import functools
import itertools

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from encdec_adapt import config as config_lib
from encdec_adapt.base import errors
from encdec_adapt.evaluation.measures import perplexity
from encdec_adapt.models import adapters as adapters_lib
from encdec_adapt.models import build, embedding_head, heads, model_config
from encdec_adapt.objectives import embeddings, framing, objective_names
from encdec_adapt.ops import kernel_forms
from encdec_adapt.sharding import mesh as mesh_lib
from encdec_adapt.training.losses import infonce
from encdec_adapt.training.losses import loss as loss_lib
from encdec_adapt.training.metrics import query_metrics
from encdec_adapt.training.recipes import embedding_recipe
from tests import gemma_ids, toy_models
from tests.training import conftest

HEAD = heads.Embedding(projections=(32, 24), dimensions=(8,))
STACK = dataclasses.replace(conftest.STACK, role='bidirectional', head=HEAD)
MODEL = build.build(model_config.DecoderOnlyConfig(STACK))
LENGTHS = framing.Lengths(24, 0)
FIELDS = objective_names.parse_one('embed:texts=6,vectors=24').rows
AXES = FIELDS.axes
ALL = 'infonce:temperature=0.2,hardness=2,spread_out=0.5,scores=0.3,vectors=0.7'


def _batch(rows, seed=0, filler=1):
  """Packed rows of examples with 0 to 2 negatives; the last rows are filler."""
  rng = np.random.default_rng(seed)
  framed = []
  for row in range(rows):
    examples = []
    for negatives in () if row >= rows - filler else (row % 3, 0):
      counts = rng.integers(1, 4, 2 + negatives, dtype=np.int32)
      examples.append(
        embeddings.Texts(
          rng.integers(5, conftest.VOCAB, counts.sum(), dtype=np.int32),
          counts,
          rng.normal(size=1 + negatives).astype(np.float32),
          rng.normal(size=24 * len(counts)).astype(np.float32),
        )
      )
    framed.append(FIELDS.frame(examples, LENGTHS, gemma_ids.FRAMING))
  return framing.stack_rows(framed)


def _outputs(vectors, stack=STACK, temperature=None):
  return loss_lib.Outputs(jnp.asarray(vectors), temperature, stack)


def _fields(roles, owners, keys):
  """A batch of rows given by lists; the loss reads no tokens."""
  fields = dict(roles=roles, owners=owners, keys=keys)
  batch = {name: jnp.array(x, jnp.int32) for name, x in fields.items()}
  weights = (batch['roles'] == embeddings.QUERY).astype(jnp.float32)
  return batch | {'weights': weights, 'vectors': jnp.zeros((*weights.shape, 0))}


def _plain(size):
  """A stack without projections, of which vectors have a size."""
  return dataclasses.replace(STACK, width=size, head=heads.Embedding())


def test_literal_values():
  # Two examples, the first with a negative: q0 p0 n0 and q1 p1.
  vectors = np.array(
    [[[1, 0], [0.6, 0.8], [0.8, 0.6]], [[0, 1], [0, 1], [0, 0]]], np.float32
  )
  batch = _fields(
    [[1, 2, 3], [1, 2, 0]], [[0, 0, 0]] * 2, [[1, 2, 3], [4, 5, 0]]
  )
  outputs = _outputs(vectors, _plain(2))

  def value(kind, batch=batch):
    loss = conftest.make_loss(f'infonce:temperature=0.5{kind}')
    terms = loss.terms(outputs, {}, batch)
    return float(terms['loss']), float(terms['accuracy'])

  # q0: products .6 (its positive), .8 (its negative), 0; q1: 1, .8 and .6.
  first = np.log(np.exp([1.2, 1.6, 0]).sum()) - 1.2
  second = np.log(np.exp([2, 1.6, 1.2]).sum()) - 2
  assert value('') == (pytest.approx(first + second, rel=1e-6), 1)
  # The negative of q0 counts exp(2 * .8) as much, for q0 alone.
  hard = np.log(np.exp([1.2, 1.6 + 1.6, 0]).sum()) - 1.2
  assert value(',hardness=2')[0] == pytest.approx(hard + second, rel=1e-6)
  # q0.q1 is 0 and p0.p1 .8, each twice over 2 * 1 pairs; times 2 queries.
  spread = 2 * 0.5 * (0 + 0.64)
  total = first + second + spread
  assert value(',spread_out=0.5')[0] == pytest.approx(total, rel=1e-6)
  # The negative equals the other example's positive: no negative for it.
  same = batch | {'keys': jnp.array([[1, 2, 5], [4, 5, 0]])}
  second = np.log(np.exp([2, 1.6]).sum()) - 2
  assert value('', same)[0] == pytest.approx(first + second, rel=1e-6)
  # Equal queries: positives of each are right for both, negatives are not.
  same = batch | {'keys': jnp.array([[4, 2, 3], [4, 5, 0]])}
  first = np.log(np.exp([1.2, 1.6]).sum()) - 1.2
  second = np.log(np.exp([2, 1.2]).sum()) - 2
  assert value('', same)[0] == pytest.approx(first + second, rel=1e-6)
  # Scores: the softmax over p0 and n0; of q1 a single candidate, always right.
  batch |= {'relevance': jnp.array([[0, 0.25, 0.75], [0, 1, 0]])}
  predicted = np.exp([1.2, 1.6]) / np.exp([1.2, 1.6]).sum()
  wanted = np.array([0.25, 0.75])
  divergence = (wanted * np.log(wanted / predicted)).sum()
  difference = value(',scores=2', batch)[0] - value('', batch)[0]
  assert difference == pytest.approx(2 * divergence, rel=1e-5)
  # Vectors: half of squared distances, 1 - cos, of texts alone.
  batch |= {
    'vectors': jnp.array([[[2, 0], [1, 0], [0, 3]], [[0, 1]] * 3], jnp.float32)
  }
  difference = value(',vectors=1', batch)[0] - value('', batch)[0]
  assert difference == pytest.approx(0.4 + 0.4, rel=1e-5)


def test_parts_of_vectors_are_compared_too():
  vectors = np.array([[[0.6, 0.8], [0.6, 0.8]], [[0.6, -0.8], [0.6, -0.8]]])
  batch = _fields([[1, 2]] * 2, [[0, 0]] * 2, [[1, 2], [3, 4]])
  stack = dataclasses.replace(
    _plain(2),
    head=heads.Embedding(dimensions=(1,)),
  )
  loss = infonce.InfoNce(temperature=1.0)
  terms = loss.terms(_outputs(vectors, stack), {}, batch)
  whole = np.log(np.exp(1) + np.exp(-0.28)) - 1
  # The first numbers, normalised, are all 1: two equal documents.
  assert float(terms['loss']) == pytest.approx(
    2 * (whole + np.log(2)), rel=1e-5
  )


def test_pooling_by_segment():
  states = jnp.arange(12.0).reshape(1, 6, 2)
  segments = jnp.array([[1, 1, 1, 2, 2, 0]])
  for pooling, expected in (
    ('mean', [[2, 3], [7, 8], [0, 0]]),
    ('first', [[0, 1], [6, 7], [0, 0]]),
    ('last', [[4, 5], [8, 9], [0, 0]]),
  ):
    pooled = embedding_head.pool(states, segments, 3, pooling)
    assert pooled[0].tolist() == expected
    in_place = functools.partial(embedding_head.pool_in_place, pooling=pooling)
    (row,) = in_place(states, segments)
    assert row[:5].tolist() == [expected[0]] * 3 + [expected[1]] * 2
    sizes = {(2, 512, 2): jnp.float32, (2, 512): jnp.int32}
    shapes = itertools.starmap(jax.ShapeDtypeStruct, sizes.items())
    memory = jax.jit(in_place).lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 512 * 512  # None of L x L.


def _gradient(loss, params, batch, parts=1):
  def objective(params):
    terms = conftest.sums(loss, MODEL, params, batch, parts=parts)
    return conftest.value(loss, terms, batch)

  return jax.jit(jax.value_and_grad(objective))(params)


@pytest.mark.long
def test_parts_of_a_batch_equal_the_batch():
  params = toy_models.params(MODEL.config, scale=0.3)
  batch = jax.tree.map(jnp.asarray, _batch(8))
  loss = conftest.make_loss(ALL)
  value, gradients = _gradient(loss, params, batch)
  temporary = [
    jax.jit(lambda p, x=x: _gradient(loss, p, batch, x))
    .lower(params)
    .compile()
    .memory_analysis()
    .temp_size_in_bytes
    for x in (1, 4)
  ]
  assert temporary[1] < temporary[0] / 2
  again, others = _gradient(loss, params, batch, 4)
  assert float(again) == pytest.approx(float(value), rel=1e-6)
  scale = max(float(abs(x).max()) for x in jax.tree.leaves(gradients))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * scale),
    others,
    gradients,
  )


def test_packed_texts_have_the_vectors_of_texts_alone():
  params = toy_models.params(MODEL.config, scale=0.3)
  batch = jax.tree.map(jnp.asarray, _batch(3, filler=0))
  loss = infonce.InfoNce()
  packed = jax.jit(lambda p, b: loss.predict(MODEL, p, b).hidden)(params, batch)
  norms = np.linalg.norm(packed, axis=-1)
  np.testing.assert_allclose(norms, batch['roles'] > 0, atol=1e-6)
  for row in range(3):
    mask = np.asarray(batch['encoder_segments'][row]) == 2
    ids = batch['encoder_tokens'][row][mask][None]
    fields = ids, jnp.ones_like(ids), jnp.arange(ids.shape[1])[None]
    states = MODEL.architecture.encode(MODEL, params, fields)
    vector = states.mean(1)
    for i in range(2):
      vector @= params['decoder']['embedding'][f'projection_{i}']
    vector /= jnp.linalg.norm(vector)
    np.testing.assert_allclose(packed[row, 1], vector[0], atol=1e-5)


@pytest.mark.long
@pytest.mark.sharded
@pytest.mark.parametrize('microbatches', [1, 2])
def test_sharded_steps_equal_one_device(microbatches):
  loss = conftest.make_loss(f'{ALL},learn_temperature=True')
  config = embedding_recipe.with_temperature(MODEL.config, loss)
  model = build.build(config)
  batch = _batch(16)
  results = []
  for mesh in (
    mesh_lib.MeshConfig(fsdp=1),
    mesh_lib.MeshConfig(replica=2, fsdp=2, sequence=1, tensor=2),
    mesh_lib.MeshConfig(replica=1, fsdp=4, sequence=2, tensor=1),
  ):
    trainer = conftest.Trainer(
      mesh, loss=loss, model=model, axes=AXES, microbatches=microbatches
    )
    params = toy_models.params(model.config, scale=0.3)
    state = trainer.init(trainer.where.place(lambda p: p, params))
    for _ in range(2):
      state, metrics = trainer.step(state, batch)
    results.append((float(metrics['loss']), conftest.host(state.params)))
  value, expected = results[0]
  before = conftest.host(toy_models.params(model.config, scale=0.3))
  moved = 'decoder/embedding/log_temperature'
  assert expected[moved] != before[moved]
  for other, params in results[1:]:
    assert other == pytest.approx(value, rel=1e-5)
    for path, leaf in expected.items():
      np.testing.assert_allclose(params[path], leaf, atol=2e-5, err_msg=path)


@pytest.mark.long
def test_training_finds_positives_and_a_teacher_is_learnt():
  loss = infonce.InfoNce(temperature=0.1)
  trainer = conftest.Trainer(loss=loss, model=MODEL, axes=AXES, rate=3e-2)
  state = trainer.init(trainer.where.place(MODEL.init, jax.random.key(0)))
  batch = _batch(8)
  evaluator = perplexity.Evaluator(
    trainer.where, query_metrics.Queries(loss), AXES
  )
  first = evaluator(state.params, [batch])
  for _ in range(15):
    state, metrics = trainer.step(state, batch)
  last = evaluator(state.params, [batch])
  assert last.values['accuracy'] > 0.9 > first.values['accuracy']
  assert last.weight == 14 == metrics['weight']
  assert last.values['loss'] < first.values['loss'] / 2
  teacher = jax.tree.map(jnp.copy, state.params)
  distils = infonce.InfoNce(teacher=1.0)
  arrays = jax.tree.map(jnp.asarray, batch)
  plain = infonce.InfoNce()
  for params, least in ((teacher, 0), (MODEL.init(jax.random.key(1)), 5)):
    values = [
      float(
        conftest.sums(x, MODEL, params, arrays, {'teacher': teacher})['loss']
      )
      for x in (distils, plain)
    ]
    assert values[0] - values[1] >= least - 1e-4
    assert (least > 0) == (values[0] - values[1] > 1e-3)


@pytest.mark.long
def test_adapters_start_at_the_loss_of_their_base_and_learn():
  loss = infonce.InfoNce(temperature=0.1)
  lora = adapters_lib.Options(rank=4, base='int8')
  trainer = conftest.Trainer(
    loss=loss, model=MODEL, axes=AXES, microbatches=2, lora=lora
  )
  adapters = trainer.where.adapters
  params = traverse_util.flatten_dict(MODEL.init(jax.random.key(0)), sep='/')
  base = {p: adapters.freeze(p, params[p], 'float32') for p in adapters.frozen}
  trainer.base = traverse_util.unflatten_dict(base, sep='/')
  batch = _batch(8)
  head = {path: params[path] for path in adapters.full}  # Trains whole.
  dense = {path: kernel_forms.dense(x) for path, x in base.items()} | head
  terms = conftest.sums(
    loss,
    MODEL,
    traverse_util.unflatten_dict(dense, sep='/'),
    jax.tree.map(jnp.asarray, batch),
  )
  start = trainer.where.place(adapters.init, jax.random.key(1))
  start = traverse_util.flatten_dict(start, sep='/') | head
  state = trainer.init(traverse_util.unflatten_dict(start, sep='/'))
  metrics = []
  for _ in range(15):
    state, values = trainer.step(state, batch)
    metrics.append(float(values['loss']))
  assert metrics[0] == pytest.approx(float(terms['loss']) / 14, rel=1e-5)
  assert metrics[-1] < metrics[0] / 2


def test_parts_of_a_batch_have_masks_of_their_own():
  options = adapters_lib.Options(4, alpha=8.0, dropout=0.5)
  adapters = adapters_lib.Adapters(MODEL.config, options)
  base = MODEL.init(jax.random.key(0))
  flat = traverse_util.flatten_dict(base, sep='/')
  trained = {
    path: flat[path] if path in flat else jnp.full(info.shape, 0.1)
    for path, info in adapters.table.items()
  }
  trained = traverse_util.unflatten_dict(trained, sep='/')
  # Rows of different parts with the same texts.
  batch = {k: jnp.asarray(x)[jnp.zeros(2, int)] for k, x in _batch(2).items()}
  loss = infonce.InfoNce()
  for key, equal in ((None, True), (jax.random.key(2), False)):
    params = adapters.attach(base, trained, key)
    first, second = loss.predict(MODEL, params, batch, parts=2).hidden
    assert np.allclose(first, second, atol=1e-5) == equal


def _config(**changes):
  config = config_lib.defaults()
  config.loss.kind = 'infonce'
  config.model.kind = 'encoder_only'
  config.model.head.kind = 'embedding'
  config.data.objective = 'embed'
  config.data.source = 'embed:x#q,p'
  config.data.encoder_length, config.data.decoder_length = 16, 0
  for key, value in changes.items():
    config.update_from_flattened_dict({key.replace('__', '.'): value})
  return config


def test_the_configuration_decides_head_and_parts():
  settings = config_lib.load(
    _config(
      train__microbatches=4,
      loss__infonce__learn_temperature=True,
      loss__infonce__temperature=0.1,
      model__head__pooling='last',
      model__head__projections=(64, 32),
      model__head__dimensions=(16, 8),
    ),
    sources=False,
  )
  head = settings.model.decoder.head
  assert (head.sizes(128), head.temperature) == ((32, 16, 8), 0.1)
  assert settings.recipe.rows.compared and not settings.recipe.frozen
  options = objective_names.parse_one('embed:query=a b ').options
  assert embeddings.prompts(options) == {'document': '', 'query': 'a b '}


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'train__batch_size': 1}, 'train.batch_size is 1 .*at least 2'),
    ({'train__eval_batch_size': 1}, 'train.eval_batch_size is 1'),
    ({'model__head__dimensions': (128,)}, 'a vector has 128 numbers'),
    ({'model__head__projections': (0,)}, r'projections is \(0,\)'),
    ({'model__head__pooling': 'max'}, 'must be one of mean, last, first'),
    ({'model__head__kind': 'tokens'}, 'only_?.* with config.model.head.kind'),
    ({'model__kind': 'encoder_decoder'}, "init.mode='adapt'"),
    ({'loss__infonce__vectors': 1.0}, 'vectors=0; to be .* the 128'),
    (
      {
        'loss__infonce__vectors': 1.0,
        'data__objective': 'embed:vectors=64',
      },
      'vectors=64; to be .* the 128',
    ),
    ({'loss__infonce__scores': 1.0}, "'embed:x#q,p' lacks scores=FIELD"),
    ({'data__source': 'embed:x#q,p,scores=s'}, 'has scores=FIELD; give'),
    (
      {
        'data__source': 'embed:x#q,p,vectors=v',
        'data__objective': 'embed:vectors=128',
      },
      'has vectors=FIELD; give vectors a weight',
    ),
    ({'loss__infonce__temperature': 0.0}, 'temperature is 0.0'),
    ({'loss__kind': 'cross_entropy'}, 'rows have several answers or texts'),
    (
      {
        'data__objective': 'causal_lm',
        'data__source': 'python',
        'model__kind': 'decoder_only',
        'model__head__kind': 'tokens',
        'data__encoder_length': 0,
        'data__decoder_length': 16,
      },
      'no texts to embed',
    ),
  ],
)
def test_bad_input_is_refused(changes, message):
  with pytest.raises(errors.UserError, match=message):
    config_lib.load(_config(**changes), sources=False)


def test_vectors_of_a_teacher_have_the_models_size():
  plain = dataclasses.replace(STACK, head=heads.Embedding())
  teacher = build.build(model_config.DecoderOnlyConfig(plain))
  settings = config_lib.load(_config(loss__infonce__teacher=1.0), sources=False)
  loss = settings.recipe.loss
  assert loss.references == ('teacher',)
  assert teacher.architecture in settings.recipe.frozen['teacher'].accepts
  batch = jax.tree.map(jnp.asarray, _batch(2))
  with pytest.raises(errors.UserError, match="16 numbers and the model's 24"):
    jax.eval_shape(
      lambda a, b: conftest.sums(
        loss, MODEL, a, batch, {'teacher': (teacher, b)}
      ),
      toy_models.params(MODEL.config),
      toy_models.params(teacher.config),
    )
