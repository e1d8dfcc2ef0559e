"""Strings of options: what is divided, and where an error points."""

import pytest

from encdec_adapt.base import errors, option_strings
from encdec_adapt.data.records import row_rates
from encdec_adapt.data.sources import mixtures, text_sources
from encdec_adapt.evaluation.tasks import text_pairs
from encdec_adapt.objectives import denoising
from encdec_adapt.planner import chips


def test_dividers_in_quotes_do_not_divide():
  part = option_strings.Part('x', r'a:b="1,\",2",c=" | " | d,e"')
  first, second = part.divide(r' \| ')
  assert [option.text for option in first.options()] == [
    r'b="1,\",2"',
    'c=" | "',
  ]
  assert [part.text for part in second.divide(',')] == ['d', 'e"']
  values = option_strings.key_values('x', 'a="1,2",b=3,', {'a': '', 'b': 0})
  assert values == {'a': '1,2', 'b': 3}


def _key_values(text):
  return option_strings.key_values('x', text, {'size': '2b', 'slices': 1})


@pytest.mark.parametrize(
  'read, text, piece, problem',
  [
    (mixtures.parse, 'a +  b@0', 'b@0', 'has weight 0'),
    (mixtures.parse, 'a@2 + b + a', 'a', 'is named twice'),
    (denoising.parse_mixture, 'R:3:0.15 + X:3:5@2', '5', 'must be a DENSITY'),
    (denoising.parse_mixture, 'S:uniform+Q:3:.1', 'Q:3:.1', 'must be MODE'),
    (row_rates.parse, 'rows:1,1; 9=rows:1,x', 'x', 'must be a rate'),
    (row_rates.parse, 'rows:1; 9=rows:1; 8=rows:2', '8', 'must be STEP='),
    (row_rates.parse, 'rows:1, cap=0', '0', 'must be above 0'),
    (_key_values, 'size=9b,slices=two', 'two', 'must be of type int'),
    (_key_values, 'size=9b,slice=2', 'slice=2', 'must be KEY=VALUE of size=2b'),
    (chips.parse, 'v5e:4x0', '0', 'must be at least 1 chip'),
    (chips.parse, 'v5e:4x4x4', '4x4x4', r'must have 2 dimension\(s\)'),
    (chips.parse, 'v9:4x4', 'v9', 'must be one of v4'),
    (text_sources.open_source, 'text:/a#words', 'words', 'must be paragraphs'),
    (text_sources.open_source, 'labels:/a#b', 'b', 'must be fields as in'),
    (
      lambda x: text_pairs.read(x, 1),
      'a.jsonl#b',
      'b',
      'must be fields as in',
    ),
  ],
)
def test_an_error_points_at_its_column(read, text, piece, problem):
  with pytest.raises(errors.UserError) as caught:
    read(text)
  column = text.rindex(piece) + 1
  start = f'is {text!r}; {piece!r} at column {column} '
  assert start in str(caught.value)
  assert caught.match(problem)
