"""An objective declares its row fields, and all that reads rows follows."""

from types import SimpleNamespace
from typing import NamedTuple

import jax
from jax import numpy as jnp
import numpy as np

from encdec_adapt.data.records import row_codec, row_display
from encdec_adapt.models import build, model_config
from encdec_adapt.objectives import example_maker, framing
from encdec_adapt.sharding import mesh, placement, rules
from encdec_adapt.tokenizers import vocabulary_pair
from encdec_adapt.training import state, step
from tests import gemma_ids, toy_models

LENGTHS = framing.Lengths(8, 4)


class TwoAnswers(NamedTuple):
  """An example with an answer, and a second one that is worse."""

  inputs: np.ndarray
  targets: np.ndarray
  rejected: np.ndarray
  documents: tuple[str, ...] = ()

  def positions(self, lengths):
    del lengths
    return len(self.inputs) + 1, max(len(self.targets), len(self.rejected))


class Preference(example_maker.ExampleMaker):
  """Frames both answers: decoder fields are [P, 2, T]."""

  fields = (
    example_maker.RowField('inputs', side='encoder'),
    example_maker.RowField('targets'),
    example_maker.RowField('rejected'),
  )
  example = TwoAnswers
  axes = {
    name: ('batch', None, 'length')
    for name in ('decoder_tokens', 'decoder_segments', 'targets', 'weights')
  }

  def examples(self, documents, generator):
    for name, (inputs, *answers) in documents:
      arrays = [np.array(ids, np.int32) for ids in (inputs, *answers)]
      yield TwoAnswers(*arrays, (name,))

  @classmethod
  def frame(cls, examples, lengths, ids, *, teacher=False):
    rows = [
      framing.frame_row(
        [framing.Pair(x.inputs, getattr(x, name)) for x in examples],
        lengths,
        ids,
      )
      for name in ('targets', 'rejected')
    ]
    both = {name: np.stack([row[name] for row in rows]) for name in cls.axes}
    return {'encoder_tokens': rows[0]['encoder_tokens'], **both}


OBJECTIVE = example_maker.Objective('preference', Preference, {})
DOCUMENTS = [
  ('a', ([10, 11], [12, 1], [13, 14, 1])),
  ('b', ([15], [1], [16, 1])),
]


def _rows():
  maker = Preference('preference', LENGTHS)
  return [[example] for example in maker.examples(DOCUMENTS, None)]


def test_rows_of_two_answers_come_back():
  for row in _rows():
    record = row_codec.encode_row(row, Preference)
    ((inputs, targets, rejected, documents),) = row_codec.decode_row(
      record, Preference
    )
    assert [x.tolist() for x in (inputs, targets, rejected)] == [
      x.tolist() for x in row[0][:3]
    ]
    assert documents == row[0].documents


def test_two_answers_are_shown():
  one = vocabulary_pair.open_vocabulary(vocabulary_pair.BYTES)
  arrays = [one.encode(text) for text in ('question', 'yes', 'no')]
  record_set = SimpleNamespace(
    read=lambda rows: [[TwoAnswers(*arrays, ('a',))]],
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
      loss, {'x': jnp.ones(())}, placed, None, 2, shardings, Preference.axes
    )
  assert float(gradients['x']) == float(sums['weight']) == 64
