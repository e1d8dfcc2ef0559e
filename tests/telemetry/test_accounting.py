"""What a run cost with all that it was made from, each counted once."""

import json

from encdec_adapt.telemetry import accounting


def _finish(folder, size, *sources):
  """Summary of a run whose totals are multiples of `size`."""
  folder.mkdir()
  cost = accounting.Cost(
    rows=size,
    target_tokens=2.0 * size,
    total_tokens=3.0 * size,
    flops=4.0 * size,
    seconds=5.0 * size,
  )
  found = accounting.read_sources(str(source) for source in sources)
  summary = accounting.summarise(folder, {'steps': 7}, cost, found)
  (folder / accounting.SUMMARY).write_text(json.dumps(summary))
  return summary


def _totals(size):
  return {
    'target_tokens': 2 * size,
    'total_tokens': 3 * size,
    'flops': 4 * size,
    'seconds': 5 * size,
  }


def test_a_source_of_two_sources_counts_once(tmp_path):
  _finish(tmp_path / 'base', 1000)
  _finish(tmp_path / 'encoder', 100, tmp_path / 'base')
  _finish(tmp_path / 'decoder', 10, tmp_path / 'base')
  # The decoder's source is the teacher too.
  sources = [tmp_path / name for name in ('encoder', 'decoder', 'decoder')]
  summary = _finish(tmp_path / 'pair', 1, *sources)
  assert summary['inclusive'] == _totals(1111)
  assert summary['target_tokens'] == 2


def test_a_source_named_in_two_ways_counts_once(tmp_path, monkeypatch):
  _finish(tmp_path / 'base', 10)
  monkeypatch.chdir(tmp_path)
  summary = _finish(tmp_path / 'pair', 1, 'base', tmp_path / 'base', './base/')
  assert summary['inclusive'] == _totals(11)


def test_a_source_of_which_nothing_is_known_is_left_out_and_named(tmp_path):
  (tmp_path / 'going').mkdir()
  _finish(tmp_path / 'base', 10)
  sources = [tmp_path / name for name in ('going', 'base', 'going')]
  summary = _finish(tmp_path / 'pair', 1, *sources)
  assert summary['not_counted'] == [str(tmp_path / 'going')]
  assert summary['inclusive'] == _totals(11)
