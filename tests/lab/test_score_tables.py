"""Tables of scores."""

from encdec_adapt.evaluation.results import results_store
from encdec_adapt.lab import score_tables


def test_an_interval_that_is_missing_has_its_reason():
  one = results_store.mean_score('a', 'm', [0.5])
  group = results_store.mean_score('b', 'm', [0.5, 0.25], ['x', 'x'])
  both = results_store.mean_score('c', 'm', [0.5, 0.25], ['x', 'y'])
  # A corpus score is of no single examples.
  corpus = results_store.Score('d', 'bleu', 12.5, None, 2, (12.0, 13.0))
  rows = score_tables.score_rows({'model': [one, group, both, corpus]}, {})
  cells = [row['model'] for row in rows]
  assert cells[:2] == [
    '0.500 (no interval: one example)',
    '0.375 (no interval: one group of documents)',
  ]
  assert cells[2].startswith('0.375 (-') and cells[3] == '12.500'
