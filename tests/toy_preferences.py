"""An objective of two answers, as a preference loss needs it."""

from typing import NamedTuple

import numpy as np

from encdec_adapt.objectives import example_maker, framing


class TwoAnswers(NamedTuple):
  """An example with an answer, and a second one that is worse."""

  inputs: np.ndarray
  targets: np.ndarray
  rejected: np.ndarray
  documents: tuple[str, ...] = ()

  def positions(self, lengths):
    del lengths
    return len(self.inputs) + 1, max(len(self.targets), len(self.rejected))


class Preferences(example_maker.ExampleMaker):
  """Frames a row for each answer: fields of a batch are [P, 2, L]."""

  fields = (
    example_maker.RowField('inputs', side='encoder'),
    example_maker.RowField('targets'),
    example_maker.RowField('rejected'),
  )
  example = TwoAnswers
  axes = {
    name: ('batch', None, 'length')
    for name in ('targets', 'weights', 'teacher_index')
    + tuple(
      f'{side}_{field}'
      for side in ('encoder', 'decoder', 'teacher')
      for field in ('tokens', 'segments', 'positions')
    )
  }

  def examples(self, documents, generator):
    for name, (inputs, *answers) in documents:
      arrays = [np.array(ids, np.int32) for ids in (inputs, *answers)]
      yield TwoAnswers(*arrays, (name,))

  @classmethod
  def frame(cls, examples, lengths, ids, *, teacher=False):
    answers = (
      [framing.Pair(x.inputs, getattr(x, name)) for x in examples]
      for name in ('targets', 'rejected')
    )
    return framing.stack_rows(
      [framing.frame_row(x, lengths, ids, teacher=teacher) for x in answers]
    )

  @classmethod
  def check(cls, rows, ids, **options):
    for answer in range(2):
      framing.check_framing(
        {name: rows[name][:, answer] for name in rows}, ids, **options
      )


OBJECTIVE = example_maker.Objective('preferences', Preferences, {})
