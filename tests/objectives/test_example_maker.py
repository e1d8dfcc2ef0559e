"""An objective declares its row fields, and all that reads rows follows."""

from types import SimpleNamespace

import jax
from jax import numpy as jnp

from encdec_adapt.data.records import row_codec, row_display
from encdec_adapt.models import build, model_config
from encdec_adapt.objectives import framing
from encdec_adapt.sharding import mesh, placement, rules
from encdec_adapt.tokenizers import vocabulary_pair
from encdec_adapt.training import state, step
from tests import gemma_ids, toy_models, toy_preferences

LENGTHS = framing.Lengths(8, 4)
OBJECTIVE = toy_preferences.OBJECTIVE
DOCUMENTS = [
  ('a', ([10, 11], [12, 1], [13, 14, 1])),
  ('b', ([15], [1], [16, 1])),
]


def _rows():
  maker = OBJECTIVE.maker('preferences', LENGTHS)
  return [[example] for example in maker.examples(DOCUMENTS, None)]


def test_rows_of_two_answers_come_back():
  for row in _rows():
    record = row_codec.encode_row(row, OBJECTIVE.maker)
    ((inputs, targets, rejected, documents),) = row_codec.decode_row(
      record, OBJECTIVE.maker
    )
    assert [x.tolist() for x in (inputs, targets, rejected)] == [
      x.tolist() for x in row[0][:3]
    ]
    assert documents == row[0].documents


def test_two_answers_are_shown():
  one = vocabulary_pair.open_vocabulary(vocabulary_pair.BYTES)
  arrays = [one.encode(text) for text in ('question', 'yes', 'no')]
  record_set = SimpleNamespace(
    read=lambda rows: [[toy_preferences.TwoAnswers(*arrays, ('a',))]],
    spec=SimpleNamespace(objectives=(OBJECTIVE,)),
  )
  opened = vocabulary_pair.Opened(one, one)
  shown = row_display.describe(record_set, opened, [0], colour=False)
  assert [line.split() for line in shown.splitlines()[2:]] == [
    ['inputs', '8', 'question'],
    ['rejected', '2', 'no'],
    ['targets', '3', 'yes'],
  ]


def test_two_answers_are_placed_and_split_into_microbatches():
  framed = framing.stack_rows(
    [
      OBJECTIVE.maker.frame(row, LENGTHS, gemma_ids.FRAMING)
      for row in _rows() * 8
    ]
  )
  assert framed['targets'].shape == (16, 2, 4)
  assert framed['targets'][0].tolist() == [[12, 1, 0, 0], [13, 14, 1, 0]]
  assert framed['weights'].sum(axis=2).tolist() == [[2, 3], [1, 2]] * 8
  devices = mesh.make_mesh(mesh.MeshConfig())
  model = build.build(model_config.DecoderOnlyConfig(toy_models.stack()))
  where = state.Placement(model, devices, rules.RULES['fsdp'])
  placed = step.place_batch(framed, where, OBJECTIVE.maker.axes)
  assert placed['targets'].sharding.spec[1] is None

  def loss(params, part, key):
    del key
    total = jnp.sum(part['weights'] * params['x'])
    return total, {'weight': jnp.sum(part['weights'])}

  shardings = {'x': placement.replicated(devices)}
  with jax.set_mesh(devices):
    gradients, sums = step._accumulate(
      loss,
      {'x': jnp.ones(())},
      placed,
      None,
      2,
      shardings,
      OBJECTIVE.maker.axes,
    )
  assert float(gradients['x']) == float(sums['weight']) == 64
