"""The source `documents`: questions on six documents, as `--retrieval` asks.

    config.data.source = 'documents'  # or 'documents:passages'
    config.data.seqio_modules = ('encdec_adapt.configs.documents',)

A document is a fact, the code of a thing, without text around it; `--retrieval`
has ten and twenty documents, with text. A question asks for one of the six
codes, which are drawn for every question, so that the answer is only in
its documents. A model that copies a random code is right in one of six
questions. The question follows the documents, or with `documents:passages` has
them as passages (objective `passages`). There are 12,000 questions.

This module imports neither TensorFlow nor SeqIO nor jax.
"""

from collections.abc import Iterator
import functools
import json

import numpy as np

from encdec_adapt.base import option_strings
from encdec_adapt.data.sources import document_source
from encdec_adapt.evaluation.tasks import retrieval_tasks

QUESTIONS = 12_000
DOCUMENTS = 6  # Facts of a question.


@document_source.register('documents')
class DocumentsSource(document_source.Source):
  """`documents`: a question on six facts, and the answer."""

  form = 'documents[:passages]'
  document_kind = 'pairs'

  def __init__(self, name: str, max_bytes: int = 0):
    """Reads the argument; see `document_source.Source`.

    Raises:
      UserError: the argument is another.
    """
    super().__init__(name, max_bytes)
    argument = option_strings.Part('the source', name).partition(':')[1]
    if argument.text not in ('', 'passages'):
      raise argument.error('must be passages, or be left out')
    self._make = functools.partial(_pair, passages=bool(argument))

  def entries(
    self, shard_index: int = 0, num_shards: int = 1
  ) -> Iterator[document_source.Entry]:
    """Yields every n-th question."""
    entries = (
      (str(i), functools.partial(self._make, i)) for i in range(QUESTIONS)
    )
    return self._every(entries, shard_index, num_shards)

  def _content(self) -> Iterator[object]:
    # The first question stands for the others, which differ in the seed.
    yield from (QUESTIONS, self._make(0))


def _pair(seed: int, passages: bool) -> str:
  """Returns JSON of (the facts with a question, answer).

  With `passages` it is (a question, answer, the facts as passages).
  """
  rng = np.random.default_rng(seed)
  things, codes = (x[:DOCUMENTS] for x in retrieval_tasks.draw_facts(rng))
  facts = [*map(retrieval_tasks.fact, things, codes)]
  asked = rng.integers(DOCUMENTS)
  question = f'What is the code of the {things[asked]}?'
  if passages:
    return json.dumps([question, codes[asked], {'documents': facts}])
  inputs = '\n'.join([*facts, question])
  return json.dumps([f'{inputs}\n', codes[asked]])
