"""Texts to embed: sources, rows of several examples, and bad input."""

import json

import numpy as np
import pytest

from encdec_adapt.base import errors
from encdec_adapt.data.making import packing
from encdec_adapt.data.records import row_codec
from encdec_adapt.data.sources import text_sources
from encdec_adapt.objectives import framing, objective_names
from tests import gemma_ids
from tests.objectives.objective_cases import LETTERS, examples


def _make(name, length=16):
  objective = objective_names.parse_one(name)
  return objective, objective.make(framing.Lengths(length, 0), LETTERS)


def test_a_line_is_a_query_with_texts_and_what_a_teacher_says(tmp_path):
  file = tmp_path / 'a.jsonl'
  row = {'q': 'why', 'p': 'so', 'n': ['no', 'nor'], 'm': 'not'}
  row |= {'s': [3, 2, 1, 0], 'v': [[1, 0]] * 5}
  file.write_text(json.dumps(row) + '\n')
  source = text_sources.open_source(f'embed:{file}#q,p,n,m,scores=s,vectors=v')
  (document,) = source.documents()
  texts = ['why', 'so', 'no', 'nor', 'not']
  assert json.loads(document.text) == [texts, row['s'], row['v']]
  assert source.plain(document).text == '\n'.join(texts)
  rows = {'q': 'a', 'p': 'b'}, {'q': 'a', 'p': 'b', 'n': None}
  file.write_text('\n'.join(map(json.dumps, rows)))
  few = text_sources.open_source(f'embed:{file}#q,p,n').documents()
  assert [json.loads(x.text)[0] for x in few] == [['a', 'b']] * 2
  file.write_text('{"q": "x", "p": "y", "n": 5}\n')
  with pytest.raises(errors.UserError, match="5 in 'n', which must be a list"):
    list(text_sources.open_source(f'embed:{file}#q,p,n').documents())
  file.write_text('{"q": "why"}\n')
  with pytest.raises(errors.UserError, match="has no field 'p' but q"):
    list(text_sources.open_source(f'embed:{file}#q,p').documents())
  with pytest.raises(errors.UserError, match='must be fields as in embed:GLOB'):
    text_sources.open_source(f'embed:{file}#q')


def test_rows_hold_texts_of_severalexamples():
  objective, maker = _make('embed:texts=6,query=q:,document=d:')
  made = examples(
    maker,
    [['a', 'b', 'c'], [2.0, 0.0], None],  # 3 texts of 3 tokens.
    [['a', 'x'], [0.5], None],
    [['e', 'f'], [0.0], None],
  )
  lengths = framing.Lengths(32, 0)
  rows = list(packing.pack_pairs(made, objective.rows.capacity(lengths)))
  assert [len(row) for row in rows] == [2, 1]  # Six texts fit, seven do not.
  row = row_codec.decode_row(
    row_codec.encode_row(rows[0], objective.rows), objective.rows
  )
  fields = objective.rows.frame(row, lengths, gemma_ids.FRAMING)
  text = [2, *b'q:a', 2, *b'd:b', 2, *b'd:c', 2, *b'q:a', 2, *b'd:x']
  assert fields['encoder_tokens'].tolist() == text + [0] * 12
  segments = [n for n in (1, 2, 3, 4, 5) for _ in range(4)] + [0] * 12
  assert fields['encoder_segments'].tolist() == segments
  assert fields['encoder_positions'].tolist() == [0, 1, 2, 3] * 5 + [0] * 12
  assert fields['roles'].tolist() == [1, 2, 3, 1, 2, 0]
  assert fields['owners'].tolist() == [0, 0, 0, 3, 3, 0]
  assert fields['weights'].tolist() == [1, 0, 0, 1, 0, 0]
  keys = fields['keys'].tolist()
  assert keys[0] == keys[3] != keys[1] and len({*keys}) == 5
  relevance = [0, 0.8807971, 0.1192029, 0, 1, 0]
  np.testing.assert_allclose(fields['relevance'], relevance, rtol=1e-6)
  batch = framing.stack_rows([fields])
  objective.rows.check(batch, gemma_ids.FRAMING)
  batch['encoder_tokens'][0, 4] = 7
  with pytest.raises(ValueError, match='does not start with BOS'):
    objective.rows.check(batch, gemma_ids.FRAMING)


def test_long_examples_and_many_negatives():
  long = [['abcdefgh', 'xyz', 'abcdef'], None, None]
  _, dropping = _make('embed', 15)
  assert not examples(dropping, long) and dropping.counts['dropped'] == 1
  _, cutting = _make('embed:too_long=truncate', 15)
  (example,) = examples(cutting, long)
  assert example.targets.tolist() == [4, 3, 4]
  objective, few = _make('embed:texts=3,vectors=2')
  vectors = [[1, 0], [0, 1], [1, 1], [2, 2]]
  (example,) = examples(few, [['a', 'b', 'c', 'd'], [3, 2, 1], vectors])
  assert few.counts['negatives_left_out'] == 1
  lengths = framing.Lengths(16, 0)
  row = objective.rows.frame([example], lengths, gemma_ids.FRAMING)
  assert row['vectors'].tolist() == [[1, 0], [0, 1], [1, 1]]


@pytest.mark.parametrize(
  'name, content, message',
  [
    ('embed', [['a', ' '], None, None], "positive is ' ', and has no text"),
    ('embed', [['a', 'b', 5], None, None], 'negative is 5'),
    (
      'embed',
      [['a', 'b'], [1, 2], None],
      r'scores are \[1, 2\]; .*shape \[1\]',
    ),
    ('embed', [['a', 'b'], ['x'], None], 'scores are'),
    ('embed', [['a', 'b'], [{}], None], 'scores are'),
    ('embed', [['a', 'b'], [1e6], None], 'scores are .*up to 65504'),
    ('embed', [['a', 'b'], None, [[1], [2]]], r'vectors are .*shape \[2, 0\]'),
    ('embed:vectors=2', [['a', 'b'], None, None], r'vectors are \[\]'),
    (
      'embed:vectors=3',
      [['a', 'b'], None, [[1, 0], [0, 1]]],
      r'must be numbers of shape \[2, 3\]',
    ),
  ],
)
def test_bad_examples_are_named(name, content, message):
  _, maker = _make(name)
  with pytest.raises(errors.UserError, match=f'example 0: its? .*{message}'):
    examples(maker, content)
  assert not examples(maker, content, skips_bad=True)
  assert maker.counts['bad_documents'] == 1
