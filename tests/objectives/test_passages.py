"""Questions with passages as examples and rows."""

import pydoc_data.topics

import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.objectives import framing, objective_names
from encdec_adapt.tokenizers import special_ids, vocabulary_pair
from tests import tiny_tokenizers
from tests.objectives.objective_cases import examples
from tests.tokenizers import t5_files

DOCUMENTS = [
  {'title': None, 'text': 'a dog', 'id': 1},
  {'title': 'Fox', 'text': 'a quick fox ' * 20},
]


@pytest.fixture(scope='module', params=['gemma', 't5'])
def vocabulary(request, tmp_path_factory):
  folder = tmp_path_factory.mktemp(request.param)
  if request.param == 't5':
    return vocabulary_pair.open_vocabulary(
      t5_files.train(folder / 'spiece.model')
    )
  texts = list(pydoc_data.topics.topics.values())[:20]
  return vocabulary_pair.open_vocabulary(
    tiny_tokenizers.save(folder, 'gemma', texts, 600)
  )


def _make(vocabulary, length=40, encoder=80):
  return objective_names.parse_one(f'passages:length={length}').make(
    framing.Lengths(encoder, 16), vocabulary
  )


def test_each_passage_has_the_question_and_is_cut(vocabulary):
  maker = _make(vocabulary)
  (pair,) = examples(maker, ['which?', 'a', {'p': DOCUMENTS, 'more': 1}])
  first = vocabulary.encode('question: which? context: a dog')
  text = f'question: which? title: Fox context: {"a quick fox " * 20}'
  ids, frame = vocabulary.ids, vocabulary.ids.frame
  second = vocabulary.encode(text)[: 40 - ids.frame_size]
  expected = [*frame(first, 'encoder'), *frame(second, 'encoder')]
  assert frame(pair.inputs, 'encoder') == expected
  assert len(frame(second, 'encoder')) == 40
  # Two examples are packed into a row, which `check` accepts.
  kind = objective_names.parse_one('passages').rows
  assert kind.passages == 250
  sides = special_ids.Framing(ids, ids)
  lengths = framing.Lengths(160, 32, ids.frame_size)
  row = framing.stack_rows([kind.frame([pair, pair], lengths, sides)])
  kind.check(row, sides)
  edge = ids.eos if ids.ends_with_eos else ids.bos
  assert np.sum(row['encoder_tokens'] == edge) == 4
  with pytest.raises(ValueError, match='with its only'):
    framing.check_framing(row, sides)


def test_an_encoder_reads_passages_in_its_own_tokens(vocabulary, tmp_path):
  texts = tiny_tokenizers.TEXTS
  other = vocabulary_pair.open_vocabulary(
    tiny_tokenizers.save(tmp_path, 'llama3', texts, 400)
  )
  maker = objective_names.parse_one('passages:length=40').make(
    framing.Lengths(80, 16), vocabulary, encoder_vocabulary=other
  )
  (pair,) = examples(maker, ['q', 'a fox', {'p': ['a dog', 'two']}])
  parts = [f'question: q context: {text}' for text in ('a dog', 'two')]
  first, second = map(other.encode, parts)
  assert pair.inputs.tolist() == [*first, other.bos, *second]
  assert vocabulary.decode(pair.targets) == 'a fox'


@pytest.mark.parametrize(
  'document, words',
  [
    (['q', 'a'], 'no passages; name them as the third field'),
    (['q', 'a', {'p': []}], r'the passages are \[\]; they must be a list'),
    (['q', 'a', {'p': 'text'}], "the passages are 'text'; they must be"),
    (['q', 'a', {'p': ['x', {'title': 'y'}]}], 'passage 2 is .*title'),
    (['q ' * 40, 'a', {'p': ['x']}], 'its question has .* of 40; shorten it'),
    (['q', 'a', {'p': ['x'] * 30}], '1: its 30 passages take .* is 80; raise'),
  ],
)
def test_bad_passages_are_refused(document, words, vocabulary):
  maker = _make(vocabulary)
  good = ['q', 'a', {'p': ['x']}]
  with pytest.raises(errors.UserError, match=words):
    examples(maker, good, document)
  (pair,) = examples(maker, good, document, skips_bad=True)
  assert pair.documents == ('0',) and maker.counts['bad_documents'] == 1
