"""The coverage report on a literal example."""

import dataclasses
import json

from encdec_adapt.adaptation import coverage

COPIED = coverage.Fill('copied', source='source', leaf='decoder/layers/0/w')
EXAMPLE = coverage.Coverage(
  target={
    'decoder/table': (5, 2),
    'decoder/layers/0/w': (2, 2),
    'decoder/layers/1/w': (2, 2),
    'decoder/layers/0/gain': (2,),
    'decoder/layers/1/gain': (2,),
  },
  filled={
    'decoder/table': coverage.Fill('fresh'),
    'decoder/layers/0/w': COPIED,
    'decoder/layers/1/w': dataclasses.replace(
      COPIED, leaf='decoder/layers/1/w'
    ),
    'decoder/layers/0/gain': coverage.Fill('constant', value=-1.0, note='zero'),
    'decoder/layers/1/gain': coverage.Fill('constant', value=-1.0, note='zero'),
  },
  sources={
    'source': {
      'decoder/layers/0/w': (2, 2),
      'decoder/layers/1/w': (2, 2),
      'decoder/table': (5, 2),
    }
  },
  unused={'source': {'decoder/table': 'drawn fresh'}},
  outside={'source': {'eye.a': 'vision', 'eye.b': 'vision', 'c': 'a copy'}},
  changes=('decoder.window is 8, in source 4',),
)


def test_table_joins_layers_with_the_same_fate():
  assert EXAMPLE.table() == (
    'adaptation: 22 parameters, of which 8 copied, 10 fresh, 4 constant\n'
    '  target                   shape   filled\n'
    '  decoder/table            [5, 2]  fresh\n'
    '  decoder/layers/0-1/w     [2, 2]  copied from source'
    ' decoder/layers/*/w\n'
    '  decoder/layers/0-1/gain  [2]     constant -1.0 (zero)\n'
    'source: 2 leaves used, 1 unused\n'
    '  unused         shape   reason\n'
    '  decoder/table  [5, 2]  drawn fresh\n'
    '  not part of the model: eye.a and 1 more (vision)\n'
    '  not part of the model: c (a copy)\n'
    'differs from its source: decoder.window is 8, in source 4'
  )


def test_summary_is_a_line_for_counts_sources_and_changes():
  assert EXAMPLE.summary().splitlines() == [
    'adaptation: 22 parameters, of which 8 copied, 10 fresh, 4 constant',
    'source: 2 leaves used, 1 unused: decoder/table (drawn fresh); eye.a and 1'
    ' more (vision); c (a copy)',
    'differs from its source: decoder.window is 8, in source 4',
    'coverage.json in the work directory has every weight',
  ]


def test_json_has_every_leaf_once():
  saved = json.loads(json.dumps(EXAMPLE.to_json()))
  assert saved['table'] == EXAMPLE.table().splitlines()
  assert saved['parameters'] == {'copied': 8, 'fresh': 10, 'constant': 4}
  assert list(saved['target']) == list(EXAMPLE.target)
  filled = saved['target']['decoder/layers/1/w']
  assert (filled['how'], filled['leaf']) == ('copied', 'decoder/layers/1/w')
  assert saved['not_part_of_the_model'] == EXAMPLE.outside
  first = saved['sources']['source']['decoder/layers/0/w']
  assert first['used'] == ['decoder/layers/0/w'] and first['unused'] is None
  table = saved['sources']['source']['decoder/table']
  assert table['used'] == [] and table['unused'] == 'drawn fresh'
