"""Labels aligned with tokens, on literal examples."""

import json

import pytest

from encdec_adapt.base import errors
from encdec_adapt.data.sources import text_sources
from encdec_adapt.objectives import framing, objective_names
from tests.objectives import objective_cases


def _make(name, length=16):
  lengths = framing.Lengths(length, 0)
  return objective_names.parse_one(name).make(lengths, objective_cases.LETTERS)


def _pairs(objective, *contents):
  return [
    (bytes(pair.inputs.tolist()).decode(), *map(list, (pair.targets, pair[4])))
    for pair in objective_cases.examples(objective, *contents)
  ]


def test_a_text_has_its_label_at_the_last_token():
  objective = _make('classify:labels=no|yes|3')
  assert _pairs(objective, [['ab', 'c'], 'yes'], [['xy'], 3]) == [
    ('ab\nc', [0, 0, 0, 1], [0, 0, 0, 1]),
    ('xy', [0, 2], [0, 1]),
  ]


def test_a_word_has_its_label_at_the_first_token():
  objective = _make('tag:labels=O|X')
  content = [[['ab', 'cd', 'e']], ['O', 'X', 'X']]
  assert _pairs(objective, content) == [
    ('ab cd e', [0, 0, 1, 0, 0, 1, 0], [1, 0, 1, 0, 0, 1, 0])
  ]


def test_long_examples_are_dropped_or_cut():
  long, short = [['abcdefgh'], 'b'], [['ab'], 'b']
  dropping = _make('classify:labels=a|b', 5)
  assert [text for text, *_ in _pairs(dropping, long, short)] == ['ab']
  assert dropping.counts['dropped'] == 1
  cutting = _make('classify:labels=a|b,too_long=truncate', 5)
  assert _pairs(cutting, long) == [('abcd', [0, 0, 0, 1], [0, 0, 0, 1])]
  words = [[['ab', 'cd', 'ef']], ['b', 'b', 'b']]
  tagging = _make('tag:labels=a|b,too_long=truncate', 5)
  assert _pairs(tagging, words) == [('ab c', [1, 0, 1, 0], [1, 0, 1, 0])]


@pytest.mark.parametrize(
  'name, content, message',
  [
    ('classify:labels=a', [['x'], 'a'], 'at least two'),
    ('classify', [['x'], 'a'], 'at least two'),
    (
      'classify:labels=a|b',
      [['x'], 'c'],
      r"example 0: its label 'c' is none of",
    ),
    ('classify:labels=a|b', [[['x']], 'a'], 'lists of words'),
    ('classify:labels=a|b', [[''], 'a'], 'without tokens'),
    ('tag:labels=a|b', [['x'], 'a'], 'one list of words'),
    ('tag:labels=a|b', [[['x', 'y']], ['a']], '2 words and 1 labels'),
  ],
)
def test_bad_input_is_named(name, content, message):
  with pytest.raises(errors.UserError, match=message):
    _pairs(_make(name), content)


def test_a_source_names_what_is_missing(tmp_path):
  file = tmp_path / 'x.jsonl'
  lines = [{'a': 'x', 'b': 'y', 'label': 1}, {'a': 'x', 'label': 'n'}]
  file.write_text('\n'.join(map(json.dumps, lines)))
  source = text_sources.open_source(f'labels:{file}#a,b,label')
  (_, first), (_, second) = source.entries()
  assert json.loads(first()) == [['x', 'y'], 1]
  with pytest.raises(errors.UserError, match="line 2, has no field 'b' but a"):
    second()
  with pytest.raises(errors.UserError, match='must be fields as in labels'):
    text_sources.open_source(f'labels:{file}#label')
