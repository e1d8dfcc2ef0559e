"""Compute of a run and its ancestors, each counted once."""

import json

from encdec_adapt.telemetry import compute_cost

TOTALS = ('target_tokens', 'total_tokens', 'flops', 'seconds')


def _finish(folder, size, *sources):
  """Writes the summary of a run with `size` as all totals; returns it."""
  folder.mkdir()
  cost = compute_cost.Cost(size, **dict.fromkeys(TOTALS, float(size)))
  found = compute_cost.read_sources({str(x): x for x in sources})
  summary = compute_cost.summarise(folder, {'steps': 7}, cost, found)
  (folder / compute_cost.SUMMARY).write_text(json.dumps(summary))
  return summary


def test_a_common_ancestor_counts_once(tmp_path):
  _finish(tmp_path / 'base', 1000)
  _finish(tmp_path / 'encoder', 100, tmp_path / 'base')
  _finish(tmp_path / 'decoder', 10, tmp_path / 'base')
  # The decoder's source is the teacher too.
  sources = [tmp_path / name for name in ('encoder', 'decoder', 'decoder')]
  summary = _finish(tmp_path / 'pair', 1, *sources)
  assert summary['inclusive'] == dict.fromkeys(TOTALS, 1111)
  assert summary['target_tokens'] == 1


def test_sources_count_once_by_any_name_and_unknown_ones_are_named(
  tmp_path, monkeypatch
):
  (tmp_path / 'running').mkdir()
  _finish(tmp_path / 'base', 10)
  monkeypatch.chdir(tmp_path)
  sources = ('running', 'base', tmp_path / 'base', './base/', 'running')
  summary = _finish(tmp_path / 'pair', 1, *sources)
  assert summary['not_counted'] == ['running']
  assert summary['inclusive'] == dict.fromkeys(TOTALS, 11)
